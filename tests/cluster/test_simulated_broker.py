"""A broker that dies and goes on from its journal, in the simulated cluster: nothing is lost and
nothing counts twice, whatever was under way. Broken variants have to be caught."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from crashing_brokers import KINDS, run
from drawn_runs import POLICIES, assert_caught
from simbroker import SimBroker
from simcluster import Options, Sim, simulate

from zkv import control as c
from zkv import snapshot as sn
from zkv.link import Link, PeerChanged
from zkv.wire import open_envelope
from zkv_brokers import journal, recovery
from zkv_brokers.ahead import Ahead
from zkv_brokers.hub import Hub
from zkv_brokers.returning import Returning
from zkv_brokers.signals import Action, Send
from zkv_brokers.snapshots import Snapshots

SEEDS = 8
MUTANT_SEEDS = 200


@pytest.mark.parametrize("policy", POLICIES)
def test_under_every_policy_a_broker_that_dies_loses_and_doubles_nothing(policy: str) -> None:
    assert sum(run(seed, policy=policy).broker.crashes for seed in range(SEEDS)) >= SEEDS


@pytest.mark.parametrize("kind", KINDS)
def test_whatever_is_under_way_goes_on_behind_a_broker_that_died(kind: str) -> None:
    assert sum(run(seed, kind).broker.crashes for seed in range(SEEDS)) >= SEEDS


class _Alike(Sim):
    """A run whose gradients are the same whatever order they are pushed in."""

    def next_token(self, rank: int, batch: int) -> int:
        return 100 * rank + batch


def test_bsp_ends_with_the_bits_of_the_run_that_was_never_interrupted() -> None:
    quiet = Options(policy="bsp", servers=2, batches=12, optimizer="adam:lr=0.1")
    for streaming in (False, True):
        calm = replace(quiet, streaming=streaming)
        plain = _Alike(3, calm).run()
        plain.check()
        for crashes in range(1, 5):
            sim = _Alike(3, replace(calm, broker_crashes=crashes, broker_down_s=0.4)).run()
            sim.check()
            assert sim.broker.crashes > 0
            assert len(sim.commits()) == len(plain.commits()) == 12
            for key in ("v", "w"):
                assert np.array_equal(sim.final(key), plain.final(key))


def saving(seed: int) -> Sim:
    """Run a cluster whose broker dies while snapshots are taken; see that none is left half done:
    each one that was cut is there, or has failed, or was cut just now."""
    sim = run(seed, "snapshots")
    until = sim.now + 30.0
    while sim.events[0][0] < until:
        sim.now, _, action = heapq.heappop(sim.events)
        action()
    plain, there = sim.router.snapshots.plain(), len(sim.manifests())
    cut = sum(isinstance(entry, c.Snapshot) for entry in sim.router.log)
    taking = plain["taking"] is not None
    if taking:
        waited = sim.router.hub.now - sim.router.snapshots._taking.began
        assert waited < 15.0, f"a snapshot is never completed; {sim.story()}"
    assert plain["taken"] <= there <= plain["taken"] + taking, sim.story()
    assert plain["taken"] + plain["failed_tries"] >= cut - taking, sim.story()
    for manifest in sim.manifests():
        files = sim.disk[manifest.name]
        for part in manifest.parts:
            sn.check_part(part, len(files[part.file]), sn.digest_of(files[part.file]), part.file)
    return sim


def test_a_snapshot_is_whole_or_given_up_whenever_the_broker_dies() -> None:
    runs = [saving(seed) for seed in range(2 * SEEDS)]
    assert sum(one.broker.crashes for one in runs) >= len(runs)
    assert sum(len(one.manifests()) for one in runs) > 2 * len(runs)
    assert any(one.router.snapshots.plain()["failed_tries"] for one in runs)


@pytest.mark.parametrize("policy", ["bsp", "asp", "k-bsp:2"])
def test_a_run_that_began_from_a_snapshot_goes_on_behind_a_broker_that_died(policy: str) -> None:
    crashes = 0
    for seed in range(SEEDS):
        quiet = Options(policy=policy, servers=2, batches=10, every="3updates")
        before = simulate(seed, quiet)
        manifest = before.manifests()[-1]
        options = replace(quiet, servers=3, broker_crashes=3, broker_down_s=0.5, disk_s=0.2)
        sim = simulate(seed + 1000, options, (before, manifest))
        crashes += sim.broker.crashes
        assert sim.commits()[0].version == manifest.version + 1
    assert crashes >= SEEDS


def test_numbers_of_lives_and_processes_are_never_given_again() -> None:
    for seed in range(SEEDS):
        sim = run(seed, crashes=2, restart=True, broker_crashes=3)
        lives = [w.session.member.incarnation for w in sim.workers.values() if w.session.member]
        assert len(set(lives)) == len(lives)
        grants = [
            (entry.incarnation, entry.group, entry.grant)
            for entry in sim.router.log
            if isinstance(entry, c.Grant)
        ]
        assert len(set(grants)) == len(grants)


# --- tests of the test: each removes one rule ------------------------------------------------


def _nothing_is_safe_before_it_is_sent(patch: pytest.MonkeyPatch) -> None:
    """What was heard is written down some time later (rule 1)."""
    patch.setattr(recovery.Turns, "must_be_kept", staticmethod(lambda actions: False))


def _acknowledgements_promise_nothing(patch: pytest.MonkeyPatch) -> None:
    """What was heard is written down only if something is said of it beside a receipt."""

    def says(actions: Sequence[Action]) -> bool:
        frames = [action.frame for action in actions if isinstance(action, Send)]
        return any(len(open_envelope(frame).messages) > 1 for frame in frames)

    patch.setattr(recovery.Turns, "must_be_kept", staticmethod(says))


def _a_broker_of_the_past_may_speak(patch: pytest.MonkeyPatch) -> None:
    """A broker that was stopped goes on though another one has its journal."""
    patch.setattr(SimBroker, "keeps", lambda self, router: True)


def _links_begin_anew(patch: pytest.MonkeyPatch) -> None:
    """What had been said, and what had been heard, is not known to the links of the next life."""
    original = Hub.restart

    def restart(self: Hub, instance: int) -> None:
        for link in self._links.values():
            link._fresh()
        original(self, instance)

    patch.setattr(Hub, "restart", restart)


def _what_was_under_way_is_not_said_again(patch: pytest.MonkeyPatch) -> None:
    """Finish, Held and Settled that had not arrived are not sent again in the next life."""

    def again(self: Link) -> None:
        self._first_unacked += len(self._unacked)
        self._unacked.clear()
        self._sizes.clear()
        self._sent_up_to, self._resend_at = self._first_unacked - 1, None

    patch.setattr(Link, "again", again)


def _returned_brokers_are_taken_for_new_ones(patch: pytest.MonkeyPatch) -> None:
    """Members do not see that a broker has come back with what it knew."""
    original = Link._changed

    def changed(self: Link, packet: c.Packet) -> PeerChanged:
        self._peer_origin = b""
        return original(self, packet)

    patch.setattr(Link, "_changed", changed)


def _broken_on_return(patch: pytest.MonkeyPatch, breaks: Callable[[Any], None]) -> None:
    original = Returning.begin

    def begin(self: Returning, term: int, instance: int) -> None:
        original(self, term, instance)
        breaks(self._router)

    patch.setattr(Returning, "begin", begin)


def _incarnations_are_given_again(patch: pytest.MonkeyPatch) -> None:
    """The next life counts its members from the beginning, in the first one's term."""

    def breaks(router: Any) -> None:
        router.members.term, router.members._count = 1, 0

    _broken_on_return(patch, breaks)


def _samples_that_are_out_are_forgotten(patch: pytest.MonkeyPatch) -> None:
    """What is dealt out does not come back, and is not counted (draws)."""

    def breaks(router: Any) -> None:
        if router.groups.draws.pool is not None:
            router.groups.draws.pool._fresh = 0

    _broken_on_return(patch, breaks)


def _the_logs_end_is_sent_again(patch: pytest.MonkeyPatch) -> None:
    """What servers were sent of the log is not known to the next life."""

    def breaks(router: Any) -> None:
        for server in router.members.servers.values():
            server.index_sent = max(0, server.index_sent - 1)

    _broken_on_return(patch, breaks)


def _what_is_foreseen_is_forgotten(patch: pytest.MonkeyPatch) -> None:
    """Grants ahead of the log are out, and the next life does not know it."""

    def breaks(router: Any) -> None:
        if router.groups.model is not None:
            router.groups.model.ahead = Ahead()

    _broken_on_return(patch, breaks)


def _held_is_forgotten(patch: pytest.MonkeyPatch) -> None:
    """Contributions that servers have reported are not known to the next life."""

    def breaks(router: Any) -> None:
        for group in router.groups.by_number.values():
            for arrival in group.arrivals.values():
                arrival.held.clear()

    _broken_on_return(patch, breaks)


def _a_torn_record_is_taken(patch: pytest.MonkeyPatch) -> None:
    """What was being written when the broker died is read as if it were whole."""
    original = journal._record

    def record(file: bytes, at: int, number: int) -> bytes | None:
        return original(file, at, number) or (file[at + journal.HEAD_BYTES :] or None)

    patch.setattr(journal, "_record", record)


def _what_was_to_be_done_with_files_is_forgotten(patch: pytest.MonkeyPatch) -> None:
    """A manifest that was being written is not written again."""
    patch.setattr(Snapshots, "again", lambda self: None)


def _snapshots_are_forgotten(patch: pytest.MonkeyPatch) -> None:
    """The next life does not know that a snapshot is on its way."""

    def breaks(router: Any) -> None:
        router.snapshots._taking = None

    _broken_on_return(patch, breaks)


SAVING_MUTANTS = (
    _what_was_to_be_done_with_files_is_forgotten,
    _snapshots_are_forgotten,
)


@pytest.mark.parametrize("mutant", SAVING_MUTANTS, ids=lambda mutant: mutant.__name__.strip("_"))
def test_a_recovery_of_snapshots_without_this_rule_is_caught(
    mutant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    mutant(monkeypatch)
    assert_caught(mutant, MUTANT_SEEDS, saving)


MUTANTS = {
    _nothing_is_safe_before_it_is_sent: "",
    _acknowledgements_promise_nothing: "",
    _a_broker_of_the_past_may_speak: "",
    _links_begin_anew: "",
    _what_was_under_way_is_not_said_again: "",
    _returned_brokers_are_taken_for_new_ones: "",
    _incarnations_are_given_again: "",
    _samples_that_are_out_are_forgotten: "samples",
    _the_logs_end_is_sent_again: "",
    _what_is_foreseen_is_forgotten: "streaming",
    _held_is_forgotten: "",
    _a_torn_record_is_taken: "",
}
"""Each with the kind of run that is drawn."""


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__.strip("_"))
def test_a_recovery_without_this_rule_is_caught(
    mutant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    mutant(monkeypatch)
    kind = MUTANTS[mutant]
    assert_caught(mutant, MUTANT_SEEDS, lambda seed: run(seed, kind, crashes=1, until_s=60.0))
