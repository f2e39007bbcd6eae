"""The simulated cluster under many seeds, and broken variants of the protocol that it must
catch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from drawn_runs import POLICIES, drawn
from msgspec import structs
from simcluster import Options, simulate

from zkv import control as c
from zkv.link import Link
from zkv.wire import MODEL
from zkv_brokers import decisions as de
from zkv_brokers import group as g
from zkv_brokers import store as st
from zkv_brokers.catalog import Catalog
from zkv_brokers.contributions import Contributions
from zkv_brokers.parked import Parked
from zkv_brokers.router import Router
from zkv_brokers.shard import Shard
from zkv_codecs.deltas import View
from zkv_workers import downloads
from zkv_workers import session as se
from zkv_workers.downloads import Downloads

SEEDS = 25
MUTANT_SEEDS = 200


@pytest.mark.parametrize("policy", POLICIES)
def test_without_faults_every_batch_is_settled_and_the_bits_are_those_of_a_replay(
    policy: str,
) -> None:
    for seed in range(3):
        sim = simulate(seed, Options(policy=policy))
        counted = [one.contribution for commit in sim.commits() for one in commit.counted]
        applied = {(one.incarnation, one.batch) for one in counted}
        assert len(applied) == len(counted)
        pending = sim.router.groups[MODEL].sync.pending
        told = {name: made.fate for name, made in sim.contributions.items() if made.fate}
        lost = {name for name, fate in told.items() if fate.outcome != "committed"}
        assert not applied & lost
        rest = sim.contributions.keys() - applied - lost
        # A worker leaves without waiting for the fate of its last batch.
        assert all(name[1] == sim.options.batches and name not in told for name in rest)
        assert len(rest) >= len(pending)
        assert len(applied) == 18 or policy.startswith("k-")


@pytest.mark.parametrize("policy", POLICIES)
def test_with_faults_nothing_is_lost_and_nothing_counts_twice(policy: str) -> None:
    for seed in range(SEEDS):
        simulate(seed, drawn(seed, policy=policy))


def test_bsp_gives_the_same_bits_whatever_the_network_does() -> None:
    quiet = simulate(5, Options(policy="bsp"))
    tokens = {(p.worker, p.token) for p in quiet.contributions.values()}
    noisy = simulate(5, Options(policy="bsp", reorder=True, loss=0.05, duplicate=0.3, delay_s=0.02))
    assert len(noisy.commits()) == len(quiet.commits())
    assert len(tokens) == len(noisy.contributions)


def test_a_thousand_updates_over_a_lossy_network_drift_nowhere() -> None:
    """All workers compute on the same bits of each version, those of a replay, though messages with
    gradients and with deltas are lost, doubled and reordered."""
    sim = simulate(
        1,
        Options(
            policy="bsp",
            workers=2,
            batches=1000,
            delay_s=0.001,
            reorder=True,
            loss=0.03,
            duplicate=0.03,
            compute_s=(0.002, 0.003),
            optimizer="sgd:lr=0.1",
            codec="int8+ef;small=0;a=none;b=none",
            codec_down="int8;small=0;a=none;b=none",
            until_s=4000.0,
        ),
    )
    assert len(sim.commits()) == len(sim.seen) == 1000


def test_the_same_seed_gives_the_same_run() -> None:
    one, two = (simulate(11, drawn(11)) for _ in range(2))
    assert one.now == two.now
    assert list(one.router.log) == list(two.router.log)


# --- tests of the test: each removes one rule ------------------------------------------------


def _first_holder_is_enough(patch: pytest.MonkeyPatch) -> None:
    """A contribution counts as soon as one server holds it (not every shard)."""

    def check(self: g.Group, arrival: de.Arrival, out: de.Decisions) -> None:
        if not arrival.arrived and arrival.finished and (arrival.held or arrival.void):
            arrival.held = set(self.servers)
            original(self, arrival, out)

    original = g.Group._check
    patch.setattr(g.Group, "_check", check)


def _pins_are_ignored(patch: pytest.MonkeyPatch) -> None:
    """A commit writes into blocks that somebody still has to receive (rule 3)."""
    patch.setattr(
        st.Pinned, "pins", property(lambda self: 0, lambda self, value: None), raising=False
    )


def _links_do_not_drop_repeats(patch: pytest.MonkeyPatch) -> None:
    """Control messages that come twice are taken twice."""

    def take(self: Link, packet: c.Packet) -> list[c.Message]:
        self._ack_due = True
        self._expected = max(self._expected, packet.number + len(packet.messages))
        return packet.messages

    patch.setattr(Link, "_take", take)


def _links_do_not_send_again(patch: pytest.MonkeyPatch) -> None:
    """Lost control messages stay lost."""
    original = Link.outgoing

    def outgoing(self: Link, now: float) -> list[c.Packet]:
        self._resend_at = None
        return original(self, now)

    patch.setattr(Link, "outgoing", outgoing)


def _epochs_keep_nothing(patch: pytest.MonkeyPatch) -> None:
    """A member's departure drops contributions that had arrived (rule 6)."""
    patch.setattr(g.Group, "kept", lambda self: [])


def _sums_in_order_of_arrival(patch: pytest.MonkeyPatch) -> None:
    """Contributions are summed as they came, not in worker order (rule 15)."""
    original = g.Group._counted

    def counted(self: g.Group, action: Any) -> list[c.Counted]:
        order = list(self.arrivals)
        return sorted(original(self, action), key=lambda one: order.index(one.contribution))

    patch.setattr(g.Group, "_counted", counted)


def _blocks_of_any_grant_will_do(patch: pytest.MonkeyPatch) -> None:
    """The worker takes blocks of an older grant for those of the present one (rule 4)."""
    original = Downloads.take

    def take(self: Downloads, message: Any, payload: Any, now: float) -> Any:
        newest = max((name for name in self._open if name[0] == message.group), default=None)
        if newest is not None:
            message = structs.replace(message, grant=newest[1])
        return original(self, message, payload, now)

    patch.setattr(Downloads, "take", take)


def _settled_pushes_count_again(patch: pytest.MonkeyPatch) -> None:
    """A server and the broker forget what they settled (rule 10)."""
    patch.setattr(Contributions, "is_settled", lambda self, contribution, grant: False)
    patch.setattr(g.Group, "is_over", lambda self, incarnation, grant: False)


def _grants_before_the_values(patch: pytest.MonkeyPatch) -> None:
    """Batches are granted before every shard holds the initial values (rule 7)."""
    original = Catalog.held

    def held(self: Catalog, init: int, server: int) -> Any:
        if init in self.pending:
            self.pending[init].missing.clear()
        return original(self, init, server)

    patch.setattr(Catalog, "held", held)


def _the_gone_still_count(patch: pytest.MonkeyPatch) -> None:
    """A worker that is gone still counts as a member."""
    original = g.Group.leave

    def leave(self: g.Group, number: int, out: de.Decisions) -> None:
        if len(self.incarnations) > 1 and number in self.incarnations:
            return
        original(self, number, out)

    patch.setattr(g.Group, "leave", leave)


def _ahead_of_the_log(patch: pytest.MonkeyPatch) -> None:
    """Data that is ahead of a server's log is dropped, and acknowledged (rule 12)."""

    original = Shard._from_worker

    def from_worker(self: Shard, message: Any, payload: Any, out: Any, now: float) -> None:
        original(self, message, payload, out, now)
        if getattr(message, "index", 0) > self.index:
            self._ack(message.contribution, getattr(message, "bid", -1), out)

    patch.setattr(Parked, "add", lambda self, event: None)
    patch.setattr(Shard, "_from_worker", from_worker)


def _finish_is_the_arrival(patch: pytest.MonkeyPatch) -> None:
    """The worker's word is enough: the servers need not hold anything (rule 2)."""

    def check(self: g.Group, arrival: de.Arrival, out: de.Decisions) -> None:
        arrival.held = set(self.servers)
        original(self, arrival, out)

    original = g.Group._check
    patch.setattr(g.Group, "_check", check)


def _no_resend_of_pushes(patch: pytest.MonkeyPatch) -> None:
    """Blocks that are lost are not sent again."""
    original = se.Uploads.__init__

    def init(self: se.Uploads, layout: Any, *, window_bytes: int, resend_s: float) -> None:
        original(self, layout, window_bytes=window_bytes, resend_s=0.0)

    patch.setattr(se.Uploads, "__init__", init)


def _the_log_is_shuffled(patch: pytest.MonkeyPatch) -> None:
    """The log's entries reach a server in another order than they were decided."""
    original = Router._flush

    def flush(self: Router, out: de.Decisions) -> Any:
        out.entries.reverse()
        return original(self, out)

    patch.setattr(Router, "_flush", flush)


def _views_are_written_in_place(patch: pytest.MonkeyPatch) -> None:
    """A commit changes a view that somebody still has to receive (rule 3)."""
    original = View.advance

    def advance(self: View, *given: Any) -> None:
        before = self.values
        original(self, *given)
        before[:], self.values = self.values, before

    patch.setattr(View, "advance", advance)


def _deltas_are_added_to_whatever_is_held(patch: pytest.MonkeyPatch) -> None:
    """A worker that holds a newer version than is known of it adds all deltas that come."""
    original = downloads.arrived

    def arrived(message: Any, payload: Any, shape: Any, held: Any, backend: Any) -> Any:
        if held is not None and message.base >= 0:
            held = (message.base, held[1])
        return original(message, payload, shape, held, backend)

    patch.setattr(downloads, "arrived", arrived)


MUTANTS = (
    _views_are_written_in_place,
    _deltas_are_added_to_whatever_is_held,
    _first_holder_is_enough,
    _pins_are_ignored,
    _links_do_not_drop_repeats,
    _links_do_not_send_again,
    _epochs_keep_nothing,
    _sums_in_order_of_arrival,
    _blocks_of_any_grant_will_do,
    _settled_pushes_count_again,
    _grants_before_the_values,
    _the_gone_still_count,
    _ahead_of_the_log,
    _finish_is_the_arrival,
    _no_resend_of_pushes,
    _the_log_is_shuffled,
)


def first_seed_that_fails(seeds: range) -> int | None:
    """Return the first seed whose run breaks a law (or breaks down)."""
    for seed in seeds:
        try:
            simulate(seed, drawn(seed, until_s=120.0))
        except Exception:
            return seed
    return None


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__.strip("_"))
def test_a_protocol_without_this_rule_is_caught(
    mutant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    mutant(monkeypatch)
    assert first_seed_that_fails(range(MUTANT_SEEDS)) is not None, mutant.__doc__
