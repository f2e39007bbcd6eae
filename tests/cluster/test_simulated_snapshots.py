"""Snapshots in the simulated cluster: one version of all keys each, whatever goes on meanwhile, and
broken variants that must be caught."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from drawn_runs import POLICIES, assert_caught, drawn
from simcluster import Options, Sim, simulate

from zkv import control as c
from zkv_brokers import saving
from zkv_brokers import snapshots as ss
from zkv_brokers.block_state import BlockState
from zkv_brokers.keeping import Keeping

SEEDS = 8
MUTANT_SEEDS = 60


def saving_run(seed: int, **fixed: Any) -> Options:
    """Draw a run in which snapshots are taken."""
    made = drawn(seed, batches=10, snapshots=3, **fixed)
    return replace(
        made,
        every=("", "0.2s", "3updates")[seed % 3],
        broken_disk=(0.0, 0.3)[seed % 2],
        disk_s=(0.01, 0.2)[seed // 2 % 2],
        moves=3 * (seed % 2),
        servers=max(made.servers, 1 + seed % 2),
    )


def entries(sim: Sim) -> int:
    return sum(isinstance(one, c.Snapshot) for one in sim.router.log)


@pytest.mark.parametrize("policy", POLICIES)
def test_without_faults_each_one_that_is_asked_for_exists(policy: str) -> None:
    for seed in range(2):
        sim = simulate(seed, Options(policy=policy, servers=2, batches=20, every="4updates"))
        assert len(sim.manifests()) >= 3
        assert sim.router.snapshots.plain()["failed"] == ""


@pytest.mark.parametrize("policy", POLICIES)
def test_with_faults_a_snapshot_is_one_version_or_does_not_exist(policy: str) -> None:
    there, failed = 0, 0
    for seed in range(SEEDS):
        sim = simulate(seed, saving_run(seed, policy=policy))
        there += len(sim.manifests())
        failed += sim.router.snapshots.plain()["failed"] != ""
        assert len(sim.manifests()) <= entries(sim)
    assert there > SEEDS
    assert failed > 0


# --- tests of the test: each removes one rule ------------------------------------------------


def _updates_write_into_what_is_being_written(patch: pytest.MonkeyPatch) -> None:
    """Arrays are the store's own though they are on their way to a disk."""
    original = saving.taken

    def taken(store: Any, *rest: Any) -> Any:
        found = original(store, *rest)
        saving.written(store)
        return found

    patch.setattr(saving, "taken", taken)


def _servers_cut_when_they_like(patch: pytest.MonkeyPatch) -> None:
    """A server takes what it holds after the next entries of the log, not at the snapshot's."""
    original = Keeping.cut

    def cut(self: Keeping, entry: c.Snapshot, out: list[Any]) -> None:
        shard, later = self._shard, []
        apply = shard._apply

        def and_then(one: c.Entry, more: list[Any]) -> None:
            apply(one, more)
            if isinstance(one, c.Commit) and not later:
                later.append(one)
                original(self, entry, more)

        shard._apply = and_then  # type: ignore[method-assign]

    patch.setattr(Keeping, "cut", cut)


def _a_manifest_names_the_newest_version(patch: pytest.MonkeyPatch) -> None:
    """The manifest is made when the files are written, not where they were cut."""
    original = ss.Snapshots.saved

    def saved(self: ss.Snapshots, server: Any, message: c.Saved) -> None:
        if self._taking is not None:
            name = self._taking.manifest.name
            self._taking.manifest = ss.manifest_of(self._router, name, 0)
        original(self, server, message)

    patch.setattr(ss.Snapshots, "saved", saved)


def _a_manifest_does_not_wait_for_all(patch: pytest.MonkeyPatch) -> None:
    """It is written with the first file."""
    original = ss.Snapshots.saved

    def saved(self: ss.Snapshots, server: Any, message: c.Saved) -> None:
        if self._taking is not None and not message.why:
            self._taking.missing &= {server.index}
        original(self, server, message)

    patch.setattr(ss.Snapshots, "saved", saved)


def _a_snapshot_does_not_wait_for_the_update_that_is_foreseen(patch: pytest.MonkeyPatch) -> None:
    """It is cut where grants ahead of the log are out; the bits are right, its samples are not."""
    patch.setattr(ss.Snapshots, "_cut_between_updates", ss.Snapshots._cut)


def _a_file_that_failed_counts(patch: pytest.MonkeyPatch) -> None:
    """The broker does not hear that a server could not write."""
    original = ss.Snapshots.saved

    def saved(self: ss.Snapshots, server: Any, message: c.Saved) -> None:
        original(self, server, c.Saved(message.number, message.nbytes, message.sha256))

    patch.setattr(ss.Snapshots, "saved", saved)


def _values_alone_are_kept(patch: pytest.MonkeyPatch) -> None:
    """An update makes new values, and writes into the optimizer's state."""
    patch.setattr(BlockState, "part", lambda self: None)


MUTANTS = (
    _updates_write_into_what_is_being_written,
    _servers_cut_when_they_like,
    _a_manifest_names_the_newest_version,
    _a_manifest_does_not_wait_for_all,
    _a_file_that_failed_counts,
)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__.strip("_"))
def test_a_snapshot_without_this_rule_is_caught(
    mutant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    mutant(monkeypatch)
    assert_caught(mutant, MUTANT_SEEDS, lambda at: simulate(at, saving_run(at, until_s=120.0)))
