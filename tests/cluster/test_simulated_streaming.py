"""Streaming commits in the simulated cluster: laws under faults, and broken variants to be caught.

What is drawn beside the usual faults makes an update another one than was foreseen: weights that
are said late or change, settings that change, contributions that are withdrawn or refused, and
members that die or leave.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from drawn_runs import assert_caught, drawn
from msgspec import structs
from simcluster import Options, Sim, simulate

from zkv import control as c
from zkv.wire import MODEL, BlockSpec
from zkv_brokers import group as g
from zkv_brokers.ahead import Ahead
from zkv_brokers.decisions import Decisions
from zkv_brokers.grants import Grants
from zkv_brokers.holdings import Holdings
from zkv_brokers.router import Router
from zkv_brokers.store import Pinned, Store
from zkv_brokers.streaming import Streaming
from zkv_workers.cycle import Cycle
from zkv_workers.session import Session

SEEDS = 60
MUTANT_SEEDS = 300


def streamed(seed: int, **fixed: Any) -> Options:
    """Draw a run that streams: BSP without clipping, deltas or stale gradients."""
    options: dict[str, Any] = {
        "policy": "bsp",
        "streaming": True,
        "staleness": "none",
        "codec_down": "none",
        "optimizer": ("momentum:lr=0.1,momentum=0.9", "adam:lr=0.1")[seed % 2],
        "layer_s": (0.0, 0.02)[seed // 2 % 2],
    }
    return drawn(seed, **{**options, **fixed})


def made(sim: Sim) -> tuple[int, int]:
    """Return how many blocks servers have made ahead of their update, and how many were right."""
    every = [node.shard.commits.streaming for node in sim.nodes]
    return sum(one.made for one in every), sum(one.adopted for one in every)


def test_with_faults_nothing_is_lost_torn_or_computed_on_a_version_that_never_was() -> None:
    totals = [0, 0]
    for seed in range(SEEDS):
        for at, count in enumerate(made(simulate(seed, streamed(seed)))):
            totals[at] += count
    # Some were made in vain, or nothing of what has to be taken back was tried.
    assert totals[0] > totals[1] > SEEDS


@pytest.mark.parametrize("optimizer", ["sgd:lr=0.1", "momentum:lr=0.1,momentum=0.9", "adam:lr=0.1"])
def test_without_faults_every_block_is_made_ahead(optimizer: str) -> None:
    """And the bits are those of the replay, which `simulate` checks."""
    for streaming in (True, False):
        sim = simulate(3, Options(layer_s=0.01, optimizer=optimizer, streaming=streaming))
        blocks = len([b for b in sim.router.layout.blocks_in(MODEL) if b.segments])
        expected = 6 * blocks if streaming else 0
        assert made(sim) == (expected, expected)


def test_values_of_the_next_version_arrive_before_its_update_is_in_the_log(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """That is what a link that carries both ways at once is used for."""
    early = []
    original = Grants.fill

    def fill(self: Grants, block: BlockSpec, version: int, pinned: Pinned) -> None:
        early.append(version > sim.router.groups.version)
        original(self, block, version, pinned)

    monkeypatch.setattr(Grants, "fill", fill)
    sim = Sim(1, Options(layer_s=0.02))
    sim.run()
    assert any(early)


def test_what_changes_from_round_to_round_is_not_streamed() -> None:
    """A norm over all blocks, deltas, and compensation need the whole model first."""
    for fixed in (
        {"optimizer": "sgd:lr=0.1,clip_global_norm=1.0"},
        {"codec_down": "int8;small=0;a=none;b=none"},
        {"staleness": "dc:0.04"},
        {"policy": "ssp:1"},
        {"policy": "k-bsp:2"},
    ):
        sim = simulate(2, Options(**{"policy": "bsp", **fixed}))
        assert made(sim) == (0, 0)
        assert not [entry for entry in sim.router.log if isinstance(entry, c.Expect)]


def test_samples_are_dealt_once_each_though_grants_are_taken_back() -> None:
    for seed in range(20):
        simulate(seed, streamed(seed, samples=57, withdraw=0.1, void=0.1))


@pytest.mark.parametrize("seed", [22, 40, 92, 126, 147])
def test_who_has_finished_a_batch_ahead_of_the_log_does_not_keep_a_barrier_closed(
    seed: int,
) -> None:
    """Where one worker has more batches than another, that one waits in the barrier, too."""
    plain = {"codec_down": "none", "staleness": "none", "optimizer": "adam:lr=0.1", "loss": 0.0}
    uneven = {"barrier": True, "uneven": True, "streaming": True, "prefetch": 1, "crashes": 0}
    made = drawn(seed, policy="bsp", delay_s=0.05, **plain, **uneven)
    simulate(seed, replace(made, workers=max(2, made.workers), withdraw=0.2))


# --- broken variants, each without one rule ----------------------------------------------------


def _what_is_finished_ahead_counts_at_once(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Ahead, "holds_back", lambda self, arrival: False)


def _a_lost_member_takes_nothing_back(patch: pytest.MonkeyPatch) -> None:
    def without(self: Ahead, number: int, group: g.Group, out: Decisions) -> None:
        self.members.pop(number, None)

    patch.setattr(Ahead, "without", without)


def _nothing_is_ever_taken_back(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Ahead, "drop", lambda self, group, out: None)


def _whatever_was_made_is_adopted(patch: pytest.MonkeyPatch) -> None:
    def adopt(self: Streaming, block: BlockSpec, made: Any) -> bool:
        known = self.by_block.pop(block.bid, None)
        if known is not None:
            self.store.blocks[block.bid] = known[1]
        return known is not None

    patch.setattr(Streaming, "adopt", adopt)


def _a_block_is_made_in_place(patch: pytest.MonkeyPatch) -> None:
    def ahead(self: Store, block: BlockSpec, shares: Any, version: int) -> Any:
        if self.commit(block, shares, version, lambda spec: 1.0):
            self.count(block, shares)
        return self.blocks[block.bid], False

    patch.setattr(Store, "ahead", ahead)


def _first_weights_are_believed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(g.Group, "misled", lambda self: [])
    original = g.Group.finish

    def finish(self: g.Group, said: c.Finish, number: int, out: Decisions) -> None:
        original(self, structs.replace(said, declared=None), number, out)

    patch.setattr(g.Group, "finish", finish)


def _settings_hold_at_once(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Ahead, "defers", lambda self, number, group: False)


def _settings_changed_in_a_batch_take_nothing_back(patch: pytest.MonkeyPatch) -> None:
    original = Router._take

    def take(self: Router, peer: int, message: Any, out: Decisions) -> None:
        if isinstance(message, c.Change):
            message = structs.replace(message, inside=False)
        original(self, peer, message, out)

    patch.setattr(Router, "_take", take)


def _a_version_that_never_was_is_held(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Holdings, "never_was", lambda self, version: None)


def _grants_ahead_serve_the_present_batch(patch: pytest.MonkeyPatch) -> None:
    """The worker takes the newest grant for that of the batch that it computes."""

    def granted(self: Cycle, message: c.Granted, blocks: Any) -> None:
        self._granted, self.blocks = message, blocks

    patch.setattr(Cycle, "granted", granted)


def _pushes_do_not_wait_for_settings(patch: pytest.MonkeyPatch) -> None:
    """A worker forgets at which entry of the log its settings hold."""
    original = Session._hear

    def hear(self: Session, message: c.Message) -> None:
        if isinstance(message, c.Reply):
            message = structs.replace(message, index=0)
        original(self, message)

    patch.setattr(Session, "_hear", hear)


def _settings_overtake_those_that_wait(patch: pytest.MonkeyPatch) -> None:
    """Each entry has all settings: the newer one brings the older one too early, or is undone."""

    def configure(self: g.Group, entry: c.Entry, out: Decisions, *, late: bool) -> None:
        if late and self.ahead.version:
            self.ahead.later.append(entry)
        else:
            self.log_between_commits(entry, out)

    patch.setattr(g.Group, "configure", configure)


MUTANTS = (
    _settings_overtake_those_that_wait,
    _what_is_finished_ahead_counts_at_once,
    _a_lost_member_takes_nothing_back,
    _nothing_is_ever_taken_back,
    _whatever_was_made_is_adopted,
    _a_block_is_made_in_place,
    _first_weights_are_believed,
    _settings_hold_at_once,
    _settings_changed_in_a_batch_take_nothing_back,
    _a_version_that_never_was_is_held,
    _grants_ahead_serve_the_present_batch,
    _pushes_do_not_wait_for_settings,
)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_a_broken_variant_is_caught(
    mutant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    mutant(monkeypatch)
    assert_caught(mutant, MUTANT_SEEDS, lambda at: simulate(at, streamed(at, until_s=60.0)))
