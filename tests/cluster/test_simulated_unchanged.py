"""Blocks that an update leaves alone are not sent again: laws under faults, and broken variants.

Batches push one of two keys or neither, told by the version that they were granted, so that under
policies that count contributions of one version all push the same ones.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from drawn_runs import assert_caught, drawn
from simcluster import Options, Sim, simulate

from zkv import control as c
from zkv import data_messages as d
from zkv.dtypes import Array
from zkv.wire import BlockSpec
from zkv_brokers.grants import Grants
from zkv_brokers.store import BlockState, Pinned, Store
from zkv_workers.assembly import Assembly
from zkv_workers.downloads import Downloads

SEEDS = 24
MUTANT_SEEDS = 200


def skipping(seed: int, **fixed: Any) -> Options:
    """Draw a run, mostly one that streams and in which most updates leave a key alone."""
    rng = random.Random(-1 - seed)
    options: dict[str, Any] = {"skips": rng.choice((0, 2, 2, 3))}
    if not options["skips"]:
        # Grants are taken back when all that is sent under them has come.
        options["undeclared"] = 0.3
    if rng.random() < 0.7:
        options |= {
            "policy": "bsp",
            "streaming": True,
            "staleness": "none",
            "optimizer": rng.choice(("momentum:lr=0.1,momentum=0.9", "adam:lr=0.1")),
        }
    if rng.random() < 0.7:
        options["codec_down"] = "none"
    return drawn(seed, **{**options, **fixed})


def waiting(seed: int, **fixed: Any) -> Options:
    """Draw a run in which grants refer to the one before while that is lost on its way.

    With values ahead only: else a worker has computed on that one by then.
    """
    rng = random.Random(-1 - seed)
    options: dict[str, Any] = {
        "skips": 2,
        "prefetch": 1,
        "loss": 0.03,
        "batches": 20,
        "workers": rng.choice((2, 3)),
        "servers": rng.choice((1, 2, 3)),
        "delay_s": rng.choice((0.002, 0.01)),
        "duplicate": rng.choice((0.0, 0.1)),
        "reorder": rng.random() < 0.3,
        "crashes": rng.choice((0, 0, 1)),
        "streaming": rng.random() < 0.5,
    }
    return Options(**{**options, **fixed})


class Seen:
    """What blocks came to workers as: their values, or as those of an earlier grant."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.whole = self.alike = self.followed = 0
        self.nbytes: dict[int, int] = {}
        take, followers = Downloads.take, Downloads.followers

        def taken(one: Downloads, message: d.Block, payload: Array, now: float) -> Any:
            self.whole += message.like < 0
            self.alike += message.like >= 0
            self.nbytes[message.version] = self.nbytes.get(message.version, 0) + payload.nbytes
            return take(one, message, payload, now)

        def followed(one: Downloads, bid: int, now: float) -> list[Assembly]:
            found = followers(one, bid, now)
            self.followed += len(found)
            return found

        patch.setattr(Downloads, "take", taken)
        patch.setattr(Downloads, "followers", followed)


def test_with_faults_everybody_has_the_values_of_each_version(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = Seen(monkeypatch)
    for seed in range(SEEDS):
        simulate(seed, skipping(seed))
    # Else nothing was tried.
    assert min(seen.whole, seen.alike) > SEEDS


def test_a_block_waits_for_that_of_the_grant_before(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = Seen(monkeypatch)
    for seed in range(SEEDS):
        simulate(seed, waiting(seed))
    assert seen.followed > SEEDS / 4


@pytest.mark.parametrize("streaming", [True, False])
@pytest.mark.parametrize("prefetch", [0, 1])
def test_without_faults_a_version_brings_just_what_has_changed(
    streaming: bool, prefetch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To each worker once, though with values ahead the grant before is on its way itself."""
    seen = Seen(monkeypatch)
    sim = Sim(3, Options(workers=2, skips=2, prefetch=prefetch, streaming=streaming))
    sim.run()
    sizes = {key: value.nbytes for key, value in sim.params().items()}
    tokens = sizes["a"] + sizes["b"]
    # The update to version 1 has `v`, that to version 2 has `w`.
    expected = [2 * (tokens + sizes["vw"[(version - 1) % 2]]) for version in range(1, 6)]
    assert [seen.nbytes[version] for version in range(1, 6)] == expected


def test_values_on_demand_come_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(10):
        simulate(seed, skipping(seed, on_demand=(0, 2), codec_down="none", staleness="none"))


# --- broken variants, each without one rule ----------------------------------------------------


def _what_was_taken_back_is_referred_to(patch: pytest.MonkeyPatch) -> None:
    """Its version may be another one than that which came to be."""
    original = Grants.drop

    def drop(self: Grants, incarnation: int, group: int, grant: int) -> None:
        kept = dict(self._sent.get(incarnation, {}))
        original(self, incarnation, group, grant)
        if kept:
            self._sent[incarnation] = kept

    patch.setattr(Grants, "drop", drop)


def _what_changed_is_not_noted(patch: pytest.MonkeyPatch) -> None:
    original = Store.commit

    def commit(self: Store, block: BlockSpec, *rest: Any) -> bool:
        before = self.blocks[block.bid].changed
        found = original(self, block, *rest)
        if block.bid % 3 == 0:
            self.blocks[block.bid].changed = before
        return found

    patch.setattr(Store, "commit", commit)


def _what_is_made_ahead_is_noted_as_older(patch: pytest.MonkeyPatch) -> None:
    original = Store.ahead

    def ahead(self: Store, block: BlockSpec, shares: Any, version: int) -> tuple[BlockState, bool]:
        state, finite = original(self, block, shares, version)
        state.changed = version
        return state, finite

    patch.setattr(Store, "ahead", ahead)


def _what_a_codec_moves_is_not_looked_at(patch: pytest.MonkeyPatch) -> None:
    """A view goes on toward its values where they stay."""

    def granted(self: Store, block: BlockSpec, version: int) -> Pinned:
        current = self.blocks[block.bid].current
        view = self.views.at(block, current.values, version)
        if view is not None and not current.pins:
            current.values = view.values
        return current

    patch.setattr(Store, "granted", granted)


def _an_older_grant_is_referred_to_than_is_meant(patch: pytest.MonkeyPatch) -> None:
    original = Grants._like

    def like(self: Grants, entry: c.Grant, block: BlockSpec) -> int:
        found = original(self, entry, block)
        older = [grant for grant in self._sent.get(entry.incarnation, {}) if grant < found]
        return older[-1] if found >= 0 and older else found

    patch.setattr(Grants, "_like", like)


def _the_newest_values_are_taken_for_those_that_are_named(patch: pytest.MonkeyPatch) -> None:
    def put_alike(self: Downloads, assembly: Assembly, message: d.Block, now: float) -> bool:
        held = None if self._held is None or message.bid not in self._held.blocks else self._held
        return assembly.put_alike(message, held, now)

    patch.setattr(Downloads, "_put_alike", put_alike)


def _what_waits_is_acknowledged(patch: pytest.MonkeyPatch) -> None:
    """The server forgets a block that is not here, and may never come."""
    original = Downloads._put_alike

    def put_alike(self: Downloads, assembly: Assembly, message: d.Block, now: float) -> bool:
        original(self, assembly, message, now)
        assembly.alike.pop(message.bid, None)
        return True

    patch.setattr(Downloads, "_put_alike", put_alike)


MUTANTS = (
    _what_was_taken_back_is_referred_to,
    _what_changed_is_not_noted,
    _what_is_made_ahead_is_noted_as_older,
    _what_a_codec_moves_is_not_looked_at,
    _an_older_grant_is_referred_to_than_is_meant,
    _the_newest_values_are_taken_for_those_that_are_named,
    _what_waits_is_acknowledged,
)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_a_broken_variant_is_caught(
    mutant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    mutant(monkeypatch)

    def run(seed: int) -> None:
        simulate(seed, waiting(seed, until_s=200.0))
        simulate(seed, skipping(seed, until_s=200.0))

    assert_caught(mutant, MUTANT_SEEDS, run)
