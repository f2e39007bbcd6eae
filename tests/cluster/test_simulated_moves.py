"""Blocks that move between servers in the simulated cluster: the bits of a run in which nothing
ever moved, and broken variants of the protocol that it must catch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from drawn_runs import POLICIES, assert_caught, drawn
from simcluster import Options, Sim, simulate

from zkv import control as c
from zkv_brokers import copies as co
from zkv_brokers import moves as mo
from zkv_brokers import parcels
from zkv_brokers.bases import Bases
from zkv_brokers.contributions import Contributions
from zkv_brokers.live_copy import LiveCopy
from zkv_workers.downloads import Downloads
from zkv_workers.places import Places

SEEDS = 12
MUTANT_SEEDS = 150
MOVING = {"moves": 5, "rebalances": 1, "adds": 1, "drains": 1, "batches": 10}


def moving(seed: int, **fixed: Any) -> Options:
    """Draw a run in which blocks move and servers come and go."""
    made = drawn(seed, **MOVING, **fixed)
    return replace(made, servers=max(2, made.servers), deaths=seed % 2)


def entries(sim: Sim, kind: type[Any]) -> list[Any]:
    """Return the entries of one kind that the log has."""
    return [one for one in sim.router.log if isinstance(one, kind)]


@pytest.mark.parametrize("policy", POLICIES)
def test_without_faults_blocks_move_and_every_batch_is_settled(policy: str) -> None:
    moved = 0
    for seed in range(3):
        sim = simulate(seed, Options(policy=policy, servers=3, batches=15, moves=4))
        moved += sim.router.moves.moved
        assert not sim.router.moves.given_up
        assert sum(len(one.moves) for one in entries(sim, c.Move)) == sim.router.moves.moved
    assert moved > 5


@pytest.mark.parametrize("policy", POLICIES)
def test_with_faults_nothing_is_lost_while_blocks_move_and_servers_come_and_go(policy: str) -> None:
    moved = 0
    for seed in range(SEEDS):
        moved += simulate(seed, moving(seed, policy=policy)).router.moves.moved
    assert moved > SEEDS


def test_bsp_ends_with_the_bits_of_the_run_that_never_moved() -> None:
    still = Options(policy="bsp", servers=3, batches=12, optimizer="adam:lr=0.1")
    for seed in range(4):
        plain = simulate(seed, still)
        moved = simulate(seed, replace(still, moves=5, adds=1, drains=1))
        assert moved.router.moves.moved > 0
        assert len(moved.commits()) == len(plain.commits())
        # Which gradient is whose is drawn in the order of pushes, so their sums alone can be
        # compared here; `simulate` has compared all bits with a replay, which knows no servers.
        assert moved.final("a").sum() == plain.final("a").sum()


def test_values_on_demand_and_views_move_too() -> None:
    for seed in range(SEEDS):
        made = moving(seed, on_demand=(0,), staleness="none", prefetch=0)
        simulate(seed, replace(made, codec_down="int8;small=0;a=none;b=none"))


def test_a_drained_server_ends_and_owns_nothing() -> None:
    ended = 0
    for seed in range(8):
        sim = simulate(seed, Options(servers=3, batches=40, drains=1))
        ended += len(sim.dead)
        owners = {block.server for block in sim.router.layout.blocks.values()}
        assert owners <= sim.router.members.servers.keys()
    assert ended >= 6


def test_a_server_that_joins_gets_its_share() -> None:
    got = 0
    for seed in range(6):
        sim = simulate(seed, Options(servers=2, batches=15, adds=1))
        (fresh,) = sim.router.fleet.joined
        got += any(block.server == fresh for block in sim.router.layout.blocks.values())
    assert got == 6


def test_a_target_that_dies_in_the_middle_of_a_move_costs_nothing() -> None:
    given_up = 0
    for seed in range(40):
        sim = simulate(seed, Options(servers=2, batches=15, adds=1, deaths=1, loss=0.05))
        given_up += sum(sim.router.moves.given_up.values())
    assert given_up > 0


def test_a_target_that_cannot_keep_up_leaves_the_blocks_where_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A copy whose state does not come before too much waits for it begins anew, three times."""
    monkeypatch.setattr(co, "WAITING_BYTES_MAX", 0)
    given_up, moved = 0, 0
    for seed in range(12):
        made = Options(policy="asp", servers=2, batches=30, moves=4, delay_s=0.05)
        sim = simulate(seed, replace(made, compute_s=(0.005, 0.01)))
        given_up += sum(sim.router.moves.given_up.values())
        moved += sim.router.moves.moved
        copies, moves = len(entries(sim, c.Copy)), len(entries(sim, c.Move))
        assert copies >= moves
    assert given_up > 0
    assert moved > 0


# --- tests of the test: each removes one rule ------------------------------------------------


def _copies_do_not_wait_for_older_batches(patch: pytest.MonkeyPatch) -> None:
    """A copy begins though contributions are open that went to the owner alone."""
    patch.setattr(mo.Moves, "waits_for", lambda self: [])


def _the_owner_alone_must_hold(patch: pytest.MonkeyPatch) -> None:
    """A contribution counts although the server that makes a copy does not hold it."""

    def house(self: mo.Moves, number: int, homes: Any) -> None:
        blocks = self._router.layout.blocks_in(number)
        homes.change(self._told, {block.server for block in blocks})

    patch.setattr(mo.Moves, "house", house)


def _copies_miss_what_the_log_does(patch: pytest.MonkeyPatch) -> None:
    """What commits between the copy's place in the log and its arrival change is not in it."""

    def do(self: Any, act: Callable[[], None]) -> None:
        if self.live:
            act()

    patch.setattr(LiveCopy, "do", do)


def _moves_do_not_wait_for_the_update_that_is_foreseen(patch: pytest.MonkeyPatch) -> None:
    """A block moves while values of it are made ahead of the log."""
    patch.setattr(mo.Moves, "_flip_between_updates", mo.Moves._flip)


def _state_stays_behind(patch: pytest.MonkeyPatch) -> None:
    """The optimizer's state does not move."""
    original = parcels.unpack

    def unpack(head_bytes: int, stream: Any, size: int) -> parcels.Unpacked:
        found = original(head_bytes, stream, size)
        for slot in found.state.slots:
            slot[:] = 0
        return found

    patch.setattr(parcels, "unpack", unpack)


def _views_stay_behind(patch: pytest.MonkeyPatch) -> None:
    """The new owner begins a view of its own."""
    original = parcels.unpack

    def unpack(head_bytes: int, stream: Any, size: int) -> parcels.Unpacked:
        found = original(head_bytes, stream, size)
        found.view = None
        return found

    patch.setattr(parcels, "unpack", unpack)


def _bases_stay_behind(patch: pytest.MonkeyPatch) -> None:
    """What old gradients were computed on does not move."""
    patch.setattr(Bases, "join", lambda self, bid, others: None)


def _the_old_owner_waits_for_its_blocks(patch: pytest.MonkeyPatch) -> None:
    """A server waits for gradients of a block that has moved away."""
    patch.setattr(Contributions, "strip", lambda self, bids: [])


def _workers_ask_the_new_owner(patch: pytest.MonkeyPatch) -> None:
    """Values that were granted before a move are asked of the new owner, which never had them."""
    original = Downloads.asked

    def asked(self: Downloads, assembly: Any, incarnation: int, bids: Any) -> Any:
        assembly.homes = {bid: block.server for bid, block in self._layout.blocks.items()}
        return original(self, assembly, incarnation, bids)

    patch.setattr(Downloads, "asked", asked)


def _batches_change_their_placement(patch: pytest.MonkeyPatch) -> None:
    """A contribution goes by whatever placement is known when a block of it is sent."""

    def begun(self: Places, name: Any, grant: int) -> int:
        self._begun[name] = grant, self._owners.placement
        return self._owners.placement

    patch.setattr(Places, "begun", begun)


def _drained_servers_go_at_once(patch: pytest.MonkeyPatch) -> None:
    """A server goes though values of it are still on their way."""
    patch.setattr("zkv_brokers.grants.Grants.idle", True)


def _the_gone_must_hold_too(patch: pytest.MonkeyPatch) -> None:
    """Contributions wait for a server that is dead."""
    patch.setattr("zkv.owners.Homes.without", lambda self, server: None)


MUTANTS = (
    _copies_do_not_wait_for_older_batches,
    _the_owner_alone_must_hold,
    _copies_miss_what_the_log_does,
    _moves_do_not_wait_for_the_update_that_is_foreseen,
    _state_stays_behind,
    _views_stay_behind,
    _bases_stay_behind,
    _the_old_owner_waits_for_its_blocks,
    _workers_ask_the_new_owner,
    _batches_change_their_placement,
    _drained_servers_go_at_once,
    _the_gone_must_hold_too,
)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__.strip("_"))
def test_a_move_without_this_rule_is_caught(
    mutant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    mutant(monkeypatch)
    assert_caught(mutant, MUTANT_SEEDS, lambda at: simulate(at, moving(at, until_s=120.0)))
