"""Workers that ask for values key by key, in the simulated cluster, beside ordinary ones.

What `simulate` checks holds for them too: what counts was computed on one version, looked at twice,
and the final bits are those of a replay. Beside that nothing stays pinned for a batch that is over.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from drawn_runs import drawn
from simcluster import Options, simulate

from zkv import control as c
from zkv import data_messages as d
from zkv.wire import MODEL
from zkv_brokers.ahead import Ahead
from zkv_brokers.grants import Grants
from zkv_brokers.holdings import Holdings
from zkv_brokers.shard import Shard
from zkv_workers.downloads import Downloads
from zkv_workers.incoming import Incoming
from zkv_workers.on_demand import Demand

SEEDS = 15
MUTANT_SEEDS = 100


def asking(seed: int, **fixed: Any) -> Options:
    """Draw a run in which some workers, or all, ask for what they need."""
    chance = random.Random(seed)
    ranks = tuple(rank for rank in range(4) if chance.random() < 0.6)
    return drawn(seed, **{"on_demand": ranks, **fixed})


@pytest.fixture(autouse=True)
def nothing_stays_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    """A law of every run: what is granted to who asks is the only thing that is pinned for it."""
    add, granted = Grants.add, Holdings.granted

    def at_servers(self: Grants, entry: c.Grant, blocks: Any) -> None:
        add(self, entry, blocks)
        mine = [name for name in self._asked if name[0] == entry.incarnation]
        assert self._asked.keys() <= self._open.keys()
        assert len(mine) <= 1, f"pinned at once: {mine}"

    def at_the_broker(self: Holdings, incarnation: int, grant: int, version: int) -> None:
        granted(self, incarnation, grant, version)
        mine = [name for name in self._pins.by_grant if name[:2] == (incarnation, MODEL)]
        assert len(mine) <= 1 or incarnation not in self._pins.on_demand, f"pinned at once: {mine}"

    monkeypatch.setattr(Grants, "add", at_servers)
    monkeypatch.setattr(Holdings, "granted", at_the_broker)


def test_with_faults_values_stay_as_they_were_granted_and_every_law_holds() -> None:
    asked = 0
    for seed in range(SEEDS):
        sim = simulate(seed, asking(seed))
        grants = [entry for entry in sim.router.log if isinstance(entry, c.Grant)]
        asked += sum(entry.on_demand for entry in grants if entry.group == MODEL)
    assert asked > 4 * SEEDS


def test_others_are_streamed_to_beside_one_that_asks() -> None:
    sim = simulate(3, Options(layer_s=0.01, on_demand=(1,)))
    blocks = len([b for b in sim.router.layout.blocks_in(MODEL) if b.segments])
    streaming = [node.shard.commits.streaming for node in sim.nodes]
    assert sum(one.made for one in streaming) == 6 * blocks
    assert sum(one.adopted for one in streaming) == 6 * blocks
    ranks = {who: pushed.worker for (who, _), pushed in sim.contributions.items()}
    reached, early = 0, set()
    for entry in sim.router.log:
        if isinstance(entry, c.Commit):
            reached = entry.version
        elif isinstance(entry, c.Grant) and entry.version > reached:
            early.add(ranks[entry.incarnation])
    assert early == {0, 2}


def test_without_losses_nothing_is_asked_for_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that is ahead of the log waits at the server until the log is there."""
    again: list[Any] = []
    _record_repeats(monkeypatch, again)
    for seed in range(6):
        simulate(seed, asking(seed, **SMOOTH))
    assert not again


SMOOTH: dict[str, Any] = {
    "loss": 0.0,
    "duplicate": 0.0,
    "crashes": 0,
    "broker_restarts": 0,
    "reorder": True,
    "delay_s": 0.05,
    "window_bytes": 1 << 20,
    "codec_down": "none",
    "batches": 4,
}


def _record_repeats(patch: pytest.MonkeyPatch, again: list[Any]) -> None:
    original = Downloads.overdue

    def overdue(self: Downloads, incarnation: int, now: float) -> Any:
        asks = original(self, incarnation, now)
        again.extend(one for one in asks if one.message.group == MODEL and one.message.index)
        return asks

    patch.setattr(Downloads, "overdue", overdue)


# --- broken variants, each without one rule ----------------------------------------------------


def _a_receipt_unpins(patch: pytest.MonkeyPatch) -> None:
    original = Grants.got

    def got(self: Grants, who: int, group: int, grant: int, bids: Any, now: float) -> None:
        original(self, who, group, grant, bids, now)
        pieces = self._open.get((who, group, grant), {})
        for bid in bids:
            if (who, group, grant) in self._asked and bid in pieces:
                self._unpin(pieces[bid])

    patch.setattr(Grants, "got", got)


def _nothing_is_pinned(patch: pytest.MonkeyPatch) -> None:
    """A block is what it is when it is asked for."""
    original = Grants.ask

    def ask(self: Grants, message: d.Ask) -> None:
        name = (message.incarnation, message.group, message.grant)
        for bid in message.bids if name in self._asked else ():
            if bid in self._open[name]:
                self._open[name][bid].values = self._store.blocks[bid].current.values
        original(self, message)

    patch.setattr(Grants, "ask", ask)


def _the_end_of_a_batch_unpins_nothing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Grants, "done", lambda self, incarnation, group, grant: None)


def _the_broker_never_hears_that_a_batch_is_over(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Holdings, "finished", lambda self, incarnation, grant: False)


def _who_asks_is_granted_ahead_of_the_log(patch: pytest.MonkeyPatch) -> None:
    original = Ahead.look

    def look(self: Ahead, group: Any, out: Any) -> None:
        kept, group.holdings.is_on_demand = group.holdings.is_on_demand, lambda who: False
        original(self, group, out)
        group.holdings.is_on_demand = kept

    patch.setattr(Ahead, "look", look)


def _early_requests_are_dropped(patch: pytest.MonkeyPatch) -> None:
    original = Shard._from_worker

    def from_worker(self: Shard, message: d.Data, *rest: Any) -> None:
        if not (isinstance(message, d.Ask) and message.index > self.index):
            original(self, message, *rest)

    patch.setattr(Shard, "_from_worker", from_worker)


def _a_block_is_forgotten_with_the_first_of_its_keys(patch: pytest.MonkeyPatch) -> None:
    def forget(self: Demand, kids: Iterable[int]) -> None:
        for block in self.layout.blocks_for(kids):
            self._drop(block.bid)

    patch.setattr(Demand, "forget", forget)


def _a_batch_given_up_keeps_what_it_wanted(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Incoming, "left", lambda self, batch, finished: None)


MUTANTS = (
    _a_receipt_unpins,
    _nothing_is_pinned,
    _the_end_of_a_batch_unpins_nothing,
    _the_broker_never_hears_that_a_batch_is_over,
    _who_asks_is_granted_ahead_of_the_log,
    _a_batch_given_up_keeps_what_it_wanted,
    _early_requests_are_dropped,
    _a_block_is_forgotten_with_the_first_of_its_keys,
)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_a_broken_variant_is_caught(
    mutant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    mutant(monkeypatch)
    again: list[Any] = []
    _record_repeats(monkeypatch, again)
    for seed in range(MUTANT_SEEDS):
        smooth = SMOOTH if seed % 2 else {}
        try:
            simulate(seed, asking(seed, until_s=60.0, **smooth))
        except (AssertionError, ValueError, KeyError):
            return
        if smooth and again:
            return
        again.clear()
    pytest.fail(f"{mutant.__name__} was not caught in {MUTANT_SEEDS} runs")
