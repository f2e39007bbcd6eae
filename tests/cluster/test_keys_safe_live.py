"""Keys on all sockets of a live cluster: who gets in, who does not, and what each side is told."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness import Cluster, cluster

from zkv.roles import Holder, check_roles
from zkv_net.keys import KeyFolder, Own


@dataclass
class Keys:
    """Keys folders of a broker and of others, made for one test."""

    root: Path

    def __post_init__(self) -> None:
        self.head = KeyFolder(self.root / "head")
        self.broker = self.head.make("broker", ("broker",))

    def folder(self, name: str) -> str:
        return str(self.root / name)

    def make(self, name: str, roles: str, *, add: bool = True) -> Own:
        """A machine's own keys; `add`: the broker lets them in."""
        folder = KeyFolder(self.root / name)
        own = folder.make(name, tuple(check_roles(roles)))
        folder.trust(self.broker.public)
        if add:
            self.let_in(own, roles)
        return own

    def let_in(self, own: Own, roles: str) -> None:
        self.head.add(Holder(own.public, own.name, check_roles(roles)))


@asynccontextmanager
async def safe(keys: Keys, servers: int = 1, **options: Any) -> AsyncIterator[Cluster]:
    """A cluster with keys: the broker's, and one server key for all servers."""
    keys.make("node1", "server")
    own = options.pop("server_options", {}) | {"keys": keys.folder("node1")}
    async with cluster(servers, keys=keys.folder("head"), server_options=own, **options) as made:
        yield made


@pytest.mark.parametrize("route", ["direct", "broker"])
async def test_workers_with_keys_train(tmp_path, route):
    keys = Keys(tmp_path)
    keys.make("node2", "worker")
    keys.make("node3", "worker")
    async with safe(keys, 2, route=route, workers=2) as made:

        async def body(worker: Any) -> float:
            await worker.init({"w": np.zeros(4, np.float32)}, rule="sgd:lr=1")
            for _ in range(3):
                async with worker.batch() as batch:
                    batch.push("w", np.ones(4, np.float32))
            await batch.wait()
            return float((await worker.pull("w"))[0])

        async def one(rank: int, name: str) -> float:
            async with made.worker(rank, world=2, keys=keys.folder(name)) as worker:
                return await body(worker)

        assert await asyncio.gather(one(0, "node2"), one(1, "node3")) == [-3.0, -3.0]
