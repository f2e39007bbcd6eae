"""Copies that stand by in the simulated cluster: servers die, and nothing that was acknowledged is
lost; and broken variants of the protocol that it must catch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from drawn_runs import POLICIES, assert_caught, drawn
from simcluster import Options, Sim, simulate

from zkv import control as c
from zkv.owners import Homes
from zkv_brokers import copies as co
from zkv_brokers import moves as mo
from zkv_brokers import replicas as re
from zkv_brokers.grants import Grants
from zkv_brokers.group import Group
from zkv_brokers.shadows import Shadows
from zkv_workers.downloads import Downloads

SEEDS = 10
MUTANT_SEEDS = 200
LOSING = {"replicas": 1, "isolates": 0.4, "batches": 10}


def losing(seed: int, **fixed: Any) -> Options:
    """Draw a run in which servers are lost, and others come for them."""
    made = drawn(seed, losses=1 + seed % 2, server_lost_s=20.0, **{**LOSING, **fixed})
    return replace(made, servers=max(2, made.servers))


def moving(seed: int, **fixed: Any) -> Options:
    """Draw one in which blocks move, and servers come and go, too."""
    odd = seed % 2
    return losing(seed, moves=2, rebalances=1, adds=odd, drains=odd, **fixed)


def streaming(seed: int, **fixed: Any) -> Options:
    """Draw one with grants ahead of the log, over a slow link."""
    plain = {"codec_down": "none", "staleness": "none", "optimizer": "adam:lr=0.1"}
    ahead = {"streaming": True, "prefetch": seed % 2, "crashes": 0}
    made = losing(seed, policy="bsp", delay_s=0.05, loss=0.0, **plain, **ahead, **fixed)
    return replace(made, losses=3, workers=max(2, made.workers), losing_at="sending")


def clipping(seed: int, **fixed: Any) -> Options:
    """Draw one whose updates wait for the square sums of all servers, over a slow link."""
    clip = {"optimizer": "sgd:lr=0.1,clip_global_norm=1.0", "losing_at": "summing"}
    return losing(seed, delay_s=0.1, **clip, **fixed)


def copying(seed: int, **fixed: Any) -> Options:
    """Draw one in which copies are made while values are on their way."""
    return replace(moving(seed, delay_s=0.05, **fixed), moves=4, losses=1, losing_at="copied")


def taken_over(sim: Sim) -> int:
    """Return how many servers were lost that had blocks."""
    return sim.router.replicas.taken_over


@pytest.mark.parametrize("policy", POLICIES)
def test_copies_take_over_and_nothing_that_was_acknowledged_is_lost(policy: str) -> None:
    lost = sum(taken_over(simulate(seed, losing(seed, policy=policy))) for seed in range(SEEDS))
    assert lost > SEEDS // 2


@pytest.mark.parametrize("policy", POLICIES)
def test_also_while_blocks_move_and_servers_come_and_go(policy: str) -> None:
    lost = sum(taken_over(simulate(seed, moving(seed, policy=policy))) for seed in range(SEEDS))
    assert lost > SEEDS // 2


def test_bsp_ends_with_the_bits_of_the_run_in_which_nobody_died() -> None:
    quiet = Options(policy="bsp", servers=3, batches=20, optimizer="adam:lr=0.1")
    for seed in range(4):
        plain = simulate(seed, quiet)
        lost = simulate(seed, replace(quiet, replicas=1, losses=1))
        assert taken_over(lost) == 1
        assert len(lost.commits()) == len(plain.commits())
        # Which gradient is whose is drawn in the order of pushes: see the test of moves.
        assert lost.final("a").sum() == plain.final("a").sum()


@pytest.mark.parametrize("kind", [streaming, clipping, copying])
def test_what_is_ahead_of_the_log_and_sums_that_are_asked_for_go_on(
    kind: Callable[[int], Options],
) -> None:
    lost = sum(taken_over(simulate(seed, kind(seed))) for seed in range(SEEDS))
    assert lost > 0


def test_values_on_demand_and_views_are_sent_by_who_takes_over() -> None:
    lost = 0
    for seed in range(2 * SEEDS):
        made = losing(seed, on_demand=(0,), staleness="none", prefetch=0)
        lost += taken_over(simulate(seed, made))
    assert lost > SEEDS // 2


@pytest.mark.parametrize("topology", ["ring", "hierarchical"])
def test_sums_among_workers_come_apart_and_go_on(topology: str) -> None:
    plain = {"policy": "bsp", "codec": "none", "codec_down": "none", "staleness": "none"}
    lost = 0
    for seed in range(SEEDS):
        made = losing(seed, topology=topology, optimizer="adam:lr=0.1", **plain)
        lost += taken_over(simulate(seed, made))
    assert lost > SEEDS // 2


def test_a_broker_that_dies_too_goes_on_from_its_journal() -> None:
    lost = 0
    for seed in range(2 * SEEDS):
        made = losing(seed, broker_restarts=0, broker_crashes=1 + seed % 2, snapshots=seed % 3)
        lost += taken_over(simulate(seed, made))
    assert lost > SEEDS // 2


def test_samples_count_once_whoever_dies() -> None:
    for seed in range(SEEDS):
        simulate(seed, losing(seed, samples=60))


def test_nobody_begins_before_every_block_has_a_copy() -> None:
    for seed in range(4):
        sim = simulate(seed, Options(servers=3, batches=3, replicas=1))
        log = list(sim.router.log)
        first = next(at for at, one in enumerate(log) if isinstance(one, c.Grant))
        copied = {bid for one in log[:first] if isinstance(one, c.Copy) for bid, _ in one.moves}
        assert copied == {block.bid for block in sim.router.layout.blocks.values()}
        assert len(sim.router.moves.kept) == len(copied)


def test_every_block_has_a_copy_again_when_another_server_has_come() -> None:
    for seed in range(6):
        sim = simulate(seed, Options(servers=2, batches=80, replicas=1, losses=1))
        assert taken_over(sim) == 1
        members = sim.router.members.servers
        kept = sim.router.moves.kept
        assert kept.keys() == sim.router.layout.blocks.keys()
        assert len(members) == 2
        for bid, block in sim.router.layout.blocks.items():
            assert {block.server, kept[bid]} == members.keys()


def test_a_server_without_a_copy_of_its_blocks_ends_the_run_and_the_reason_names_keys() -> None:
    sim = Sim(1, Options(servers=2, batches=4, replicas=1))
    sim.run()
    server = sim.router.members.servers[0]
    assert sim.router.replicas.hindrance(server) == ""
    mine = [bid for bid, block in sim.router.layout.blocks.items() if block.server == 0]
    for bid in mine:
        del sim.router.moves.kept[bid]
    text = sim.router.replicas.hindrance(server)
    assert f"{len(mine)} of its {len(mine)} blocks had no copy" in text
    keys = {
        sim.router.layout.entries[k].spec.key
        for b in mine
        for k in sim.router.layout.blocks[b].kids
    }
    assert all(repr(key) in text for key in keys)


# --- tests of the test: each removes one rule ------------------------------------------------


def _the_owner_alone_must_hold(patch: pytest.MonkeyPatch) -> None:
    """A contribution counts although the copy does not hold it."""
    original = mo.Moves.house

    def house(self: mo.Moves, number: int, homes: Any) -> None:
        original(self, number, homes)
        blocks = self._router.layout.blocks_in(number)
        homes._changes[-1] = (self._told, frozenset(block.server for block in blocks))

    patch.setattr(mo.Moves, "house", house)


def _grants_are_not_kept(patch: pytest.MonkeyPatch) -> None:
    """Who takes over does not know what the lost server was to send."""
    patch.setattr(Shadows, "taken", lambda self, server: [])


def _what_is_made_ahead_is_not_kept(patch: pytest.MonkeyPatch) -> None:
    """Nor what it was granted to send before that was made."""
    patch.setattr(Shadows, "made", lambda self, bid, version, pinned: None)


def _present_values_are_sent(patch: pytest.MonkeyPatch) -> None:
    """Who takes over sends what a block is now, not what it was when it was granted."""
    original = Grants.resume

    def resume(self: Grants, entry: Any, blocks: Any, pinned: Any) -> None:
        present = {bid: self._store.blocks[bid].current for bid in pinned}
        for one in present.values():
            one.pins += 1
        original(self, entry, blocks, present)

    patch.setattr(Grants, "resume", resume)


def _what_has_arrived_is_not_told(patch: pytest.MonkeyPatch) -> None:
    """Copies stand by although grants are out that only the owner can send."""
    patch.setattr(re.Replicas, "_has_all", lambda self, bid, server, of=None: True)


def _workers_ask_the_dead(patch: pytest.MonkeyPatch) -> None:
    """Values that were granted before are asked of the server that is lost."""
    patch.setattr(Downloads, "lost", lambda self, here, index: [])


def _the_dead_must_hold_too(patch: pytest.MonkeyPatch) -> None:
    """Contributions wait for a server that is lost."""
    patch.setattr(Homes, "without", lambda self, server: None)


def _sums_are_not_asked_for_again(patch: pytest.MonkeyPatch) -> None:
    """An update that waits for a lost server's square sums waits for ever."""
    patch.setattr(Group, "sum_again", lambda self, out: None)


def _former_owners_forget(patch: pytest.MonkeyPatch) -> None:
    """A copy that a former owner keeps misses what the log does next."""
    original = co.Copies._keep

    def keep(self: co.Copies, bid: int, placement: int) -> None:
        original(self, bid, placement)
        self.mirrored[bid].store = None

    patch.setattr(co.Copies, "_keep", keep)


def _moves_go_on_while_a_server_may_be_lost(patch: pytest.MonkeyPatch) -> None:
    """Blocks move away from where they are needed."""
    patch.setattr("zkv_brokers.fleet.Fleet.suspects", lambda self: False)


MUTANTS = (
    _the_owner_alone_must_hold,
    _grants_are_not_kept,
    _what_is_made_ahead_is_not_kept,
    _present_values_are_sent,
    _what_has_arrived_is_not_told,
    _workers_ask_the_dead,
    _the_dead_must_hold_too,
    _sums_are_not_asked_for_again,
    _former_owners_forget,
    _moves_go_on_while_a_server_may_be_lost,
)


FIRST = {_what_is_made_ahead_is_not_kept: 12, _what_has_arrived_is_not_told: 56}
"""Seeds to begin with, where that is not 0: they are known to be caught soon after."""


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__.strip("_"))
def test_copies_without_this_rule_are_caught(
    mutant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    mutant(monkeypatch)
    kinds, first = (moving, streaming, clipping, copying), FIRST.get(mutant, 0)

    def run(at: int) -> Sim:
        return simulate(at, kinds[at % len(kinds)](at, until_s=300.0))

    assert_caught(mutant, MUTANT_SEEDS, lambda at: run(first + at))
