"""Blocking workers for tests, each on a thread of its own.

It knows the worker's face and the harness; it must not know messages or machines.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from harness import Cluster, cluster

import zkv


@contextmanager
def worker_of(made: Cluster, rank: int = 0, world: int = 1, **options: Any) -> Iterator[Any]:
    options.setdefault("wait_timeout_s", 15.0)
    with zkv.connect(made.address, rank=rank, world=world, **options) as worker:
        yield worker


async def on_threads(made: Cluster, *bodies: Callable[[Any], Any], **options: Any) -> list[Any]:
    """Run each body with a worker of its own, ranks 0, 1, ...; return their results."""

    def one(rank: int, body: Callable[[Any], Any]) -> Any:
        with worker_of(made, rank, len(bodies), **options) as worker:
            return body(worker)

    threads = (asyncio.to_thread(one, rank, body) for rank, body in enumerate(bodies))
    return list(await asyncio.gather(*threads))


def trained(*bodies: Callable[[Any], Any], servers: int = 1, **options: Any) -> list[Any]:
    """Run each body with a worker of its own on a cluster of its own; return their results."""

    async def run() -> list[Any]:
        async with cluster(servers, **options) as made:
            return await on_threads(made, *bodies)

    return asyncio.run(run())
