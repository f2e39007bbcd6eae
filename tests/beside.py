"""A cluster in a thread of its own, for tests of the blocking worker in this one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from harness import Cluster, cluster

import zkv


@contextmanager
def cluster_beside(
    servers: int = 2, **options: Any
) -> Iterator[tuple[Cluster, Callable[..., Any]]]:
    """Run a cluster in a thread of its own, for blocking workers in this one.

    Yields the cluster and a function that runs a coroutine beside it and returns a future.
    """
    ready: Future[tuple[Cluster, asyncio.AbstractEventLoop, asyncio.Event]] = Future()

    async def main() -> None:
        async with cluster(servers, **options) as made:
            over = asyncio.Event()
            ready.set_result((made, asyncio.get_running_loop(), over))
            await over.wait()

    def run() -> None:
        try:
            asyncio.run(main())
        except BaseException as error:
            if ready.done():
                raise
            ready.set_exception(error)

    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(run)
        made, loop, over = ready.result(10)
        try:
            yield made, lambda coroutine: asyncio.run_coroutine_threadsafe(coroutine, loop)
        finally:
            loop.call_soon_threadsafe(over.set)
            running.result(20)


def blocking(made: Cluster, **options: Any) -> zkv.Worker:
    return zkv.connect(made.address, connect_timeout_s=8.0, wait_timeout_s=8.0, **options)
