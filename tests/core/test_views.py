"""The model on its way down through a codec: a shard and its receivers, over a network that loses,
repeats and reorders. The expected views are computed beside it, by their formula."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from codec_texts import DOWN
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs
from rig import Rig
from strategies import Model

from zkv import control as c
from zkv import data_messages as d
from zkv.dtypes import Array
from zkv.layout import Layout
from zkv.wire import MODEL, PULLS, BlockSpec, ContributionId, KeyEntry, KeySpec, Segment
from zkv_brokers.decisions import Pins
from zkv_brokers.grants import ToWorker
from zkv_brokers.holdings import NOTHING, Holdings
from zkv_codecs.backend import NUMPY
from zkv_codecs.packed import Packed, seed_of
from zkv_codecs.plan import plan
from zkv_workers.assembly import Assembly
from zkv_workers.downloads import Downloads
from zkv_workers.signals import Narrate, SendData

W, B, C, N = 600, 30, 50, 40
ASK_S = 1.0


def made() -> Model:
    """A matrix and a bucket of two in float32, which codecs are for, and float64, which is not."""
    shapes = {"w": (20, 30), "b": (B,), "c": (C,), "n": (N,)}
    entries = [
        KeyEntry(kid, KeySpec(key, "float64" if key == "n" else "float32", shape))
        for kid, (key, shape) in enumerate(shapes.items())
    ]
    blocks = [
        BlockSpec(0, 0, [Segment(0, 0, W)]),
        BlockSpec(1, 1, [Segment(1, 0, B), Segment(2, 0, C)]),
        BlockSpec(2, 1, [Segment(3, 0, N)]),
    ]
    return Model(entries, blocks, 2)


def numbers(seed: int) -> dict[int, Array]:
    chance = np.random.default_rng(seed)
    sizes = {0: W, 1: B, 2: C, 3: N}
    return {
        kid: chance.standard_normal(size).astype(np.float64 if kid == 3 else np.float32)
        for kid, size in sizes.items()
    }


@dataclass
class Receiver:
    """A worker's downloads, and what the broker knows that it holds."""

    downloads: Downloads
    grant: int = 0
    known: int = -1
    done: bool = True


@dataclass
class Trial:
    """Shards on one side, receivers on the other, and messages in between that wait to be drawn."""

    text: str
    workers: int = 3
    version: int = 0
    now: float = 0.0
    seen: int = 0
    told: list[str] = field(default_factory=list)
    wire: list[tuple[int, d.Block, Array]] = field(default_factory=list)
    finished: list[c.Granted] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rig = Rig(made(), members=range(1, self.workers + 1))
        self.use(self.text)
        self.rig.init(numbers(99))
        self.receivers = {
            who: Receiver(Downloads(made().layout, ask_s=ASK_S))
            for who in range(1, self.workers + 1)
        }
        for who in self.receivers:
            for server in (0, 1):
                self.rig.data(server, d.Greet(who, 1))
        self.views: list[list[Array]] = [[self.exact(bid) for bid in (0, 1, 2)]]

    def use(self, text: str) -> None:
        optimizer = self.rig.spec.to_plain()
        self.rig.log(c.Configure({"model": optimizer, "plain": optimizer, "codec_down": text}))

    def exact(self, bid: int) -> Array:
        return self.rig.cut(self.rig.values(), bid)

    def commit(self) -> None:
        """Make an update, and compute by the formula what the views of the new version are."""
        self.version += 1
        name = ContributionId(1, MODEL, self.version)
        self.rig.push(name, 10_000 + self.version, numbers(self.version))
        self.rig.log(c.Commit(MODEL, self.version, [c.Counted(name, 1.0)], None))
        chosen, layout = plan(self.text), self.rig.layout
        fresh = []
        for bid, view in enumerate(self.views[-1]):
            exact, block = self.exact(bid), layout.blocks[bid]
            one = chosen.for_block(layout, block)
            if bid == 2 or not one.lossy:
                fresh.append(exact)
                continue
            shape = layout.shape(block)
            packed, seed = Packed(exact - view, shape), seed_of(bid + 1, self.version)
            sent, _ = one.encode(packed, one.start(shape), seed, NUMPY)
            fresh.append(view + one.chain.decode(sent.packed, NUMPY).values)
        self.views.append(fresh)

    def begin(self, who: int) -> None:
        """Grant a worker the present version; what it has of an older grant is taken back."""
        one = self.receivers[who]
        if not one.done:
            self.rig.log(c.Discard(who, MODEL, one.grant, -1))
            one.downloads.drop(MODEL, one.grant)
        one.grant, one.done = one.grant + 1, False
        self.rig.log(c.Grant(who, MODEL, one.grant, self.version, [], one.known))
        self.collect()

    def announce(self, who: int) -> None:
        one = self.receivers[who]
        granted = c.Granted(MODEL, one.grant, self.version, True, 0, 0, 0, 0, [], 0)
        blocks = self.rig.layout.blocks_in(MODEL)
        self.complete(who, one.downloads.expect(granted, blocks, self.now))

    def collect(self) -> None:
        """Put what the shards have sent onto the wire, as it is at this moment."""
        for _, action in self.rig.sent[self.seen :]:
            if isinstance(action, ToWorker) and isinstance(action.message, d.Block):
                assert action.payload is not None
                self.wire.append(
                    (action.incarnation, action.message, action.payload.view(np.uint8).copy())
                )
        self.seen = len(self.rig.sent)

    def deliver(self, at: int, *, keep: bool = False) -> None:
        who, message, payload = self.wire[at] if keep else self.wire.pop(at)
        self.complete(who, self.receivers[who].downloads.take(message, payload, self.now))

    def complete(self, who: int, assembly: Assembly | None) -> None:
        one = self.receivers[who]
        if assembly is not None and assembly.complete and not one.done:
            one.done, one.known = True, assembly.granted.version
            self.finished.append(assembly.granted)
            for bid, expected in enumerate(self.views[assembly.granted.version]):
                got = assembly.blocks[bid]
                assert got.tobytes() == expected.tobytes(), (assembly.granted, bid)
        self.answer(who)

    def answer(self, who: int) -> None:
        downloads = self.receivers[who].downloads
        for out in downloads.receipts() + downloads.overdue(who, self.now):
            if isinstance(out, Narrate):
                self.told.append(out.text)
            elif isinstance(out, SendData):
                self.rig.data(out.server, out.message)
        self.collect()

    def settle(self) -> None:
        """Deliver all, ask for what is missing: everything that was granted arrives."""
        for _ in range(20):
            while self.wire:
                self.deliver(0)
            self.now += ASK_S
            for who in self.receivers:
                self.answer(who)
        assert all(one.done for one in self.receivers.values())


STEPS = ("commit", "commit", "grant", "deliver", "deliver", "deliver", "lose", "repeat", "ask")


@given(st.sampled_from(DOWN), st.lists(st.tuples(st.sampled_from(STEPS), st.integers(0, 99))))
@settings(max_examples=60, deadline=None)
def test_every_worker_computes_on_the_view_bit_for_bit(
    text: str, steps: list[tuple[str, int]]
) -> None:
    trial = Trial(f"{text};small=0")
    trial.begin(1)
    trial.announce(1)
    for step, number in steps:
        who = number % 3 + 1
        match step:
            case "commit":
                trial.commit()
            case "grant":
                trial.begin(who)
                if number % 2 and trial.wire:
                    trial.deliver(number % len(trial.wire))  # Before it is announced, maybe.
                trial.announce(who)
            case "ask":
                trial.now += ASK_S / 2
                trial.answer(who)
            case "lose" if trial.wire:
                trial.wire.pop(number % len(trial.wire))
            case _ if trial.wire:
                trial.deliver(number % len(trial.wire), keep=step == "repeat")
    trial.settle()
    assert trial.told == []


def granted(trial: Trial, who: int = 1) -> list[tuple[int, d.Block, Array]]:
    """Grant and return what is sent, not delivered."""
    trial.begin(who)
    sent, trial.wire = trial.wire, []
    trial.announce(who)
    return sent


def finish(trial: Trial, sent: list[tuple[int, d.Block, Array]]) -> None:
    trial.wire += sent
    trial.settle()


def test_the_first_grant_is_values_and_the_next_ones_are_deltas() -> None:
    trial = Trial("int8;small=0")
    finish(trial, granted(trial))
    for updates in (1, 3, 0):
        for _ in range(updates):
            trial.commit()
        sent = granted(trial)
        found = {message.bid: message for _, message, _ in sent}
        assert [len(found[bid].deltas) for bid in (0, 1, 2)] == [updates, updates, 0]
        assert [found[bid].base for bid in (0, 1, 2)] == [trial.version - updates] * 2 + [-1]
        finish(trial, sent)
    for _ in range(9):
        trial.commit()
    assert {message.base for _, message, _ in granted(trial)} == {-1}


def test_reads_get_the_exact_values() -> None:
    trial = Trial("int8;small=0")
    finish(trial, granted(trial))
    trial.commit()
    trial.rig.log(c.Grant(2, PULLS, 1, trial.version, [0, 1, 2, 3]))
    trial.collect()
    for _, message, payload in trial.wire:
        assert message.base == -1
        assert payload.tobytes() == trial.exact(message.bid).tobytes()
        if message.bid != 2:
            assert payload.tobytes() != trial.views[-1][message.bid].tobytes()


def test_another_plan_begins_with_values_and_none_with_the_exact_ones() -> None:
    trial = Trial("int8;small=0")
    finish(trial, granted(trial))
    trial.commit()
    for text in ("none", "int8:512;small=0"):
        trial.use(text)
        trial.text = text
        trial.views[-1] = [trial.exact(bid) for bid in (0, 1, 2)]
        trial.receivers[1].known = -1
        sent = granted(trial)
        assert {message.base for _, message, _ in sent} == {-1}
        finish(trial, sent)
        trial.commit()
        finish(trial, granted(trial))


def test_values_that_another_plan_has_sent_are_not_referred_to() -> None:
    """They are of the same version, but of the view."""
    trial = Trial("int8;small=0")
    finish(trial, granted(trial))
    trial.commit()
    finish(trial, granted(trial))
    trial.use("none")
    trial.text = "none"
    trial.views[-1] = [trial.exact(bid) for bid in (0, 1, 2)]
    trial.receivers[1].known = -1
    for like in (-1, 3):
        sent = granted(trial)
        assert {message.like for _, message, _ in sent} == {like}
        finish(trial, sent)


def test_blocks_that_a_key_has_left_are_not_referred_to() -> None:
    trial = Trial("none")
    finish(trial, granted(trial))
    trial.rig.log(c.Regroup(2, 5, 3))
    trial.rig.layout.regroup(2, 5, 3)
    trial.begin(1)
    found = {message.bid: (message, payload) for _, message, payload in trial.wire}
    assert found[1][0].like == -1
    assert found[1][1].size == 4 * B


@pytest.mark.parametrize("wrong", ["base", "payload", "codec", "version", "dtype"])
def test_what_is_of_no_use_is_asked_for_once_more_as_values(wrong: str) -> None:
    """Nothing is corrupted, no receipt is given, and no question is put without end."""
    trial = Trial("int8;small=0")
    finish(trial, granted(trial))
    trial.commit()
    sent = granted(trial)
    (at,) = [i for i, (_, message, _) in enumerate(sent) if message.bid == (wrong == "dtype") * 2]
    who, message, payload = sent[at]
    match wrong:
        case "base":
            message = structs.replace(message, base=7)
        case "payload":
            payload = payload[:-1]
        case "codec":
            one = structs.replace(message.deltas[0], codec="int7")
            message = structs.replace(message, deltas=(one,))
        case "version":
            message = structs.replace(message, version=2)
        case _:
            message = structs.replace(message, codec="zstd", form=d.Form(N, "", 0, 0))
    answers = []
    for _ in range(3):
        trial.wire = [(who, message, payload)]
        trial.deliver(0)
        answers += trial.wire
    (question,) = trial.told
    assert "asking server" in question
    assert [(one.bid, one.base, one.codec) for _, one, _ in answers] == [(message.bid, -1, "none")]
    rest = [one for i, one in enumerate(sent) if i != at]
    finish(trial, rest + answers)


def test_a_key_that_leaves_its_bucket_leaves_the_rest_with_values() -> None:
    trial = Trial("int8;small=0")
    finish(trial, granted(trial))
    trial.commit()
    trial.rig.log(c.Regroup(2, 5, 3))
    trial.rig.layout.regroup(2, 5, 3)
    trial.begin(1)
    found = {message.bid: (message, payload) for _, message, payload in trial.wire}
    assert found[0][0].base == 0
    assert found[1][0].base == -1
    np.testing.assert_array_equal(found[1][1].view(np.float32), trial.exact(1))
    assert found[1][1].size == 4 * B


def test_a_number_that_is_not_finite_is_sent_as_it_is() -> None:
    trial = Trial("int8;small=0")
    finish(trial, granted(trial))
    store = trial.rig.shards[0].store
    trial.commit()
    store.blocks[0].current.values[3] = np.inf
    store.views.committed(trial.rig.layout.blocks[0], store.blocks[0].current.values)
    sent = granted(trial)
    (payload,) = [payload for _, message, payload in sent if message.bid == 0]
    assert payload.view(np.float32)[3] == np.inf


def test_delay_compensation_begins_where_the_worker_did() -> None:
    trial = Trial("int8;small=0")
    finish(trial, granted(trial))
    plain: dict[str, Any] = trial.rig.spec.to_plain()
    trial.rig.log(
        c.Configure(
            {"model": plain, "plain": plain, "codec_down": trial.text, "staleness": "dc:0.04"}
        )
    )
    trial.commit()
    finish(trial, granted(trial))
    kept = trial.rig.shards[0].commits.bases.values(1, trial.receivers[1].grant, 0)
    assert kept is not None
    assert kept.tobytes() == trial.views[1][0].tobytes()
    assert kept.tobytes() != trial.exact(0).tobytes()
    trial.commit()
    assert kept.tobytes() == trial.views[1][0].tobytes()


def test_what_a_worker_holds_is_known_until_values_mean_something_else() -> None:
    holdings = Holdings(MODEL, Pins(8))
    assert holdings.version(1) == NOTHING
    holdings.granted(1, 1, 3)
    assert holdings.version(1) == NOTHING
    holdings.received(1, 1)
    holdings.granted(2, 1, 4)
    assert (holdings.version(1), holdings.version(2)) == (3, NOTHING)
    holdings.forget()
    holdings.received(2, 1)
    # What was on its way is of the time before.
    assert (holdings.version(1), holdings.version(2)) == (NOTHING, NOTHING)
    holdings.granted(1, 2, 4)
    holdings.received(1, 2)
    holdings.received(1, 2)
    assert holdings.version(1) == 4
    holdings.left(1)
    assert holdings.version(1) == NOTHING


def test_the_layout_that_codecs_are_chosen_by_is_the_models() -> None:
    layout: Layout = made().layout
    chosen = plan("int8;small=0")
    assert [chosen.for_block(layout, layout.blocks[bid]).text for bid in (0, 1)] == ["int8"] * 2
