"""Who is there: the workers and servers that the broker knows, their numbers and incarnations.

A number is a place (a worker's rank, a server's index) and may be taken again; an incarnation is
one life of one process and never comes back. Knows no sockets; time comes in as `now`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from zkv import control as c
from zkv.errors import NameInUse, Refused, ZkvError
from zkv.time_split import Spent
from zkv.wire import INCARNATIONS_PER_TERM as INCARNATIONS_PER_TERM


@dataclass(slots=True)
class Worker:
    """A member: `peer` is the instance number of its process, `number` its place in sums."""

    peer: int
    number: int
    incarnation: int
    hello: c.WorkerHello
    barrier: int = 0
    barrier_token: int = 0
    leaving: bool = False
    leaving_at: float = 0.0
    spent: Spent | None = None
    """Where its time has gone, as it told last."""
    transport: str = ""
    """How payloads go between it and its servers, as it told last."""
    link_rate: float = 0.0
    """What its way to a server carries, in bytes per second, as it has measured; 0.0: not known."""
    address: str = ""
    """Where other workers reach it; "": they do not."""
    machine: str = ""
    """Alike for workers of one machine, whatever they call it."""

    def __str__(self) -> str:
        return (
            f"worker {self.number} ({self.hello.name!r} on {self.hello.host}, pid {self.hello.pid})"
        )


@dataclass(slots=True)
class Server:
    """A server: `index` is the place of its shard."""

    peer: int
    index: int
    hello: c.ServerHello
    index_sent: int = 0
    """Log entries below this have been queued for it."""
    broken: bool = False
    """Whether the broker's own connection to its data port has broken."""
    updates: int = 0
    """Updates of the model, as it told last; they took `update_s` seconds."""
    update_s: float = 0.0
    rows: tuple[tuple[int, int, int], ...] = ()
    """Of each table (kid) how many rows it has, and their bytes, as it told last."""

    def __str__(self) -> str:
        hello = self.hello
        return f"server {self.index} ({hello.name!r} at {hello.address}, pid {hello.pid})"


@dataclass(slots=True)
class Members:
    """All members of one broker's life. `servers_wanted` are waited for before anybody begins."""

    term: int
    servers_wanted: int
    world_min: int = 1
    workers: dict[int, Worker] = field(default_factory=dict)
    """By incarnation."""
    servers: dict[int, Server] = field(default_factory=dict)
    """By index."""
    by_peer: dict[int, Worker | Server] = field(default_factory=dict)
    workers_min: int = 0
    """With fewer than so many, nobody begins a batch; those who have left are not asked for."""
    left: int = 0
    """Workers that have left in good order."""
    passed: bool = False
    """Whether the start line was passed already, in a run that has gone back to a snapshot since:
    nobody is waited for, whatever newcomers say."""
    epoch: int = 0
    places: int = 0
    """Numbers that servers have had: those that have left are not given again."""
    vacant: int = 0
    """Servers that were lost, and for whom others may come."""
    _count: int = 0
    _world: int = 0

    @property
    def complete(self) -> bool:
        """Whether all servers that were asked for are here."""
        return len(self.servers) >= self.servers_wanted

    @property
    def world(self) -> int:
        """The number of workers: as stated by anybody, else as many as are here."""
        return max(self._world, self.world_min, len(self.training()))

    @property
    def expected(self) -> int:
        """How many workers the start line waits for."""
        return 1 if self.passed else max(self._world, self.world_min)

    def training(self) -> list[Worker]:
        """Return the members that train (observers only read), in the order of their numbers."""
        return sorted(
            (w for w in self.workers.values() if not w.hello.observer),
            key=lambda worker: worker.number,
        )

    def member(self, incarnation: int) -> Worker | None:
        """Return the member with this incarnation."""
        return self.workers.get(incarnation)

    def numbered(self, number: int) -> Worker | None:
        """Return the training member with this number."""
        return next((w for w in self.training() if w.number == number), None)

    def named(self, name: str) -> Worker | None:
        """Return the member with this name."""
        return next((w for w in self.workers.values() if w.hello.name == name), None)

    def holder(self, hello: c.WorkerHello) -> Worker | None:
        """Return who has the name that a newcomer wants, or its rank."""
        same = self.named(hello.name)
        if same is None and not hello.observer:
            same = self.numbered(hello.rank)
        return same

    def admit(self, peer: int, hello: c.WorkerHello) -> Worker | ZkvError:
        """Make a worker a member, or say why it cannot be one."""
        if self.named(hello.name) is not None:
            return NameInUse(
                f"a live worker already has the name {hello.name!r}; choose another, or stop "
                f"that one"
            )
        taken = {w.number for w in self.training()}
        if hello.rank in taken and not hello.observer:
            other = self.numbered(hello.rank)
            return Refused(
                f"rank {hello.rank} is taken by {other}; every worker needs its own RANK"
            )
        self._count += 1
        if hello.observer:
            number = 1_000_000 + self._count
        else:
            number = hello.rank if hello.rank >= 0 else next(self._free(taken))
            self._world = max(self._world, hello.world)
        worker = Worker(peer, number, self.term * INCARNATIONS_PER_TERM + self._count, hello)
        self.workers[worker.incarnation] = worker
        self.by_peer[peer] = worker
        self.epoch += 1
        return worker

    @staticmethod
    def _free(taken: set[int]) -> Iterator[int]:
        number = 0
        while True:
            if number not in taken:
                yield number
            number += 1

    def enrol(self, peer: int, hello: c.ServerHello) -> Server | ZkvError:
        """Give a server its index, or say why there is no place for it."""
        same = next((s for s in self.servers.values() if s.hello.address == hello.address), None)
        if same is not None:
            return NameInUse(
                f"{same} already announced the address {hello.address}; give this server "
                f"another port"
            )
        if self.complete and not hello.joins and not self.vacant:
            return Refused(
                f"all {self.servers_wanted} servers of this broker are here already; "
                f"start the broker with --servers {self.servers_wanted + 1} to use one more, or "
                "start this one with: zkv server add"
            )
        if self.complete:
            self.servers_wanted += 1
            self.vacant = max(0, self.vacant - 1)
            index = self.places
        else:
            index = next(i for i in range(self.servers_wanted) if i not in self.servers)
        self.places = max(self.places, index + 1)
        server = Server(peer, index, hello)
        self.servers[index] = server
        self.by_peer[peer] = server
        return server

    def link_changed(self, index: int, up: bool) -> None:
        """The connection to a server's data port is there, or has broken."""
        if index in self.servers:
            self.servers[index].broken = not up

    def dismiss(self, server: Server) -> None:
        """Forget a server that has left; its number is not given again."""
        self.servers_wanted -= 1
        self.servers.pop(server.index, None)
        self.by_peer.pop(server.peer, None)

    def lose(self, server: Server) -> None:
        """Forget a server that was lost: another one may come for it, under a number of its own."""
        self.dismiss(server)
        self.vacant += 1

    def find(self, name: str) -> Server:
        """Return the server with this number or name.

        Raises:
            Refused: there is none; those that there are are named.
        """
        for server in self.servers.values():
            if name == server.hello.name or (name.isdecimal() and int(name) == server.index):
                return server
        here = ", ".join(f"{s.index} ({s.hello.name})" for _, s in sorted(self.servers.items()))
        raise Refused(f"there is no server {name!r}; servers are {here}")

    def beaten(self, peer: int, beat: c.Beat) -> None:
        """Note what a member says of itself with each beat."""
        who = self.by_peer.get(peer)
        if isinstance(who, Worker):
            who.transport = beat.transport

    def remove(self, worker: Worker) -> None:
        """Forget a worker that has left or was lost."""
        if worker.leaving and not worker.hello.observer:
            self.left += 1
        self.workers.pop(worker.incarnation, None)
        self.by_peer.pop(worker.peer, None)
        self.epoch += 1

    def shortage(self) -> str:
        """Return how many workers are missing of `workers_min`; "" if there are enough."""
        here, needed = len(self.training()), self.workers_min - self.left
        if here >= needed:
            return ""
        return f"{here} of at least {needed} workers are here (--min-workers); start more of them"

    def names(self) -> list[str]:
        """Return the servers' names by their numbers; "" of those that have left."""
        here = self.servers
        return [here[at].hello.name if at in here else "" for at in range(self.places)]

    def incarnations(self) -> list[int]:
        """Return the incarnations of all members."""
        return sorted(self.workers)
