"""A whole cluster in one event loop, over real sockets on loopback: for tests that await events.

Broker, servers and workers are the project's own drivers; only the processes are missing. Faults
that need a process to die are tested with real processes (marker `cluster`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from zkv.aio import AsyncWorker, connect
from zkv.policy import policy
from zkv_brokers.broker import Broker, BrokerConfig
from zkv_brokers.server import Server, ServerConfig


@dataclass
class Cluster:
    """A running broker and its servers; `worker()` makes workers."""

    broker: Broker
    servers: list[Server]
    tasks: list[asyncio.Task[None]] = field(default_factory=list)
    route: str = "direct"

    @property
    def address(self) -> str:
        return self.broker.address

    def worker(self, rank: int | None = None, **options: Any) -> AsyncWorker:
        """Return an unconnected worker; use it with `async with`."""
        options.setdefault("wait_timeout_s", 20.0)
        options.setdefault("connect_timeout_s", 20.0)
        options.setdefault("route", self.route)
        return connect(self.address, rank=rank, **options)

    async def run(
        self, *bodies: Callable[[AsyncWorker], Awaitable[Any]], world: int | None = None
    ) -> list[Any]:
        """Run one body for each worker, ranks 0, 1, ..., and return their results."""

        async def one(rank: int, body: Callable[[AsyncWorker], Awaitable[Any]]) -> Any:
            async with self.worker(rank, world=len(bodies) if world is None else world) as worker:
                return await body(worker)

        return list(await asyncio.gather(*(one(rank, body) for rank, body in enumerate(bodies))))

    async def restart_broker(self, **changes: Any) -> None:
        """End the broker without a word, and start another one on its address and its journal."""
        old = self.broker
        # `stop` would take a last snapshot.
        old._stopped.set()
        await self.tasks[0]
        assert old._lasting is not None
        old._lasting.close(done=False)
        old.close()
        binds = {"bind": old.address, "data_bind": old.data_address}
        self.broker = Broker(replace(old.config, **binds, **changes))
        self.broker.start()
        self.tasks[0] = asyncio.create_task(self.broker.serve())


@asynccontextmanager
async def cluster(
    servers: int = 2, *, policy_text: str = "bsp", route: str = "direct", **options: Any
) -> AsyncIterator[Cluster]:
    """Start a broker and servers on free loopback ports; stop them at the end.

    `server_options` in `options` go to the servers' configuration, the rest to the broker's;
    `server_records` are files, one for each server, that record its life.
    """
    server_options = options.pop("server_options", {})
    records = options.pop("server_records", [None] * servers)
    config = BrokerConfig(policy(policy_text), bind="tcp://127.0.0.1:0", servers=servers)
    broker = Broker(replace(config, **options))
    broker.start()
    made = Cluster(broker, [], route=route)
    made.tasks.append(asyncio.create_task(broker.serve()))
    try:
        for record in records:
            server = Server(ServerConfig(broker.address, record=record, **server_options))
            server.start()
            made.servers.append(server)
            made.tasks.append(asyncio.create_task(server.serve()))
        yield made
    finally:
        made.broker.stop()
        for server in made.servers:
            server.stop()
        results = await asyncio.gather(*made.tasks, return_exceptions=True)
        for server in made.servers:
            server.close()
        made.broker.close()
        unexpected = [
            r for r in results if isinstance(r, BaseException) and not isinstance(r, Exception)
        ]
        assert not unexpected, unexpected


async def until(
    condition: Callable[[], Any], *, timeout_s: float = 10.0, what: str = "a condition"
) -> None:
    """Wait, turn by turn of the loop, until a condition on the cluster's state holds."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_s
    while not condition():
        assert loop.time() < deadline, f"{what} did not hold within {timeout_s} s"
        await asyncio.sleep(0.005)
