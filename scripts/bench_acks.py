"""What acknowledgements and deduplication cost of a batch (`scripts/bench_acks --help`).

They cannot be left out, as nothing would ever be let go; so they are done five times, which they
bear by design, and a quarter of the difference is what they cost once. Every other turn does: each
receipt for blocks is encoded, sent, received and taken in so often, in both directions, each bare
receipt of a control link too, and each push is looked up so often among the marks of what was
settled.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import numpy as np

from zkv import aio
from zkv import data_messages as d
from zkv.link import Link
from zkv.policy import policy
from zkv_brokers.broker import Broker, BrokerConfig
from zkv_brokers.contributions import Contributions
from zkv_brokers.server import Server, ServerConfig
from zkv_brokers.shard import Shard
from zkv_brokers.shard_events import ToWorker
from zkv_net import loop as net
from zkv_workers.downloads import Downloads

MIB = 1 << 20
WARM = 6
"""Turns that are not counted."""
LIMIT = 0.05
MORE = 4
"""Times that all is done once more: one alone is lost in what batches differ by anyway."""


class Often:
    """Whether acknowledgements and lookups happen more often at present, and how many are one."""

    def __init__(self) -> None:
        self.on = False
        self.receipts = self.lookups = 0
        self._wrap(Shard, "turn_over", self._repeated)
        self._wrap(Downloads, "receipts", self._repeated)
        self._wrap(Link, "outgoing", self._repeated)
        self._wrap(Contributions, "is_settled", self._looked_up)

    def _wrap(self, kind: type, name: str, around: Callable[..., Any]) -> None:
        plain = getattr(kind, name)
        setattr(kind, name, lambda *given: around(plain, *given))

    def _repeated(self, plain: Callable[..., list[Any]], *given: Any) -> list[Any]:
        out = plain(*given)
        if self.on and out:
            again = [one for one in out if is_receipt(one)]
            self.receipts += len(again)
            out = [*out, *(again * MORE)]
        return out

    def _looked_up(self, plain: Callable[..., bool], *given: Any) -> bool:
        if self.on:
            self.lookups += 1
            for _ in range(MORE):
                plain(*given)
        return plain(*given)


def is_receipt(one: Any) -> bool:
    """Return whether an action, or a control packet, acknowledges something and does nothing
    else."""
    if isinstance(one, ToWorker):
        return isinstance(one.message, d.Ack)
    message = getattr(one, "message", None)
    return isinstance(message, d.Got) or getattr(one, "messages", None) == []


@asynccontextmanager
async def cluster(mib: int, workers: int, shared: int) -> AsyncIterator[list[Any]]:
    """A broker, a server and workers in this one loop, so that all of their time is this process's;
    blocks of 1 MiB."""
    async with AsyncExitStack() as stack:
        config = BrokerConfig(
            *(policy("bsp"),), bind="tcp://127.0.0.1:0", workers=workers, block_bytes=MIB
        )
        broker = Broker(config)
        broker.start()
        server = Server(ServerConfig(broker.address, shared_bytes=shared))
        server.start()
        serving = [asyncio.create_task(one.serve()) for one in (broker, server)]
        try:
            made = [
                await stack.enter_async_context(
                    aio.connect(broker.address, rank=rank, world=workers, shared_bytes=shared)
                )
                for rank in range(workers)
            ]
            params = {f"w{at}": np.zeros(MIB // 4, np.float32) for at in range(mib)}
            await asyncio.gather(*(one.init(params, rule="sgd:lr=1") for one in made))
            yield made
        finally:
            await stack.aclose()
            for one in (server, broker):
                one.stop()
            await asyncio.gather(*serving, return_exceptions=True)
            for one in (server, broker):
                one.close()


async def turn(workers: list[Any], gradients: dict[str, Any], batches: int) -> tuple[float, float]:
    """Return the seconds of wall and processor time that a batch takes in a turn."""

    async def train(worker: Any) -> None:
        for _ in range(batches):
            async with worker.batch() as batch:
                batch.push_all(gradients.items())
        await batch.wait()

    began, spent = time.perf_counter(), time.process_time()
    await asyncio.gather(*(train(worker) for worker in workers))
    return (time.perf_counter() - began) / batches, (time.process_time() - spent) / batches


async def measured(asked: argparse.Namespace, shared: int, often: Often) -> dict[str, Any]:
    """Return what a batch takes, and what receipts and lookups have of it, by pairs of turns."""
    gradients = {f"w{at}": np.ones(MIB // 4, np.float32) for at in range(asked.mib)}
    once, more = [], []
    async with cluster(asked.mib, asked.workers, shared) as workers:
        often.receipts = often.lookups = 0
        for number in range(WARM + 2 * asked.pairs):
            # Whoever is second has warmer caches: they take turns at that, too.
            often.on = bool(number % 2) ^ bool(number // 2 % 2)
            found = await turn(workers, gradients, asked.batches)
            if number >= WARM:
                (more if often.on else once).append(found)
    shares = {}
    for at, name in ((0, "wall"), (1, "processor")):
        ratios = sorted((b[at] / a[at] - 1) / MORE for a, b in zip(once, more, strict=True))
        quarter = len(ratios) // 4
        shares[name] = {
            "share": statistics.median(ratios),
            "from": ratios[quarter],
            "to": ratios[-1 - quarter],
        }
    count = len(more) * asked.batches
    return {
        "payloads": "memory" if shared else "tcp",
        "batch_s": statistics.median(wall for wall, _ in once),
        "processor_s": statistics.median(spent for _, spent in once),
        "receipts": often.receipts / count,
        "lookups": often.lookups / count,
        "shares": shares,
    }


async def run(asked: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure both ways that payloads go."""
    often = Often()
    return [await measured(asked, shared, often) for shared in (0, 512 * MIB)]


def main() -> int:
    """Measure, and print a table or JSON; 1: it costs too much."""
    parser = argparse.ArgumentParser(prog="scripts/bench_acks", description=__doc__)
    parser.add_argument("--mib", type=int, default=64, help="of the model (64)")
    parser.add_argument("--workers", type=int, default=2, help="(2)")
    parser.add_argument("--batches", type=int, default=4, help="of one turn (4)")
    parser.add_argument("--pairs", type=int, default=40, help="of turns (40)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    asked = parser.parse_args()
    rows = net.run(lambda: run(asked))
    if asked.json:
        print(json.dumps({"mib": asked.mib, "workers": asked.workers, "rows": rows}))
    else:
        print(f"{asked.mib} blocks of 1 MiB, {asked.workers} workers, all in one process")
        for row in rows:
            print(
                f"{row['payloads']:<7} {1e3 * row['batch_s']:.1f} ms a batch "
                f"({1e3 * row['processor_s']:.1f} of processors), {row['receipts']:.0f} receipts, "
                f"{row['lookups']:.0f} lookups"
            )
            for name, one in row["shares"].items():
                within = f"{one['from']:.1%} to {one['to']:.1%}"
                print(f"  of {name:<9} {one['share']:6.1%}  (half of the pairs: {within})")
    # Processors: nothing else that runs on the machine is in it.
    return int(any(row["shares"]["processor"]["share"] > LIMIT for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
