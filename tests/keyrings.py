"""Keys for tests: folders of a broker and of other machines, made at run time, and a cluster that
uses them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness import Cluster, cluster

from zkv.roles import Holder, check_roles
from zkv_net.keys import KeyFolder, Own


@dataclass
class Keys:
    """Keys folders under one root: the broker's is `head`."""

    root: Path

    def __post_init__(self) -> None:
        self.head = KeyFolder(self.root / "head")
        self.broker = self.head.make("broker", ("broker",))

    def folder(self, name: str) -> str:
        """The keys folder of a machine."""
        return str(self.root / name)

    def make(self, name: str, roles: str, *, add: bool = True) -> Own:
        """Make a machine's own keys; `add`: the broker lets them in."""
        folder = KeyFolder(self.root / name)
        own = folder.make(name, tuple(sorted(check_roles(roles))))
        folder.trust(self.broker.public)
        if add:
            self.let_in(own, roles)
        return own

    def let_in(self, own: Own, roles: str) -> None:
        """Let a key in at the broker."""
        self.head.add(Holder(own.public, own.name, check_roles(roles)))


@asynccontextmanager
async def safe(keys: Keys, servers: int = 1, **options: Any) -> AsyncIterator[Cluster]:
    """A cluster with keys, on loopback: the broker's, and one key, `node1`, for all servers."""
    keys.make("node1", "server")
    own = options.pop("server_options", {}) | {"keys": keys.folder("node1")}
    async with cluster(servers, keys=keys.folder("head"), server_options=own, **options) as made:
        yield made
