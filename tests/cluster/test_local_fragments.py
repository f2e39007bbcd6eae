"""Local SGD by fragments: a part of the model is contributed at a time, to the bits of one process
that does the same."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from crew import crew, model, pool
from harness import cluster, until
from worker_threads import on_threads

import zkv
from zkv.dtypes import Array
from zkv.errors import ConfigError, PushRefused
from zkv.optim import init_slots, rule, update
from zkv.sums import weighted_mean

LR, SIZE = 0.125, 20_000
SIZES = {"a": SIZE, "b": SIZE, "c": SIZE, "d": 5}
PARTS = {1: ["abcd"], 2: ["ac", "bd"], 3: ["ad", "b", "c"]}
"""What numbers of fragments divide them into: each key that is not small is 160 kB."""
OUTER = {"sgd:lr=1": ("sgd", 1.0), "nesterov:lr=0.5,momentum=0.9": ("nesterov", 0.5)}


def start() -> dict[str, Array]:
    return {
        key: np.random.default_rng(at).standard_normal(size)
        for at, (key, size) in enumerate(SIZES.items())
    }


def compute(rank: int, number: int, values: dict[str, Array]) -> None:
    """One local batch: each key's change depends on its values, the worker and the batch."""
    for at, value in enumerate(values.values()):
        value -= LR * (value * 0.5 + (rank + 1) * (number % 5 + at))


def weight_of(rank: int, number: int) -> float:
    return 1.0 + rank + number % 2


@dataclass(frozen=True)
class Round:
    """A worker's round that counts: the version it was begun on, and its local batches."""

    version: int
    numbers: Sequence[int]


class OneProcess:
    """All workers and the server of a run, in one place."""

    def __init__(self, fragments: int, *, mixing: float = 0.0, outer: str = "sgd:lr=1") -> None:
        self.parts, self.mixing = PARTS[fragments], mixing
        self.name, self.lr = OUTER[outer]
        self.models = [start()]
        self.slots = {key: init_slots(rule(self.name), v) for key, v in self.models[0].items()}
        self.counts = dict.fromkeys(SIZES, 0)
        self.workers: dict[int, Any] = {}
        """Those that have values of their own: the version of them, the values, those that changes
        are counted from, and the weight of each fragment's."""

    def _begin(self, rank: int, version: int) -> tuple[Any, Any, Any]:
        count, values = len(self.parts), self.models[version]
        if rank not in self.workers or count == 1:
            own, begun = ({key: v.copy() for key, v in values.items()} for _ in range(2))
            self.workers[rank] = [version, own, begun, [0.0] * count]
        before, own, begun, weights = self.workers[rank]
        for at in {one % count for one in range(before, version)}:
            for key in self.parts[at]:
                own[key] = own[key] * self.mixing + values[key] * (1 - self.mixing)
                begun[key] = values[key].copy()
            weights[at] = 0.0
        self.workers[rank][0] = version
        return own, begun, weights

    def round(self, rounds: dict[int, Round]) -> None:
        """Make one update, of these rounds by worker."""
        at = (len(self.models) - 1) % len(self.parts)
        changes, total = [], []
        for rank, one in sorted(rounds.items()):
            own, begun, weights = self._begin(rank, one.version)
            for number in one.numbers:
                compute(rank, number, own)
                weights[:] = [sofar + weight_of(rank, number) for sofar in weights]
            changes.append({key: begun[key] - own[key] for key in self.parts[at]})
            total.append(weights[at])
        model = dict(self.models[-1])
        for key in self.parts[at]:
            self.counts[key] += 1
            mean = weighted_mean([change[key] for change in changes], total)
            count, chosen = self.counts[key], rule(self.name)
            model[key], self.slots[key] = update(
                chosen, model[key], self.slots[key], mean, lr=self.lr, count=count
            )
        self.models.append(model)

    def check(self, params: dict[Any, Array]) -> None:
        for key, value in self.models[-1].items():
            np.testing.assert_array_equal(params[key], value)


def trains(h: int, rounds: int, length: int, **options: Any) -> Any:
    def body(worker: Any) -> Any:
        worker.init(start())
        with worker.local(h=h, **options) as local:
            for number in range(rounds * length):
                with local.batch(weight=weight_of(worker.rank, number)) as batch:
                    compute(worker.rank, number, batch.params)
            last = local.last
        last.wait()
        return worker.evaluate().params, worker.stats()

    return body


async def run(
    body: Any, servers: int = 2, prefetch: int = 0, outer: str = "sgd:lr=1", workers: int = 2
) -> list[Any]:
    async with cluster(servers, optimizer=outer) as made:
        return await on_threads(made, *[body] * workers, prefetch=prefetch)


@pytest.mark.parametrize("outer", OUTER)
@pytest.mark.parametrize(
    ("fragments", "prefetch", "mixing"),
    [(1, 0, 0.0), (2, 0, 0.0), (3, 0, 0.0), (2, 1, 0.0), (3, 1, 0.0), (2, 1, 0.5), (3, 0, 0.25)],
)
def test_a_run_is_that_of_one_process(
    fragments: int, prefetch: int, mixing: float, outer: str
) -> None:
    length, rounds = 2, 7
    body = trains(length * fragments, rounds, length, fragments=fragments, mixing=mixing)
    told = asyncio.run(run(body, prefetch=prefetch, outer=outer))
    one = OneProcess(fragments, mixing=mixing, outer=outer)
    for granted in range(rounds):
        mine = Round(max(0, granted - prefetch), range(granted * length, (granted + 1) * length))
        one.round({0: mine, 1: mine})
    for params, stats in told:
        assert stats["outcomes"]["committed"] == rounds
        one.check(params)


@pytest.mark.parametrize("prefetch", [0, 1])
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("fragments", [1, 2, 3])
def test_a_round_sends_and_brings_its_fragment_alone(
    fragments: int, workers: int, prefetch: int
) -> None:
    """Beside first values, and one reading of all of them."""
    rounds = 7
    body = trains(fragments, rounds, 1, fragments=fragments)
    told = asyncio.run(run(body, workers=workers, prefetch=prefetch))
    sizes = [sum(SIZES[key] * 8 for key in part) for part in PARTS[fragments]]
    of_round = [sizes[at % fragments] for at in range(rounds)]
    whole = sum(SIZES.values()) * 8
    up = [stats["bytes_up"] - sum(of_round) for _, stats in told]
    assert sorted(up) == [0] * (workers - 1) + [whole]
    for _, stats in told:
        # What the last round has made is granted too, and may not be here yet.
        down = stats["bytes_down"] - 2 * whole - sum(of_round[:-1])
        assert down <= of_round[-1]
        assert down >= 0


# --- rounds that do not count, and workers that come and go ---------------------------------------


class Log:
    """The rounds of workers that compute by turns, and what one process makes of those that
    count."""

    def __init__(self) -> None:
        self.rounds: list[tuple[int, Any, list[int]]] = []

    async def take(self, local: Any, *numbers: int) -> None:
        """Compute one round, anew if it is cancelled meanwhile."""
        rank, done = local._worker.rank, 0
        while done < len(numbers):
            number = numbers[done]
            async with local.batch(weight=weight_of(rank, number)) as batch:
                compute(rank, number, batch.params)
            done = 0 if local.last.cancelled else done + 1
        self.rounds.append((rank, local.last, list(numbers)))

    def updates(self) -> dict[int, dict[int, Round]]:
        """Return the rounds that count, by update and worker."""
        found: dict[int, dict[int, Round]] = {}
        for rank, carrier, numbers in self.rounds:
            if carrier.outcome == "committed":
                found.setdefault(carrier.update, {})[rank] = Round(carrier.version, numbers)
        assert sorted(found) == list(range(1, len(found) + 1))
        return found

    def replay(self, one: OneProcess) -> OneProcess:
        for _, rounds in sorted(self.updates().items()):
            one.round(rounds)
        return one


@asynccontextmanager
async def rounds_of(made: Any, count: int, h: int, fragments: int, **options: Any) -> Any:
    """Yield the workers and rounds of each."""
    async with crew(made, count, start(), **options) as workers, AsyncExitStack() as stack:
        yield (
            workers,
            [
                await stack.enter_async_context(one.local(h=h, fragments=fragments))
                for one in workers
            ],
        )


@pytest.mark.parametrize("prefetch", [0, 1])
async def test_who_joins_late_begins_on_the_model_and_contributes_the_same_fragment(
    prefetch: int,
) -> None:
    log = Log()
    async with (
        cluster(2, optimizer="sgd:lr=1") as made,
        rounds_of(made, 1, 4, 2, prefetch=prefetch) as ((first,), (local,)),
    ):
        for at in range(3):
            await log.take(local, at, at + 1)
        async with made.worker(1, prefetch=prefetch) as second:
            await second.init(start())

            async def join() -> None:
                async with second.local(h=4, fragments=2) as mine:
                    for at in range(4):
                        await log.take(mine, at, at + 2)
                    await mine.last.wait()
                await second.leave()

            joining = asyncio.ensure_future(join())
            await until(lambda: 1 in model(made).sync.live, what="that it has joined")
            for at in range(3, 9):
                await log.take(local, at, at + 1)
            await asyncio.gather(local.last.wait(), joining)
        together = [rounds for rounds in log.updates().values() if len(rounds) == 2]
        assert len(together) >= 3
        log.replay(OneProcess(2)).check(await first.pull())


@pytest.mark.parametrize("prefetch", [0, 1])
async def test_a_worker_that_is_lost_in_mid_round_leaves_nothing(prefetch: int) -> None:
    """Rounds of the others that were cancelled for it leave nothing either."""
    log = Log()
    async with (
        cluster(2, optimizer="sgd:lr=1", worker_lost_s=1.2) as made,
        rounds_of(made, 3, 6, 3, prefetch=prefetch) as (workers, locals_),
    ):
        for at in range(4):
            await asyncio.gather(*(log.take(one, at, at + 1) for one in locals_))
        # It has to hear that this one counts.
        await locals_[2].last.wait()
        async with locals_[2].batch() as batch:
            compute(2, 99, batch.params)
            workers[2]._driver.close()
            for at in range(4, 9):
                await asyncio.gather(*(log.take(one, at, at + 1) for one in locals_[:2]))
            fates = await asyncio.gather(*(one.last.wait() for one in locals_[:2]))
            assert fates == ["committed"] * 2
        assert len(log.updates()) >= 8
        log.replay(OneProcess(3)).check(await workers[0].pull())


class Mine(Exception):
    """Of the test itself."""


async def fail(local: Any) -> None:
    async with local.batch() as batch:
        compute(0, 99, batch.params)
        raise Mine


async def test_a_round_that_fails_leaves_nothing_in_any_fragment() -> None:
    """Not in those that it would not have contributed, either."""
    log = Log()
    async with (
        cluster(1, optimizer="sgd:lr=1") as made,
        rounds_of(made, 1, 6, 3) as ((worker,), (local,)),
    ):
        for at in range(7):
            if at in (0, 1, 4):
                with pytest.raises(Mine):
                    await fail(local)
            await log.take(local, at, at + 1)
        await local.last.wait()
        assert len(log.updates()) == 7
        log.replay(OneProcess(3)).check(await worker.pull())


async def test_a_cancelled_round_leaves_nothing_in_any_fragment() -> None:
    log = Log()
    async with (
        cluster(1, policy_text="k-bsp:1", optimizer="sgd:lr=1") as made,
        rounds_of(made, 2, 6, 3) as ((worker, _), (slow, fast)),
    ):
        begun = asyncio.ensure_future(log.take(fast, 0, 1))
        await log.take(slow, 0, 1)
        await begun
        for at in range(1, 6):
            async with slow.batch() as batch:
                compute(0, 99, batch.params)
                before = len(log.updates())
                while len(log.updates()) == before:
                    await log.take(fast, at, at + 1)
                    await fast.last.wait()
                await until(lambda batch=batch: batch.cancelled, what="the cancellation")
            ahead = log.updates()
            while log.updates() == ahead:
                await log.take(slow, at, at + 1)
                await slow.last.wait()
        assert {rank for rounds in log.updates().values() for rank in rounds} == {0, 1}
        log.replay(OneProcess(3)).check(await worker.pull())


async def test_after_a_refused_round_the_values_are_the_models() -> None:
    """What was refused is mostly NaN, which would be in every fragment's next contribution."""
    log, one = Log(), OneProcess(2)
    async with (
        cluster(1, optimizer="sgd:lr=1") as made,
        rounds_of(made, 1, 4, 2) as ((worker,), (local,)),
    ):
        await log.take(local, 0, 1)
        async with local.batch() as batch:
            for value in batch.params.values():
                value[0] = np.nan
        async with local.batch():
            pass
        assert await local.last.wait() == "discarded"
        with pytest.raises(PushRefused):
            await log.take(local, 5, 5)
        for at in range(3):
            await log.take(local, at, at + 1)
        await local.last.wait()
        updates = log.updates()
        one.round(updates.pop(1))
        one.workers.clear()
        for _, rounds in sorted(updates.items()):
            one.round(rounds)
        one.check(await worker.pull())


async def test_a_draw_is_that_of_a_round() -> None:
    """Of h / F local batches; each sample counts once per pass."""
    data = zkv.data.shard(22, 3, size=2, passes=3)
    log, seen = Log(), []
    async with (
        cluster(2, optimizer="sgd:lr=1") as made,
        rounds_of(made, 1, 6, 2) as ((worker,), (local,)),
    ):
        numbers: list[int] = []
        async for batch in local.batches(data):
            async with batch:
                number = int(batch.samples.sum()) * 2
                compute(0, number, batch.params)
                numbers.append(number)
                seen += batch.samples.tolist()
            if local.last.outcome != "open":
                log.rounds.append((0, local.last, numbers))
                numbers = []
        assert await local.last.wait() == "committed"
        assert pool(made).done
        assert sorted(seen) == sorted([*range(22)] * 3)
        assert [len(one[0].numbers) for one in log.updates().values()] == [3, 3, 3, 2] * 3
        # An update has one contribution here, so its weight is nothing to its mean.
        log.replay(OneProcess(2)).check(await worker.pull())


# --- what is refused by name ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"h": 4, "fragments": 3}, "multiple of 3, such as h=6"),
        ({"h": 4, "fragments": 0}, "fragments=0"),
        ({"h": 4, "fragments": True}, "fragments=True"),
        ({"h": 4, "fragments": "a*"}, "list of at least two"),
        ({"h": 4, "fragments": ["*"]}, "list of at least two"),
        ({"h": 4, "fragments": [["a"], []]}, "list of at least two"),
        ({"h": 4, "fragments": 2, "mixing": 1.0}, "mixing=1.0"),
        ({"h": 4, "mixing": 0.5}, "is for fragments"),
    ],
)
async def test_what_is_no_fragment_is_refused(options: dict[str, Any], text: str) -> None:
    async with cluster(1) as made, crew(made, 1) as (worker,):
        with pytest.raises(ValueError, match=re.escape(text)):
            worker.local(**options)


@pytest.mark.parametrize(
    ("fragments", "text"),
    [
        (5, "only 4 parts"),
        ([["a"], ["b", "c"]], "key 'd' matches no pattern"),
        ([["a", "b"], ["e*"], "*"], "fragment of e* has no key"),
        ([["*"], ["a"]], "fragment of a has no key"),
    ],
)
async def test_keys_without_a_fragment_are_named_and_the_worker_goes_on(
    fragments: Any, text: str
) -> None:
    count = fragments if isinstance(fragments, int) else len(fragments)
    async with cluster(1) as made, crew(made, 1, start()) as (worker,):
        with pytest.raises(ConfigError, match=re.escape(text)):
            async with worker.local(h=count, fragments=fragments).batch():
                pass
        async with worker.batch() as batch:
            batch.push("d", np.ones(5))
        assert await batch.wait() == "committed"


@pytest.mark.parametrize("policy", ["asp", "ssp:1", "k-batch-bsp:2", "k-asp:2", "k-batch-asp:2"])
async def test_policies_that_mix_fragments_in_an_update_are_refused(policy: str) -> None:
    async with cluster(1, policy_text=policy) as made, crew(made, 1) as (worker,):
        with pytest.raises(ConfigError, match=f"policy {policy}.*use policy bsp or k-bsp"):
            worker.local(h=4, fragments=2)
        worker.local(h=4)


async def test_a_policy_that_mixes_fragments_is_noticed_when_it_comes_in_mid_run() -> None:
    async with (
        cluster(1, optimizer="sgd:lr=1") as made,
        rounds_of(made, 2, 2, 2) as (workers, locals_),
    ):
        log = Log()
        await asyncio.gather(*(log.take(one, 0) for one in locals_))
        await workers[0].set(policy="asp")

        async def go_on() -> None:
            for at in range(4):
                await asyncio.gather(*(log.take(one, at) for one in locals_))

        with pytest.raises(ConfigError, match=r"policy was changed.*use bsp or k-bsp"):
            await go_on()


async def test_patterns_say_what_is_contributed_together() -> None:
    fragments = [["b", "d"], ["a", "c"]]
    async with (
        cluster(2, optimizer="sgd:lr=1") as made,
        rounds_of(made, 1, 2, fragments) as ((worker,), (local,)),
    ):
        log, changed = Log(), []
        for at in range(4):
            before = await worker.pull()
            await log.take(local, at)
            await local.last.wait()
            after = await worker.pull()
            changed.append([key for key in SIZES if not np.array_equal(before[key], after[key])])
    assert changed == [["b", "d"], ["a", "c"]] * 2
