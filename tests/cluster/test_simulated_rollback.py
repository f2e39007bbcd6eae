"""Servers that are lost in the simulated cluster, which goes back to its last snapshot.

Whatever is under way, the final bits are those of one process that does what the logs say: the old
one up to the snapshot, and then the new one. And broken variants that must be caught."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import asdict, fields
from typing import Any

import pytest
from drawn_runs import POLICIES, drawn
from msgspec import structs
from simbroker import SimBroker
from simcluster import Options
from simrollback import Lives, simulate

from zkv import control as c
from zkv_brokers.groups import Groups
from zkv_brokers.members import Members, Server
from zkv_brokers.rolling import Rolling
from zkv_brokers.shard import Reset, Shard
from zkv_brokers.snapshots import Snapshots
from zkv_workers import signals as s
from zkv_workers.session import Session
from zkv_workers.way_back import WayBack

SEEDS = 2


def lives(seed: int, **fixed: Any) -> Lives:
    """Draw a run in which servers are lost."""
    own = {one.name for one in fields(Options)}
    given = {name: value for name, value in fixed.items() if name in own}
    made = drawn(seed, **{"batches": 16, "void": 0.0, **given})
    rng = random.Random(seed + 1)
    return Lives(
        **{
            **asdict(made),
            "every": rng.choice(("2updates", "0.2s")),
            "kills": rng.choice((1, 1, 2)),
            "replaced": rng.choice((0.2, 0.8)),
            "asks": rng.choice((0, 0, 1)),
            "rots": rng.choice((0, 0, 1)),
            "broker_restarts": 0,
            "broker_crashes": rng.choice((0, 0, 1, 2)),
            "broker_down_s": 0.8,
            "moves": rng.choice((0, 0, 2)),
            "server_lost_s": 10.0,
            "shocks": rng.choice((0.0, 0.5)),
            "disk_s": rng.choice((0.01, 0.05)),
            **fixed,
        }
    )


@pytest.mark.parametrize("policy", POLICIES)
def test_with_faults_all_go_back_together_and_on_from_there(policy: str) -> None:
    gone_back = 0
    for seed in range(SEEDS):
        sim = simulate(seed, lives(seed, policy=policy))
        gone_back += len(sim.pasts)
    assert gone_back > 0


@pytest.mark.parametrize("policy", ["bsp", "asp"])
def test_each_sample_counts_once_in_each_pass_whatever_was_undone(policy: str) -> None:
    sim = simulate(5, lives(5, policy=policy, samples=143, kills=1, asks=1))
    assert sim.pasts


def test_workers_that_add_up_among_themselves_go_back_too() -> None:
    fixed = {"topology": "ring", "policy": "bsp", "codec": "none", "codec_down": "none"}
    sim = simulate(7, lives(7, **fixed))
    assert sim.pasts


def counted_by_update(seed: int) -> set[int]:
    """Return how many contributions updates have behind a roll-back under BSP."""
    fixed = {"crashes": 0, "uneven": False, "barrier": False, "broker_crashes": 0, "asks": 0}
    options = lives(seed, policy="bsp", workers=3, servers=2, kills=1, plain=0, withdraw=0, **fixed)
    sim = simulate(seed, options)
    assert sim.pasts
    return {len(one.counted) for one in sim.commits()}


def test_under_bsp_those_who_trained_begin_together_again(monkeypatch: pytest.MonkeyPatch) -> None:
    assert counted_by_update(11) == {3}
    # Else who is first begins alone, and the bits are others.
    monkeypatch.setattr(Groups, "_cohort_is_here", lambda self: True)
    assert counted_by_update(11) != {3}


# --- tests of the test: each removes one rule ------------------------------------------------


def _what_was_said_before_counts(patch: pytest.MonkeyPatch) -> None:
    """The broker believes members that speak of the run before."""
    patch.setattr(Rolling, "is_of_old", lambda self, peer, message: isinstance(message, c.WentBack))


def _servers_keep_what_they_hold(patch: pytest.MonkeyPatch) -> None:
    """A server goes on with the shard that it has."""
    patch.setattr(Shard, "take", _without_reset(Shard.take))


def _without_reset(take: Any) -> Any:
    def without(self: Shard, event: Any, now: float) -> Any:
        return [] if isinstance(event, Reset) else take(self, event, now)

    return without


def _workers_are_not_told(patch: pytest.MonkeyPatch) -> None:
    """A worker's session begins anew, and its caller goes on with what it was computing."""
    original = WayBack.begin

    def begin(self: WayBack, message: c.RollBack) -> None:
        original(self, message)
        self.told = None

    patch.setattr(WayBack, "begin", begin)


def _workers_keep_what_they_know(patch: pytest.MonkeyPatch) -> None:
    """A worker's session goes on with its grants, values and layout."""
    patch.setattr(Session, "begin_anew", lambda self: None)


def _what_is_undone_is_told_to_be_in_the_model(patch: pytest.MonkeyPatch) -> None:
    """What was on its way is told to be committed."""
    original = s.Fate.outcome.fget  # type: ignore[attr-defined]

    def outcome(self: s.Fate) -> str:
        found = str(original(self))
        return "committed" if found == "undone" else found

    patch.setattr(s.Fate, "outcome", property(outcome))


def _keys_are_not_waited_for(patch: pytest.MonkeyPatch) -> None:
    """The caller hears of it before the keys are here, and goes on without them."""
    original = WayBack.begin

    def begin(self: WayBack, message: c.RollBack) -> None:
        original(self, message)
        self._missing.clear()

    patch.setattr(WayBack, "begin", begin)


def _numbers_are_given_anew(patch: pytest.MonkeyPatch) -> None:
    """Workers get their numbers as they come, and not those that they had."""
    original = Members.admit

    def admit(self: Members, peer: int, hello: c.WorkerHello) -> Any:
        there = len(self.workers)
        again = any(isinstance(who, Server) for who in self.by_peer.values()) and self.term > 1
        number = {0: 1, 1: 0}.get(there, hello.rank) if again else hello.rank
        return original(self, peer, structs.replace(hello, rank=number))

    patch.setattr(Members, "admit", admit)


def _a_lost_server_is_counted_on(patch: pytest.MonkeyPatch) -> None:
    """The new run is that of all servers that there were."""

    def servers(self: Rolling) -> Any:
        return [(one.peer, one.hello) for one in self._router.members.servers.values()]

    patch.setattr(Rolling, "servers", servers)


def _what_was_undone_is_gone_back_to(patch: pytest.MonkeyPatch) -> None:
    """Snapshots of the run before stay where it would be gone back to next."""

    original = Snapshots.take_over

    def take_over(self: Snapshots, old: Snapshots, name: str) -> None:
        original(self, old, name)
        self.kept = list(old.kept)

    patch.setattr(Snapshots, "take_over", take_over)


def _a_broker_forgets_that_it_went_back(patch: pytest.MonkeyPatch) -> None:
    """The journal goes on with the run before."""
    original = SimBroker._go_back

    def go_back(self: SimBroker, *rest: Any) -> Any:
        begin, self.begin = self.begin, lambda: None  # type: ignore[method-assign]
        try:
            return original(self, *rest)
        finally:
            self.begin = begin  # type: ignore[method-assign]

    patch.setattr(SimBroker, "_go_back", go_back)


MUTANTS: dict[Callable[[pytest.MonkeyPatch], None], tuple[int, dict[str, Any]]] = {
    _what_was_said_before_counts: (
        8,
        {"asks": 3, "kills": 0, "broker_crashes": 0, "policy": "asp", "workers": 4},
    ),
    _servers_keep_what_they_hold: (3, {}),
    _workers_are_not_told: (1, {}),
    _workers_keep_what_they_know: (2, {}),
    _what_is_undone_is_told_to_be_in_the_model: (1, {}),
    _keys_are_not_waited_for: (2, {}),
    _numbers_are_given_anew: (7, {}),
    _a_lost_server_is_counted_on: (2, {}),
    _what_was_undone_is_gone_back_to: (
        28,
        {
            "asks": 4,
            "kills": 1,
            "rots": 0,
            "broker_crashes": 0,
            "every": "4updates",
            "policy": "asp",
        },
    ),
    _a_broker_forgets_that_it_went_back: (2, {"broker_crashes": 1, "shocks": 1.0}),
}
"""Each with the seed of a run in which it shows, and what is fixed there."""


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__.strip("_"))
def test_a_roll_back_without_this_rule_is_caught(
    mutant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    mutant(monkeypatch)
    seed, fixed = MUTANTS[mutant]
    with pytest.raises((AssertionError, ValueError, KeyError)):
        simulate(seed, lives(seed, **fixed))
