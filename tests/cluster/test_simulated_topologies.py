"""Sums among workers in the simulated cluster: laws under faults, and broken variants to be caught.

Every run's bits are compared with a replay, which adds gradients up in the order of the topology
where they came to the servers as sums, and in that of servers where they came apart.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from drawn_runs import assert_caught, drawn
from msgspec import structs
from simcluster import Options, Sim, simulate

from zkv import control as c
from zkv import data_messages as d
from zkv.aggregation_costs import ring_sent_bytes
from zkv.dtypes import Array
from zkv.policy import policy
from zkv.topology import sent_bytes, topology
from zkv.wire import MODEL
from zkv_brokers import meeting
from zkv_brokers.decisions import Arrival, Decisions
from zkv_brokers.grants import Grants
from zkv_brokers.joints import Joints
from zkv_brokers.together import Together as AtBroker
from zkv_workers import joint
from zkv_workers.companions import Companions
from zkv_workers.session import Session
from zkv_workers.together import Together

SEEDS = 80
MUTANT_SEEDS = 300
TOPOLOGIES = ("ring", "hierarchical")


def joined(seed: int, **fixed: Any) -> Options:
    """Draw a run whose updates may be added up among workers."""
    options: dict[str, Any] = {
        "policy": "bsp",
        "workers": (2, 3, 4, 5)[seed // 3 % 4],
        "streaming": True,
        "staleness": "none",
        "codec": "none",
        "codec_down": "none",
        "optimizer": ("momentum:lr=0.1,momentum=0.9", "adam:lr=0.1", "sgd:lr=0.1")[seed % 3],
        "layer_s": (0.0, 0.02)[seed // 2 % 2],
        "topology": TOPOLOGIES[seed % 2],
        "skips": (0, 0, 2)[seed // 5 % 3],
        "samples": (0, 0, 0, 97)[seed // 7 % 4],
        "cut": ((), (), (), (1,))[seed // 11 % 4],
    }
    return drawn(seed, **{**options, **fixed})


def figures(sim: Sim) -> AtBroker:
    model = sim.router.groups.model
    assert model is not None
    return model.together


def test_with_faults_nothing_is_lost_torn_or_counted_twice() -> None:
    updates = apart = 0
    for seed in range(SEEDS):
        sim = simulate(seed, joined(seed))
        updates += figures(sim).updates
        apart += figures(sim).came_apart
        assert len(sim.added_up()) == figures(sim).updates
    # Or nothing of what has to come apart was tried, or of what has not.
    assert updates > SEEDS
    assert apart > SEEDS


def test_while_blocks_move_gradients_go_to_the_servers() -> None:
    """Each goes where its own contribution goes, by an older placement than another's perhaps."""
    updates = apart = moved = 0
    for seed in range(40):
        options = joined(seed, moves=1 + seed % 3, samples=0, cut=(), until_s=300.0)
        sim = simulate(seed, replace(options, servers=max(2, options.servers)))
        updates, apart = updates + figures(sim).updates, apart + figures(sim).came_apart
        moved += sim.router.moves.moved
    assert updates > 20
    assert apart > 20
    assert moved > 20


@pytest.mark.parametrize("name", TOPOLOGIES)
@pytest.mark.parametrize("optimizer", ["sgd:lr=0.1", "momentum:lr=0.1,momentum=0.9", "adam:lr=0.1"])
def test_without_faults_every_update_is_added_up_among_workers(name: str, optimizer: str) -> None:
    sim = simulate(3, Options(topology=name, workers=4, optimizer=optimizer, layer_s=0.01))
    assert figures(sim).updates == len(sim.commits()) == 6
    assert figures(sim).came_apart == 0
    assert figures(sim).why == ""


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_what_each_worker_sends_is_what_the_topology_says(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted payloads: of a ring 2(N − 1)/N of the model's bytes for each, up to two blocks."""
    sent: Counter[tuple[int, int]] = Counter()
    original = Companions.send

    def send(
        self: Companions, who: int, name: Any, message: Any, payload: Array, *order: Any
    ) -> None:
        # The batches of a run without faults are numbered as the versions that they lead to.
        update = message.version if isinstance(message, d.Pass) else message.contribution.batch
        sent[self.incarnation, update] += payload.nbytes
        original(self, who, name, message, payload, *order)

    monkeypatch.setattr(Companions, "send", send)
    sim = simulate(4, Options(topology=name, workers=4))
    layout = sim.router.layout
    sizes = {
        block.bid: block.size * layout.dtype(block).wide.itemsize
        for block in layout.blocks_in(MODEL)
    }
    total = sum(sizes.values())
    told = sent_bytes(topology(name), sim.joint[1], sizes)
    for worker in sim.workers.values():
        assert worker.session.member is not None
        between, _ = told[worker.session.member.number]
        # Who leaves has not handed on all of the last version.
        counted = [sent[worker.session.member.incarnation, update] for update in range(1, 6)]
        assert counted == [between] * 5
        if name == "ring":
            assert abs(between - ring_sent_bytes(total, 4)) <= 2 * max(sizes.values())


def test_values_come_to_each_host_once_and_are_handed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers send a block to who has sent its sum, and to nobody else."""
    sent: list[tuple[int, int, int]] = []
    original = Sim._to_worker

    def to_worker(self: Sim, route: bytes, header: bytes, payload: Array | None) -> None:
        message = d.decode_data(header, None if payload is None else payload.nbytes)
        if isinstance(message, d.Block) and message.group == MODEL:
            sent.append((message.version, message.bid, message.incarnation))
        original(self, route, header, payload)

    monkeypatch.setattr(Sim, "_to_worker", to_worker)
    for name, hosts in (("ring", 1), ("hierarchical", 2)):
        sent.clear()
        sim = simulate(3, Options(topology=name, workers=4))
        blocks = len(sim.router.layout.blocks_in(MODEL))
        for version in range(1, 6):
            assert len({one for one in sent if one[0] == version}) == hosts * blocks


@pytest.fixture
def reasons(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return why updates are not added up among workers, as it is told."""
    told: list[str] = []
    original = AtBroker._separate

    def separate(self: AtBroker, grants: Any, why: str, *more: Any) -> Any:
        told.append(why)
        return original(self, grants, why, *more)

    monkeypatch.setattr(AtBroker, "_separate", separate)
    return told


def test_what_is_not_known_in_advance_goes_to_the_servers_and_says_why(reasons: list[str]) -> None:
    for fixed, why in (
        ({"policy": "ssp:1"}, "not known in advance"),
        ({"policy": "k-bsp:2"}, "not known in advance"),
        ({"optimizer": "sgd:lr=0.1,clip_global_norm=1.0"}, "norm over all keys"),
        ({"codec_down": "int8;small=0;a=none;b=none"}, "come down by a codec"),
        ({"staleness": "dc:0.04"}, "compensated"),
        ({"codec": "int8+ef;small=0;a=none;b=none"}, "encoded"),
        ({"streaming": False}, "streaming"),
        ({"workers": 1}, "nobody"),
        ({"on_demand": (1,)}, "asks servers"),
        ({"topology": "hierarchical", "hosts": 3}, "no two workers are on one host"),
    ):
        reasons.clear()
        options: dict[str, Any] = {"policy": "bsp", "topology": "ring", "workers": 3, **fixed}
        sim = simulate(2, Options(**options))
        assert not sim.added_up()
        assert any(why in one for one in (*reasons, str(meeting.plain(sim.router)["why"])))


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_who_cannot_reach_another_worker_makes_an_update_come_apart(
    name: str, reasons: list[str]
) -> None:
    """After some seconds without an answer; then others are spared that for a while."""
    sim = simulate(6, Options(topology=name, workers=4, cut=(2,), batches=12))
    assert not sim.added_up()
    assert figures(sim).came_apart == 3
    assert sum("does not answer" in note for note in sim.notes) >= 3
    # 2, 4 and 8 versions after those at which it was found out.
    told = [one for one in reasons if "does not answer" in one]
    assert {one.rpartition(" ")[2] for one in told} == {"3", "7", "15"}


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_nobody_waits_for_values_that_were_to_come_from_who_has_left(name: str) -> None:
    """Workers leave one after the other: what they were to hand on is asked for at once, not after
    the 2 s in which it might still come."""
    for seed in range(6):
        sim = simulate(seed, Options(topology=name, workers=4, uneven=True))
        assert figures(sim).updates
        assert sim.now < 2.0, sim.story()


def test_a_policy_that_needs_all_comes_back_and_sums_with_it() -> None:
    for seed in range(12):
        sim = Sim(seed, Options(topology="ring", workers=3, batches=9))
        for at_s, text in ((0.2, "asp"), (0.4, "bsp")):
            sim.later(at_s, partial(_switch, sim, text))
        sim.run()
        sim.check()
        assert sim.added_up()


def _switch(sim: Sim, text: str) -> None:
    if sim.router.groups.model is not None:
        out = Decisions(len(sim.router.log))
        sim.router.groups.switch(policy(text), out)
        sim._do_router(sim.router._flush(out))


# --- broken variants, each without one rule ----------------------------------------------------


def _sums_stay_though_a_member_is_lost(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(AtBroker, "part", lambda self, why, group, out: None)


def _what_was_reported_before_it_came_apart_counts(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(AtBroker, "is_stale", lambda self, incarnation, grant, index: False)


def _servers_keep_sums_that_came_apart(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Joints, "take_apart", lambda self, entry, to_report: list(to_report))


def _each_contribution_counts_when_it_is_held(patch: pytest.MonkeyPatch) -> None:
    def ready(self: AtBroker, arrival: Arrival, group: Any, out: Decisions) -> list[Arrival]:
        return [arrival]

    patch.setattr(AtBroker, "ready", ready)


def _sums_do_not_wait_for_settings(patch: pytest.MonkeyPatch) -> None:
    original = joint.total

    def total(terms: Any) -> joint.Term:
        found = original(terms)
        return joint.Term(found.values, found.of, terms[-1].index, own=found.own)

    patch.setattr(joint, "total", total)


def _sums_are_made_before_weights_are_known(patch: pytest.MonkeyPatch) -> None:
    original = Together._give

    def give(self: Together, mine: Any, bid: int, sealed: Any, weight: float | None) -> None:
        original(self, mine, bid, sealed, 1.0 if weight is None else weight)

    patch.setattr(Together, "_give", give)


def _what_is_handed_on_is_not_to_be_asked_for(patch: pytest.MonkeyPatch) -> None:
    original = Grants.ask

    def ask(self: Grants, message: d.Ask) -> None:
        self._handed_on.clear()
        original(self, message)

    patch.setattr(Grants, "ask", ask)


def _who_is_told_to_separate_sends_what_comes_from_there_on(patch: pytest.MonkeyPatch) -> None:
    original = Together._separate

    def separate(self: Together, mine: Any) -> None:
        mine.blocks.clear()
        original(self, mine)

    patch.setattr(Together, "_separate", separate)


def _values_are_taken_for_those_of_the_newest_grant(patch: pytest.MonkeyPatch) -> None:
    original = Together._take_in

    def take_in(self: Together, grant: int, version: int, *more: Any) -> None:
        newest = max(self._ahead)
        original(self, self._ahead[newest], newest, *more)

    patch.setattr(Together, "_take_in", take_in)


def _who_waits_in_a_barrier_is_waited_for(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(meeting, "at_barrier", lambda router, worker, out: None)


def _late_sums_are_taken(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Joints, "_is_late", lambda self, part, members: False)


def _who_does_not_answer_is_waited_for(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Companions, "lost", lambda self, now: [])


def _gradients_do_not_wait_until_sums_came_apart(patch: pytest.MonkeyPatch) -> None:
    """A worker sends its own before servers know that they have to forget a sum."""
    original = Session._hear

    def hear(self: Session, message: c.Message) -> None:
        if isinstance(message, c.Separate):
            message = structs.replace(message, index=0)
        original(self, message)

    patch.setattr(Session, "_hear", hear)


def _a_block_that_came_apart_is_as_it_was_made(patch: pytest.MonkeyPatch) -> None:
    """Blocks that were made of sums are kept, and others are made of gradients."""

    def come_apart(self: AtBroker, why: str, group: Any, out: Decisions) -> None:
        self.part(why, group, out)

    patch.setattr(AtBroker, "_come_apart", come_apart)


def _an_update_goes_on_without_who_withdraws(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Together, "withdraw", lambda self, grant: None)


MUTANTS = (
    _sums_stay_though_a_member_is_lost,
    _what_was_reported_before_it_came_apart_counts,
    _servers_keep_sums_that_came_apart,
    _each_contribution_counts_when_it_is_held,
    _sums_do_not_wait_for_settings,
    _sums_are_made_before_weights_are_known,
    _what_is_handed_on_is_not_to_be_asked_for,
    _who_is_told_to_separate_sends_what_comes_from_there_on,
    _values_are_taken_for_those_of_the_newest_grant,
    _who_waits_in_a_barrier_is_waited_for,
    _late_sums_are_taken,
    _who_does_not_answer_is_waited_for,
    _gradients_do_not_wait_until_sums_came_apart,
    _a_block_that_came_apart_is_as_it_was_made,
    _an_update_goes_on_without_who_withdraws,
)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_a_broken_variant_is_caught(
    mutant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    mutant(monkeypatch)

    def run(seed: int) -> None:
        simulate(seed, joined(seed, until_s=100.0, window_bytes=1 << 20))

    assert_caught(mutant, MUTANT_SEEDS, run)
