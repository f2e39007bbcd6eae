"""Snapshots in the simulated cluster: one version of all keys each, whatever goes on meanwhile, and
broken variants that must be caught."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from drawn_runs import POLICIES, assert_caught, drawn
from simcluster import Options, Sim, simulate

from zkv import control as c
from zkv.pool import Pool
from zkv_brokers import saving
from zkv_brokers import snapshots as ss
from zkv_brokers.block_state import BlockState
from zkv_brokers.keeping import Keeping
from zkv_brokers.restoring import Restoring

SEEDS = 3
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
    for seed in range(1):
        sim = simulate(seed, Options(policy=policy, servers=2, batches=20, every="4updates"))
        assert len(sim.manifests()) >= 3
        assert sim.router.snapshots.plain()["failed"] == ""


@pytest.mark.parametrize("policy", POLICIES)
def test_with_faults_a_snapshot_is_one_version_or_does_not_exist(policy: str) -> None:
    there, failed = 0, 0
    for seed in range(SEEDS):
        sim = simulate(seed, saving_run(seed, policy=policy))
        there += len(sim.manifests())
        failed += sim.router.snapshots.plain()["failed_tries"]
        assert len(sim.manifests()) <= entries(sim)
    assert there > SEEDS
    assert failed > 0


def restored_run(seed: int, **fixed: Any) -> Sim | None:
    """Run a cluster, and another one of other servers from one of its snapshots; None: none was."""
    made = replace(saving_run(seed, **fixed), broken_disk=0.0)
    first = simulate(seed, made)
    if not first.manifests():
        return None
    chance = random.Random(seed)
    manifest = chance.choice(first.manifests())
    servers, workers = chance.choice((1, 2, 3, 4)), chance.choice((1, 2, 3))
    again = replace(made, servers=servers, workers=workers, batches=5)
    second = simulate(seed + 1000, again, (first, manifest))
    assert second.router.groups.version >= manifest.version
    if not made.samples:
        assert second.commits()[0].version == manifest.version + 1
    return second


@pytest.mark.parametrize("policy", POLICIES)
def test_a_run_goes_on_from_a_snapshot_with_its_bits_on_other_servers(policy: str) -> None:
    runs = [restored_run(seed, policy=policy) for seed in range(SEEDS)]
    assert sum(one is not None for one in runs) > SEEDS // 2
    there = {len(one.router.members.servers) for one in runs if one is not None}
    assert len(there) > 1


@pytest.mark.parametrize("policy", ["bsp", "asp", "k-bsp:2", "ssp:1"])
def test_each_sample_counts_once_although_the_run_began_anew_in_mid_pass(policy: str) -> None:
    fixed = {"samples": 43, "policy": policy, "withdraw": 0.2, "crashes": 0}
    runs = [restored_run(seed, **fixed) for seed in range(3)]
    partly = [one for one in runs if one is not None and one.samples_seen(one.first)]
    assert any(len(one.samples_seen(one.first)) < 2 * 43 for one in partly)


def test_keys_that_nobody_trains_keep_their_values_and_versions() -> None:
    for seed in range(4):
        first = simulate(seed, Options(plain=3, batches=20, every="3updates"))
        manifest = first.manifests()[-1]
        (version,) = [one.version for one in manifest.groups if one.group]
        assert version == 3
        second = simulate(seed, Options(plain=2, servers=3), (first, manifest))
        plain = second.router.groups.by_number
        assert [one.version for number, one in plain.items() if number] == [3 + 2]


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


def _a_file_that_failed_counts(patch: pytest.MonkeyPatch) -> None:
    """The broker does not hear that a server could not write."""
    original = ss.Snapshots.saved

    def saved(self: ss.Snapshots, server: Any, message: c.Saved) -> None:
        original(self, server, c.Saved(message.number, message.nbytes, message.sha256))

    patch.setattr(ss.Snapshots, "saved", saved)


def _values_alone_are_kept(patch: pytest.MonkeyPatch) -> None:
    """An update makes new values, and writes into the optimizer's state."""
    patch.setattr(BlockState, "part", lambda self: None)


def _state_is_left_behind(patch: pytest.MonkeyPatch) -> None:
    """The optimizer's state is not in the files."""
    original = saving.put_back

    def put_back(saved: Any, blocks: Any, layout: Any, store: Any, tables: Any) -> None:
        original(saved, blocks, layout, store, tables)
        for state in store.blocks.values():
            for slot in state.slots:
                slot[:] = 0

    patch.setattr(saving, "put_back", put_back)


def _updates_are_counted_anew(patch: pytest.MonkeyPatch) -> None:
    """What adam knows of how many updates there were is forgotten."""
    original = saving.put_back

    def put_back(saved: Any, blocks: Any, layout: Any, store: Any, tables: Any) -> None:
        original(saved, blocks, layout, store, tables)
        for state in store.blocks.values():
            state.counts = dict.fromkeys(state.counts, 0)

    patch.setattr(saving, "put_back", put_back)


def _views_are_left_behind(patch: pytest.MonkeyPatch) -> None:
    """Workers begin with the exact values, where they had a codec's."""
    patch.setattr("zkv_brokers.views.Views.adopt", lambda self, bid, view: None)


def _versions_begin_at_nought(patch: pytest.MonkeyPatch) -> None:
    """The broker counts updates from 0 again."""
    patch.setattr("zkv_brokers.restoring.Restoring._begins_at", lambda self, number: (0, {}))


def _nobody_waits_for_what_is_read(patch: pytest.MonkeyPatch) -> None:
    """Batches are granted before all servers have their parts."""
    original = Restoring.look

    def look(self: Restoring, out: Any) -> None:
        begun = self._begun
        original(self, out)
        if self._begun and not begun:
            self._missing = {0}
            self.restored(self._router.members.servers[0], c.Restored(), out)

    patch.setattr(Restoring, "look", look)


def _open_samples_are_lost(patch: pytest.MonkeyPatch) -> None:
    """What was dealt out where the snapshot was cut is not dealt again."""
    original = Pool.remaining

    def remaining(self: Pool) -> Any:
        return replace(original(self), back=tuple(sorted(self._back)))

    patch.setattr(Pool, "remaining", remaining)


RESTORING = (
    _values_alone_are_kept,
    _state_is_left_behind,
    _updates_are_counted_anew,
    _views_are_left_behind,
    _versions_begin_at_nought,
    _nobody_waits_for_what_is_read,
    _open_samples_are_lost,
)
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
    assert_caught(mutant, MUTANT_SEEDS, lambda at: simulate(at, saving_run(at)))


@pytest.mark.parametrize("mutant", RESTORING, ids=lambda mutant: mutant.__name__.strip("_"))
def test_a_run_from_a_snapshot_without_this_rule_is_caught(
    mutant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    mutant(monkeypatch)
    samples = 43 if mutant is _open_samples_are_lost else 0
    assert_caught(mutant, MUTANT_SEEDS, lambda at: restored_run(at, samples=samples))
