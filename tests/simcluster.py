"""The simulated cluster: the real router, nodes and sessions in one thread, under a virtual clock.

A seed decides everything: delays, losses, duplicates, order, who crashes when. Faults are options,
so that each run can draw its own. A gradient is a one-hot token beside random numbers, so that a
contribution that is lost, applied twice, or torn between servers is seen exactly.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from simbroker import SimBroker, after

from zkv import control as c
from zkv import data_messages as d
from zkv import snapshot as sn
from zkv import tensor_file
from zkv.data_messages import decode_data, encode_data
from zkv.dtypes import Array
from zkv.errors import BadSnapshot, Cancelled, PushRefused, ZkvError
from zkv.layout import Layout
from zkv.link import Link
from zkv.optim import rule, update
from zkv.optimizer_spec import OptimizerSpec
from zkv.policy import policy
from zkv.pool import Shard
from zkv.staleness import staleness
from zkv.sums import divided, tree_sum, weighted, weighted_mean
from zkv.topology import Member, in_ring, owners
from zkv.wire import MODEL
from zkv_brokers import node as n
from zkv_brokers import router as r
from zkv_brokers import saving
from zkv_brokers.aggregates import spans
from zkv_brokers.moves import Step
from zkv_brokers.saving import Saved
from zkv_brokers.shard_events import Load, Loaded, Write, Wrote
from zkv_brokers.signals import Complete, Find, GiveUp, Written
from zkv_codecs.backend import NUMPY
from zkv_codecs.frames import aligned, from_payload
from zkv_codecs.packed import Packed, seed_of
from zkv_codecs.plan import plan
from zkv_workers import signals as s
from zkv_workers.config import SessionConfig
from zkv_workers.encoding import Encoder, Sealed
from zkv_workers.model import BatchState, specs_of
from zkv_workers.packing import Full
from zkv_workers.running import Running
from zkv_workers.session import Session
from zkv_workers.unpacking import unpack

TICK_S = 0.1
Program = Generator[Any, Any, None]


@dataclass(frozen=True)
class Options:
    """What a run is made of. Times in virtual seconds; probabilities are for each message."""

    policy: str = "bsp"
    workers: int = 3
    servers: int = 2
    batches: int = 6
    delay_s: float = 0.002
    reorder: bool = False
    loss: float = 0.0
    duplicate: float = 0.0
    crashes: int = 0
    restart: bool = True
    compute_s: tuple[float, ...] = (0.02, 0.05, 0.07)
    optimizer: str = "momentum:lr=0.1,momentum=0.9"
    window_bytes: int = 1 << 20
    budget_bytes: int = 0
    uneven: bool = False
    withdraw: float = 0.0
    void: float = 0.0
    pull: float = 0.0
    plain: int = 0
    barrier: bool = False
    broker_restarts: int = 0
    """How often another broker, without a journal, takes its place before anything was begun."""
    broker_crashes: int = 0
    """How often it dies, to go on from its journal."""
    broker_down_s: float = 1.5
    """For how long at most it is away then."""
    staleness: str = "none"
    codec: str = "none"
    codec_down: str = "none"
    samples: int = 0
    """Samples of a pool that is shared instead of `batches` for each worker; 0: no pool."""
    passes: int = 2
    retry: bool = True
    streaming: bool = True
    layer_s: float = 0.0
    """Between the pushes of two keys of a batch."""
    undeclared: float = 0.0
    """How often a batch says its weight only at its end, and how often it says another one then."""
    rates: float = 0.0
    """How often a worker changes the learning rate between two batches, or in one."""
    on_demand: tuple[int, ...] = ()
    """The workers (by rank) that ask for values key by key, before and again after they compute."""
    prefetch: int = 0
    skips: int = 0
    """Of so many batches in a row, told by the version that was granted, one pushes `v` and another
    one `w`; 0: all push both."""
    priority: bool = True
    """Send what the next forward pass needs first before the rest; else as it came."""
    measures: bool = False
    """Whether workers measure their links first."""
    topology: str = "servers"
    hosts: int = 2
    """Over how many hosts workers are spread, by turns."""
    cut: tuple[int, ...] = ()
    """The workers (by rank) whose messages to other workers never arrive."""
    moves: int = 0
    """How often some blocks are sent to other servers, drawn anew each time."""
    rebalances: int = 0
    adds: int = 0
    """Servers that join the run."""
    drains: int = 0
    deaths: int = 0
    """How often a server that joined dies, if it owns nothing yet."""
    replicas: int = 0
    losses: int = 0
    """How often a server dies that the others can go on without, as they have copies of its
    blocks."""
    losing_at: str = ""
    """When they die: "summing", while an update waits for square sums; "sending", while values are
    on their way that were made ahead of the log; "copied", while values are on their way that were
    granted before there were copies; "": at any time."""
    isolates: float = 0.0
    """How often such a server only loses its way to the broker, for some seconds, while it goes on
    talking with workers."""
    returns: bool = True
    """Whether another one is started for it."""
    snapshots: int = 0
    """How often somebody asks for one."""
    every: str = ""
    """How often they are taken by themselves."""
    disk_s: float = 0.05
    """How long a file is on its way to the disk."""
    broken_disk: float = 0.0
    """How often a file cannot be written."""
    server_lost_s: float = 60.0
    """After so much silence a server is lost though its connection is there."""
    until_s: float = 400.0


@dataclass
class Pushed:
    """One contribution as its worker made it, and what it was told of it."""

    worker: int
    token: int
    weight: float
    gradients: dict[str, Array]
    """Of the keys that it did not skip."""
    samples: c.Samples | None = None
    fate: s.Fate | None = None
    base: tuple[int, dict[str, Array]] | None = None
    """The version that it was computed on, and what its worker had of that."""


@dataclass
class SimWorker:
    session: Session
    program: Program | None = None
    alive: bool = True
    waiting: int = 0
    running: Running = field(default_factory=Running)
    encoder: Encoder = field(default_factory=Encoder)
    samples: c.Samples | None = None
    base: tuple[int, dict[str, Array]] | None = None
    sleeping: int = 0
    calls: dict[int, Callable[[Any], None]] = field(default_factory=dict)
    tokens: int = 0
    servers: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class _Replayed:
    """A version as one process makes it of the log: values, the rule's state, what workers have of
    it, and how many updates each key has had."""

    values: dict[str, Array]
    slots: dict[str, tuple[Array, ...]]
    view: dict[str, Array]
    updates: dict[str, int]


class Sim:
    """One run. `run()` returns when all programs have ended, or raises AssertionError."""

    def __init__(
        self, seed: int, options: Options, before: tuple[Sim, sn.Manifest] | None = None
    ) -> None:
        self.seed, self.options = seed, options
        self.before = before
        """The run, and its snapshot, that this one begins from."""
        self.first = 0 if before is None else before[1].version
        """The version that this run begins with."""
        self.rng = random.Random(seed)
        self.now = 0.0
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.count = 0
        self.contributions: dict[tuple[int, int], Pushed] = {}
        self.plain: dict[int, Pushed] = {}
        self.fifo: dict[Any, float] = {}
        self.notes: list[str] = []
        self.seen: dict[int, dict[str, Array]] = {}
        """What workers computed on, by version."""
        self.reads: dict[tuple[int, int], int] = {}
        """The version that a worker has read after each batch."""
        self.ended = 0
        self.joint: dict[int, list[Member]] = {}
        """Who was told to add gradients up among themselves, by the update's version."""
        self.peer_bytes: Counter[bytes] = Counter()
        """What workers have sent each other, repeats included."""
        self.tokens = 0 if before is None else before[0].tokens
        self.disk: dict[str, dict[str, bytes]] = {}
        """Files of snapshots, by snapshot and name."""
        self.history: dict[int, _Replayed] = {}
        """What the replay has, by version."""
        self.dead: set[int] = set()
        """Nodes that were drained, or died."""
        self.lost: list[int] = []
        """Servers that died with blocks of theirs, by number."""
        self.isolated: set[int] = set()
        """Nodes that have no way to the broker."""
        self.was_isolated: set[int] = set()
        self.term = 0 if before is None else before[0].term
        self.router = self._new_router()
        self.broker = SimBroker(self, self.router)
        self.nodes = [self._node(index) for index in range(options.servers)]
        self.workers: dict[bytes, SimWorker] = {}
        self.routes: dict[int, bytes] = {}
        for index in range(options.servers):
            self.later(0.0, lambda i=index: self._do_node(i, self.nodes[i].tick(self.now)))
            self.later(TICK_S, lambda i=index: self._tick_node(i))
        self.later(TICK_S, self._tick_router)
        for rank in range(options.workers):
            self.later(self.rng.random() * 0.05, lambda i=rank: self.start_worker(i))
        for _ in range(options.crashes):
            self.later(0.3 + self.rng.random() * 1.5, self._crash)
        for _ in range(options.moves):
            self.later(0.1 + self.rng.random() * 1.2, self._move)
        for _ in range(options.adds):
            self.later(0.1 + self.rng.random(), self._add)
        for _ in range(options.deaths):
            self.later(0.15 + self.rng.random(), self._die)
        for _ in range(options.losses):
            self.later(0.2 + self.rng.random() * 1.5, self._lose)
        for action in ["rebalance"] * options.rebalances + ["drain"] * options.drains:
            self.later(0.2 + self.rng.random() * 1.2, lambda a=action: self._ask(a))
        for _ in range(options.snapshots):
            self.later(0.05 + self.rng.random() * 1.2, self._ask_for_a_snapshot)
        for _ in range(options.broker_restarts):
            self.later(self.rng.random() * 0.15, self._restart_broker)
        for _ in range(options.broker_crashes):
            self.later(self.rng.random() * 1.5, self.broker.crash)

    def _new_router(self) -> r.Router:
        options, self.term = self.options, self.term + 1
        config = r.RouterConfig(
            address="tcp://sim:1",
            policy=policy(options.policy),
            servers=options.servers,
            workers=options.workers,
            optimizer=options.optimizer,
            staleness=options.staleness,
            codec=options.codec,
            codec_down=options.codec_down,
            worker_lost_s=3.0,
            server_lost_s=options.server_lost_s,
            server_back_s=6.0,
            keep_log=True,
            streaming=options.streaming,
            topology=options.topology,
            replicas=options.replicas,
            snapshot_dir="sim",
            snapshot_every=options.every,
            restored="" if self.before is None else sn.encode(self.before[1]).decode(),
            restored_from="sim",
            lasts=bool(options.broker_crashes),
        )
        instance = (self.term << 50) + self.rng.getrandbits(40)
        return r.Router(config, term=self.term, instance=instance)

    def _restart_broker(self) -> None:
        """Kill the broker and start another, as long as nothing was begun."""
        if not self.router.groups.by_number and self.broker.lives == 1 and self.broker.up:
            self.notes.append(f"{self.now:.2f} the broker was restarted")
            self.router = self.broker.router = self._new_router()
            self.broker.begin()

    def number(self) -> int:
        return self.rng.getrandbits(60) | 1

    # --- time and the network --------------------------------------------------------------------

    def later(self, delay_s: float, action: Callable[[], None]) -> None:
        self.count += 1
        heapq.heappush(self.events, (self.now + delay_s, self.count, action))

    def carry(self, channel: Any, action: Callable[[], None]) -> None:
        """Deliver a message over a channel, with this run's faults."""
        options = self.options
        copies = 1 + (self.rng.random() < options.duplicate)
        for _ in range(copies):
            if self.rng.random() < options.loss:
                continue
            at = self.now + options.delay_s * (0.2 + self.rng.expovariate(1.0))
            if not options.reorder:
                at = max(at, self.fifo.get(channel, 0.0))
                self.fifo[channel] = at
            self.later(at - self.now, action)

    def run(self) -> Sim:
        while self.ended < self.options.workers:
            assert self.events, self.story()
            assert self.now < self.options.until_s, self.story()
            self.now, _, action = heapq.heappop(self.events)
            action()
        return self

    def story(self) -> str:
        waits = [w.session.requests.reason for w in self.workers.values()]
        what = f"seed {self.seed}, {self.options}: stuck at {self.now:.2f} s"
        return f"{what}; reasons {waits}; {self.notes[-20:]}"

    # --- the broker --------------------------------------------------------------------------

    def _tick_router(self) -> None:
        self._do_router(self.broker.take([r.Tick()]))
        self.later(TICK_S, self._tick_router)

    def to_router(self, route: bytes, frame: bytes) -> None:
        broker, life = self.broker, self.broker.lives

        if route.startswith(b"s") and int(route[1:]) in self.isolated:
            return

        def heard() -> None:
            self._do_router(broker.take([r.Received(route, frame)]))

        self.carry((route, "router"), lambda: after(broker, life, heard))

    def _do_router(self, actions: list[r.Action]) -> None:
        model = self.router.groups.model
        if model is not None and model.together.version:
            workers = self.router.members.workers
            self.joint[model.together.version] = [
                Member(number, workers[one.incarnation].machine)
                for number, one in model.together.members.items()
            ]
        self.deliver(actions)

    def deliver(self, actions: list[r.Action]) -> None:
        """Carry what a broker says to those whom it says it to."""
        for action in actions:
            if isinstance(action, r.Send):
                self.carry(
                    ("router", action.route), lambda a=action: self._from_router(a.route, a.frame)
                )
            elif isinstance(action, r.Note):
                self.notes.append(f"{self.now:.2f} {action.text}")
            elif isinstance(action, Complete):
                life = self.broker.lives
                self.to_disk(lambda a=action, life=life: self._complete(a, life))
            elif isinstance(action, GiveUp):
                self.disk.pop(action.name, None)
            elif isinstance(action, Find):
                life = self.broker.lives
                self.to_disk(lambda a=action, life=life: self._find(a, life))

    def _find(self, action: Find, life: int) -> None:
        """Look for a snapshot that is whole."""
        problems = []
        for url, name in action.places:
            for manifest in self.manifests()[::-1]:
                if name not in ("", manifest.name):
                    continue
                try:
                    for part in manifest.parts:
                        data = self.disk[manifest.name].get(part.file, b"")
                        sn.check_part(part, len(data), sn.digest_of(data), part.file)
                except BadSnapshot as error:
                    problems.append(str(error))
                    continue
                text = sn.encode(manifest).decode()
                self.term += 1
                if self.broker.lives == life:
                    self._do_router(self.broker.take([r.Found(url, text, self.term)]))
                return
        why = "; ".join(problems) or "there is none"
        if self.broker.lives == life:
            self._do_router(self.broker.take([r.Found("", "", self.term, why)]))

    def went_back(self, successor: r.Router) -> None:
        """The run begins again from a snapshot, under another router."""
        raise AssertionError(f"nobody has asked for that; {self.story()}")

    def _from_router(self, route: bytes, frame: bytes) -> None:
        if route.startswith(b"s"):
            index = int(route[1:])
            if index not in self.dead | self.isolated:
                self._do_node(index, self.nodes[index].broker_says(frame, self.now))
        elif (worker := self.workers.get(route)) is not None and worker.alive:
            self._do_worker(route, worker, worker.session.handle(s.FromBroker(frame), self.now))

    def _move(self) -> None:
        """Have some blocks move to other servers."""
        layout, servers = self.router.layout, sorted(self.router.members.servers)
        blocks = sorted(layout.blocks)
        chosen = self.rng.sample(blocks, self.rng.randint(0, len(blocks)))
        steps = [
            Step(bid, layout.blocks[bid].server, to)
            for bid in chosen
            if (to := self.rng.choice(servers)) != layout.blocks[bid].server
        ]
        self.notes.append(f"{self.now:.2f} moves: {steps}")
        self.router.moves.plan(steps)
        self.broker.begin()
        self._do_router(self.broker.take([r.Tick()]))

    def _ask(self, action: str) -> None:
        """Have somebody ask for a rebalance, or for any server to be drained."""
        link = Link(self.number())
        name = f"server-{self.rng.randrange(len(self.nodes))}" if action == "drain" else ""
        self.notes.append(f"{self.now:.2f} {action} {name}")
        link.send(c.Rearrange(1, action, name))
        for packet in link.outgoing(self.now):
            self.to_router(b"o%d" % link.instance, c.encode_packet(packet))

    # --- the disk ----------------------------------------------------------------------------

    def _ask_for_a_snapshot(self) -> None:
        link = Link(self.number())
        link.send(c.TakeSnapshot(1))
        for packet in link.outgoing(self.now):
            self.to_router(b"o%d" % link.instance, c.encode_packet(packet))

    def to_disk(self, action: Callable[[], None]) -> None:
        """Do something when the disk comes to it."""
        self.later(self.options.disk_s * self.rng.expovariate(1.0), action)

    def _fails(self) -> str:
        return "the disk is full" if self.rng.random() < self.options.broken_disk else ""

    def _write(self, index: int, action: Write) -> None:
        """Write a file: what its arrays are now is what is in it."""
        if index in self.dead:
            return
        pieces = tensor_file.pieces(action.saved.arrays, action.saved.metadata)
        data, why = b"".join(bytes(one) for one in pieces), self._fails()
        if not why:
            self.disk.setdefault(action.name, {})[action.file] = data
        wrote = Wrote(action.number, len(data), sn.digest_of(data), why)
        self._do_node(index, self.nodes[index].disk_says(wrote, self.now))

    def _complete(self, action: Complete, life: int) -> None:
        if action.manifest.name not in self.disk:
            return  # It was given up meanwhile: files are removed behind what is being written.
        why, there = self._fails(), self.disk[action.manifest.name]
        for part in action.manifest.parts:
            data = there[part.file]
            sn.check_part(part, len(data), sn.digest_of(data), part.file)
        if not why:
            there[sn.MANIFEST] = sn.encode(action.manifest)
        # The disk's thread ends with its broker, with its last word unsaid.
        if self.broker.lives == life:
            self._do_router(self.broker.take([Written(action.number, why)]))

    def _load(self, index: int, action: Load) -> None:
        """Read what there is of some blocks."""
        sim, manifest = self.restored(action)
        found = Saved() if (why := self._fails()) else sim.saved(manifest).only(action.bids)
        assert sn.decode_checksum(sn.encode(manifest)) == action.checksum
        if index not in self.dead:
            loaded = Loaded(action.term, found, why)
            self._do_node(index, self.nodes[index].disk_says(loaded, self.now))

    def restored(self, action: Load) -> tuple[Sim, sn.Manifest]:
        """Return the run and its snapshot that blocks are read from."""
        assert self.before is not None
        return self.before

    def manifests(self) -> list[sn.Manifest]:
        """Return the manifests of the snapshots that there are, the oldest first."""
        return [
            sn.decode(files[sn.MANIFEST], name)
            for name, files in sorted(self.disk.items())
            if sn.MANIFEST in files
        ]

    def saved(self, manifest: sn.Manifest) -> Saved:
        """Return all that is in the files of a snapshot."""
        found = Saved()
        for part in manifest.servers:
            data = self.disk[manifest.name][part.file]
            found.join(saving.read(*tensor_file.opened(data, part.file), part.file))
        return found

    def _add(self, *, joins: bool = True) -> None:
        """Start one more server."""
        index = len(self.nodes)
        self.nodes.append(self._node(index, joins=joins))
        self.notes.append(f"{self.now:.2f} server-{index} is started")
        self._tick_node(index)

    def _die(self) -> None:
        """Kill a server that joined, as long as nothing is lost with it: nor first values."""
        if not self.commits():
            self.later(0.1, self._die)
            return
        members = self.router.members.servers
        for number in sorted(self.router.fleet.joined & members.keys()):
            at = self.place(number)
            copies = self.nodes[at].shard.copies.mirrored.values()
            # Who has said that a copy is live may own the block by now.
            if self.router.fleet.may_go(members[number]) and not any(one.live for one in copies):
                self.dead.add(at)
                self.notes.append(f"{self.now:.2f} server-{at} died")
                self.later(0.01, lambda n=number: self._link_broke(n))
                return

    def _lose(self) -> None:
        """Kill a server whose blocks have copies that stand by."""
        members = self.router.members.servers
        hindrance, closed = self.router.replicas.hindrance, self.router.fleet.closed()
        here = [one for number, one in sorted(members.items()) if number not in closed]
        able = [one for one in here if not hindrance(one)]
        # One at a time is what copies are for.
        down = any(self.place(number) in self.dead | self.isolated for number in members)
        if down or len(members) < 2 or not able or not self._is_time_to_lose():
            self.later(0.003 if self.options.losing_at else 0.05, self._lose)
            return
        number = self.rng.choice(able).index
        at = self.place(number)
        self.lost.append(number)
        if self.rng.random() < self.options.isolates:
            self.isolated.add(at)
            self.was_isolated.add(at)
            self.notes.append(f"{self.now:.2f} server-{at} (number {number}) is cut off")
            self.later(2.0 + 3 * self.rng.random(), lambda: self.isolated.discard(at))
        else:
            self.dead.add(at)
            self.notes.append(f"{self.now:.2f} server-{at} (number {number}) died")
        self._link_broke(number)
        if self.options.returns:
            self.later(0.1 + 3 * self.rng.random(), lambda: self._add(joins=False))

    def _is_time_to_lose(self) -> bool:
        model, pins = self.router.groups.model, self.router.groups.pins.by_grant
        if model is None:
            return False
        match self.options.losing_at:
            case "summing":
                return model.is_summing
            case "sending":
                return any(one == model.version > 0 for one in pins.values())
            case "copied":
                known = self.router.replicas._older.values()
                return any(grants & pins.keys() for grants in known)
            case _:
                return True

    def _link_broke(self, number: int) -> None:
        if not self.broker.up:
            self.later(0.1, lambda: self._link_broke(number))
        self._do_router(self.broker.take([r.ServerLink(number, False)]))

    # --- servers -----------------------------------------------------------------------------

    def _node(self, index: int, *, joins: bool = False) -> n.Node:
        config = n.NodeConfig(
            "tcp://sim:1",
            f"server-{index}",
            f"tcp://sim:{100 + index}",
            budget_bytes=self.options.budget_bytes,
            window_bytes=self.options.window_bytes,
            priority=self.options.priority,
            joins=joins,
        )
        return n.Node(config, instance=self.number(), now=self.now)

    def place(self, server: int) -> int:
        """Return which node the broker has given this index (they are counted as they announce)."""
        member = self.router.members.servers.get(server)
        if member is not None:
            return int(member.hello.address.rpartition(":")[2]) - 100
        found = [at for at, node in enumerate(self.nodes) if _number(node) == server]
        assert len(found) == 1, f"server {server} is {found}; {self.story()}"
        return found[0]

    def _tick_node(self, index: int) -> None:
        if index not in self.dead:
            self._do_node(index, self.nodes[index].tick(self.now))
            self.later(TICK_S, lambda: self._tick_node(index))

    def _do_node(self, index: int, actions: list[n.Action]) -> None:
        for action in actions:
            if isinstance(action, n.SendControl):
                self.to_router(b"s%d" % index, action.frame)
            elif isinstance(action, n.ToWorker):
                route = self.routes.get(action.incarnation)
                if route is not None:
                    # Values on the wire are what they are at this moment: bytes, not references.
                    header = encode_data(action.message)
                    payload = (
                        None if action.payload is None else action.payload.view(np.uint8).copy()
                    )
                    self.carry(
                        (index, route),
                        lambda h=header, p=payload, t=route: self._to_worker(t, h, p),
                    )
            elif isinstance(action, n.ToServer):
                header = encode_data(action.message)
                bits = None if action.payload is None else action.payload.copy()
                to = self.place(action.server)
                self.carry(
                    (b"s%d" % index, to), lambda i=to, h=header, p=bits: self._between(i, h, p)
                )
            elif isinstance(action, Write):
                self.to_disk(lambda i=index, a=action: self._write(i, a))
            elif isinstance(action, Load):
                self.to_disk(lambda i=index, a=action: self._load(i, a))
            elif isinstance(action, n.Drained):
                assert not self.nodes[index].shard.store.blocks, self.story()
                self.notes.append(f"{self.now:.2f} server-{index} ends, as it was drained")
                self.dead.add(index)
            elif isinstance(action, n.Failed) and (
                index in self.was_isolated or (self.was_isolated and index >= self.options.servers)
            ):
                # It is told that it was lost; or that its place is taken, which it may be if the
                # one that it has come for was only cut off, and found its way back in time.
                self.notes.append(f"{self.now:.2f} server-{index} ends: {action.error}")
                self.dead.add(index)
            elif isinstance(action, n.Failed):
                raise AssertionError(f"server {index} failed: {action.error}; {self.story()}")

    def _hears(self, index: int, message: d.Data, payload: Array | None) -> None:
        if index not in self.dead:
            self._do_node(index, self.nodes[index].worker_says(message, payload, self.now))
            self._do_node(index, self.nodes[index].turn_over(self.now))

    def _to_worker(self, route: bytes, header: bytes, payload: Array | None) -> None:
        worker = self.workers.get(route)
        if worker is not None and worker.alive:
            message = decode_data(header, None if payload is None else payload.nbytes)
            self._do_worker(
                route, worker, worker.session.handle(s.FromServer(message, payload), self.now)
            )

    def _to_node(self, route: bytes, index: int, header: bytes, payload: Array | None) -> None:
        message = decode_data(header, None if payload is None else payload.nbytes)
        who = (
            message.contribution.incarnation
            if isinstance(message, d.Push | d.Done)
            else message.incarnation
        )
        self.routes[who] = route
        self._hears(index, message, payload)

    def _between(self, index: int, header: bytes, payload: Array | None) -> None:
        """Deliver what a server has sent to another one."""
        message = decode_data(header, None if payload is None else payload.nbytes)
        self._hears(index, message, payload)

    # --- workers -----------------------------------------------------------------------------

    def start_worker(self, rank: int, life: int = 0) -> None:
        route = b"w%d.%d" % (rank, life)
        config = SessionConfig(
            name=f"worker-{rank}.{life}",
            broker="tcp://sim:1",
            rank=rank,
            world=self.options.workers,
            wait_timeout_s=300.0,
            window_bytes=self.options.window_bytes,
            priority=self.options.priority,
            prefetch=self.options.prefetch,
            measures=self.options.measures,
            host=f"host-{rank % self.options.hosts}",
            companion_lost_s=5.0,
        )
        worker = SimWorker(Session(config, instance=self.number()))
        self.workers[route] = worker
        worker.program = self._program(rank, worker)
        self.later(0.0, lambda: self._advance(route, worker, None))
        self.later(TICK_S, lambda: self._tick_worker(route, worker))

    def _tick_worker(self, route: bytes, worker: SimWorker) -> None:
        if worker.alive:
            self._do_worker(route, worker, worker.session.handle(s.Tick(), self.now))
            self.later(TICK_S, lambda: self._tick_worker(route, worker))

    def feed(self, route: bytes, worker: SimWorker, event: s.Input) -> None:
        self._do_worker(route, worker, worker.session.handle(event, self.now))

    def _do_worker(self, route: bytes, worker: SimWorker, actions: list[s.Output]) -> None:
        for action in actions:
            match action:
                case s.SendControl(frame):
                    self.to_router(route, frame)
                case s.SendData(server, message, payload):
                    header = encode_data(message)
                    bits = None if payload is None else payload.view(np.uint8).copy()
                    if server in worker.servers:
                        at = worker.servers[server]
                        self.carry(
                            (route, server),
                            lambda i=at, h=header, p=bits: self._to_node(route, i, h, p),
                        )
                case s.Listen():
                    host = worker.session.config.host
                    listening = s.Listening(f"tcp://sim/{route.decode()}", host)
                    self.later(0.0, lambda e=listening: self.feed(route, worker, e))
                case s.SendPeer(_, address, message, payload):
                    self._to_peer(route, address, message, payload)
                case s.Connect(servers):
                    worker.servers = {at: int(a.rpartition(":")[2]) - 100 for at, a in servers}
                case s.Answer(token, value):
                    self.later(0.0, lambda t=token, v=value: self._answered(route, worker, t, v))
                case s.Fail(token, error):
                    self.later(0.0, lambda t=token, e=error: self._answered(route, worker, t, e))
                case s.SaveState(message):
                    said = s.Say(c.Saved(message.number, why="it is not simulated"))
                    self.to_disk(lambda e=said: self.feed(route, worker, e))
                case s.CancelBatch(batch):
                    worker.running.cancel(batch)
                case s.Narrate(_, text):
                    self.notes.append(f"{self.now:.2f} {route!r}: {text}")

    def _to_peer(self, route: bytes, address: str, message: d.Data, payload: Array | None) -> None:
        """Let a worker's message reach another one, unless it is cut off."""
        target, header = address.rpartition("/")[2].encode(), encode_data(message)
        bits = None if payload is None else payload.view(np.uint8).copy()

        def arrive() -> None:
            other = self.workers.get(target)
            if other is not None and other.alive:
                sent = decode_data(header, None if bits is None else bits.nbytes)
                self.feed(target, other, s.FromPeer(sent, bits))

        self.peer_bytes[route] += 0 if bits is None else bits.nbytes
        if int(route[1:].split(b".")[0]) not in self.options.cut:
            self.carry((route, target), arrive)

    def _answered(self, route: bytes, worker: SimWorker, token: int, value: Any) -> None:
        if not worker.alive:
            return
        callback = worker.calls.pop(token, None)
        if callback is not None:
            callback(value)
        elif token == worker.waiting:
            worker.waiting = 0
            self._advance(route, worker, value)

    def _advance(self, route: bytes, worker: SimWorker, value: Any) -> None:
        """Run a worker's program up to its next wait."""
        if not worker.alive or worker.program is None:
            return
        try:
            if isinstance(value, Exception):
                wanted = worker.program.throw(value)
            else:
                wanted = worker.program.send(value)
        except StopIteration:
            worker.alive = False
            self.ended += 1
            return
        if isinstance(wanted, float):
            self.later(wanted, lambda: self._advance(route, worker, None))
            return
        worker.tokens += 1
        worker.waiting = worker.tokens
        self.feed(route, worker, wanted(worker.waiting))

    def _crash(self) -> None:
        """Kill one worker (its memory is gone); it may come back under a new name and
        incarnation."""
        living = [(route, w) for route, w in self.workers.items() if w.alive]
        if len(living) < 2:
            return
        if not self.options.restart and not self.commits():
            # A start line that waits for three workers waits for ever when one never comes back.
            self.later(0.2, self._crash)
            return
        route, worker = self.rng.choice(living)
        worker.alive = False
        rank, life = map(int, route[1:].split(b"."))
        self.notes.append(f"{self.now:.2f} {route!r} crashed")
        if self.options.restart:
            self.later(4.0 + self.rng.random(), lambda: self.start_worker(rank, life + 1))
        else:
            self.ended += 1

    # --- what workers do ---------------------------------------------------------------------

    def params(self) -> dict[str, Array]:
        size = 64
        rng = np.random.default_rng(7)
        return {
            "a": np.zeros(4096, np.float64),
            "b": np.zeros(4096, np.float64),
            "w": rng.standard_normal((40, 512)).astype(np.float32),
            "v": rng.standard_normal(size).astype(np.float32),
        }

    def shard(self) -> Shard:
        """Return what is dealt out; the sizes do not divide each other."""
        if self.before is not None:
            return self.before[0].shard()
        options = self.options
        return Shard(options.samples, self.seed, 5, options.passes, options.retry)

    def _initialise(self) -> Program:
        specs, values = specs_of(self.params())
        own = [
            type(spec)(spec.key, spec.dtype, spec.shape, "sum", "sgd:lr=1.0")
            if spec.key in ("a", "b")
            else spec
            for spec in specs
        ]
        yield lambda token: s.Initialise(token, tuple(own), values, False)
        if self.options.plain:
            specs, values = specs_of({"t": np.zeros(4096)}, rule="sgd:lr=1.0")
            yield lambda token: s.Initialise(token, tuple(specs), values, True)

    def _program(self, rank: int, worker: SimWorker) -> Program:
        yield s.Join
        yield from self._initialise()
        yield from self._train(rank, worker)

    def _train(self, rank: int, worker: SimWorker) -> Program:
        options = self.options
        route = next(where for where, one in self.workers.items() if one is worker)
        for _ in range(options.plain):
            yield self.rng.random() * 0.02
            self._push_plain(route, worker, rank)
        turns = range(options.batches + (rank if options.uneven else 0))
        if options.samples:
            yield lambda token: s.UsePool(token, self.shard())
        for _ in itertools.count() if options.samples else turns:
            asks = rank in options.on_demand
            grant = yield lambda token, asks=asks: s.Begin(token, asks)
            if grant is None:
                break
            worker.encoder.use(grant.codec, grant.codec_down, grant.chosen)
            weight = None if self.rng.random() < options.undeclared else 1.0 + rank
            state = worker.running.add(BatchState(grant, weight, worker.encoder))
            worker.samples = grant.samples
            yield from self._begun(state)
            if asks:
                yield from self._look(route, worker, state)
            elif missing := state.missing():
                yield lambda token, batch=grant.batch, kids=missing: s.Await(token, batch, kids)
            if not asks and not state.cancelled:
                self._check_grant(grant, state, worker)
            yield options.compute_s[rank % len(options.compute_s)] * (0.5 + self.rng.random())
            if asks:
                # As a backward pass: the same values again, whatever was committed meanwhile.
                yield from self._look(route, worker, state, back=True)
            try:
                yield from self._push(route, worker, rank, state)
            except Cancelled:
                self.feed(route, worker, self._finish(worker, state, None))
            yield from self._change_rate()
            if self.rng.random() < options.pull:
                values = yield lambda token: s.Pull(token, ("a", "b"))
                read = unpack(values.layout, values.kids, values.blocks, values.parts)
                assert np.array_equal(read["a"], read["b"]), f"a pull is torn; {self.story()}"
                assert worker.session.member is not None
                self.reads[worker.session.member.incarnation, state.number] = values.version
        if options.barrier:
            yield s.Barrier
            yield s.Begin
        yield s.Leave

    def _begun(self, state: BatchState) -> Program:
        """What else a batch begins with."""
        yield from ()

    def _look(
        self, route: bytes, worker: SimWorker, state: BatchState, *, back: bool = False
    ) -> Program:
        """Look at each key of a batch on demand by itself; keep what was seen, for the laws."""
        found: dict[str, Array] = {}
        keys = "wvba" if back else "abvw"
        for at, key in enumerate(keys):
            kids, number = state.kids_of([key]), state.number
            if self.rng.random() < 0.5:
                self.feed(route, worker, s.Want(number, state.kids_of(keys[at : at + 2])))
                yield self.rng.random() * 0.01
            yield lambda token, kids=kids, number=number: s.Await(token, number, kids)
            if state.cancelled:
                return
            array = unpack(state.layout, kids, worker.session.made.cycle.blocks)[key]
            found[key] = array.reshape(-1)
            self.feed(route, worker, s.Forget(number, kids))
            if self.rng.random() < 0.2:
                yield self.rng.random() * 0.1
        held = worker.session.made.cycle.blocks
        assert not held, f"values were not forgotten: {held.keys()}; {self.story()}"
        if back:
            assert worker.base is not None
            for key, value in worker.base[1].items():
                assert np.array_equal(value, found[key]), f"{key} has changed; {self.story()}"
        else:
            worker.base = (state.version, found)
            self._check_base(*worker.base)

    def _change_rate(self) -> Program:
        """Change the learning rate, now and then."""
        if self.rng.random() < self.options.rates:
            rate = str(self.rng.choice((0.05, 0.1, 0.2)))
            yield lambda token: s.Ask(token, "lr", rate)
            if self.rng.random() < 0.5:
                # It writes all settings anew, and must not overtake a rate that has to wait.
                yield lambda token: s.Ask(token, "codec", self.options.codec)

    def next_token(self, rank: int, batch: int) -> int:
        """Return the number that a batch's gradients are made of: no other one has it."""
        del rank, batch
        self.tokens += 1
        return self.tokens - 1

    def _push_plain(self, route: bytes, worker: SimWorker, rank: int) -> None:
        token, self.tokens = self.tokens, self.tokens + 1
        hot = np.zeros(4096)
        hot[token] = 1.0
        pushed = self.plain[token] = Pushed(rank, token, 1.0, {"t": hot})
        worker.tokens += 1
        worker.calls[worker.tokens] = lambda fate: self._told(pushed, fate)
        self.feed(route, worker, s.PushPlain(worker.tokens, "t", hot, 1.0))

    @staticmethod
    def _told(
        pushed: Pushed | None, fate: Any, worker: SimWorker | None = None, batch: int = 0
    ) -> None:
        if not isinstance(fate, s.Fate):
            return
        if worker is not None:
            worker.encoder.settled(batch, counted=fate.version is not None)
        if pushed is not None:
            pushed.fate = fate

    def _push(self, route: bytes, worker: SimWorker, rank: int, state: BatchState) -> Program:
        state.check()
        token = self.next_token(rank, state.number)
        rng = np.random.default_rng([self.seed, token])
        hot = np.zeros(4096)
        hot[token] = 1.0
        gradients = {
            "v": rng.standard_normal(64).astype(np.float32),
            "w": rng.standard_normal((40, 512)).astype(np.float32),
            "b": hot,
            "a": hot.copy(),
        }
        for at, key in enumerate("vw" if self.options.skips else ""):
            if (state.granted + at) % self.options.skips:
                del gradients[key]
        pushed = Pushed(rank, token, 1.0 + rank, gradients, worker.samples, base=worker.base)
        if self.rng.random() < self.options.void:
            gradients["v" if "v" in gradients else "a"].flat[3] = np.nan
        sent = {key: gradient.reshape(-1).copy() for key, gradient in gradients.items()}
        assert worker.session.member is not None
        self.contributions[worker.session.member.incarnation, state.number] = pushed
        withdrawn = self.rng.random() < self.options.withdraw
        for key, gradient in gradients.items():
            try:
                blocks = state.packer.add(key, gradient)
            except PushRefused:
                self._withdraw(route, worker, state, pushed)
                return
            self._send_all(route, worker, state, blocks, sent, state.declared)
            if withdrawn and key == "b":
                self._withdraw(route, worker, state, pushed)
                return
            if self.options.layer_s:
                yield self.rng.random() * self.options.layer_s
                if key == "v":
                    yield from self._change_rate()
                # As `Batch.push`: nothing more is sent of a batch that was cancelled meanwhile.
                state.check()
        self._send_all(route, worker, state, state.packer.rest(), sent, None)
        pushed.gradients = sent
        state.weight = 1.0 + rank
        if self.rng.random() < self.options.undeclared:
            state.weight = pushed.weight = 7.0
        self.feed(route, worker, self._finish(worker, state, pushed))

    def _send_all(
        self,
        route: bytes,
        worker: SimWorker,
        state: BatchState,
        blocks: Sequence[Full],
        sent: dict[str, Array],
        weight: float | None,
    ) -> None:
        for full in blocks:
            sealed = state.packer.seal(full)
            self._decode(state.layout, full.bid, sealed, sent)
            self.feed(route, worker, s.SendBlock(state.number, full.bid, sealed, weight))

    def _withdraw(self, route: bytes, worker: SimWorker, state: BatchState, pushed: Pushed) -> None:
        pushed.fate = s.Fate(None, "withdrawn")
        worker.encoder.settled(state.number, counted=False)
        self.feed(route, worker, s.Withdraw(state.number))

    @staticmethod
    def _decode(layout: Layout, bid: int, sealed: Sealed, sent: dict[str, Array]) -> None:
        """Note what a block says of its keys, where a codec has changed it."""
        if sealed.form is None:
            return
        block = layout.blocks[bid]
        payload = aligned(sealed.payload.view(np.uint8))
        found = from_payload(sealed.codec, sealed.form, payload, layout.shape(block))
        values = found.chain.decode(found.packed, NUMPY).values
        for segment, start, stop in spans(block):
            key = str(layout.entries[segment.kid].spec.key)
            sent[key][segment.start : segment.stop] = values[start:stop]

    def _finish(self, worker: SimWorker, state: BatchState, pushed: Pushed | None) -> s.Finish:
        worker.tokens += 1

        worker.calls[worker.tokens] = lambda fate: self._told(pushed, fate, worker, state.number)
        skipped = () if pushed is None else state.packer.skipped()
        return s.Finish(worker.tokens, state.number, state.weight, skipped)

    # --- laws --------------------------------------------------------------------------------

    def _check_grant(self, grant: s.Grant, state: BatchState, worker: SimWorker) -> None:
        """Note what a batch is computed on; if it counts in the end, it has to be that version.

        Under a grant ahead of the log it may be none, until the batch is cancelled.
        """
        params = state.params()
        worker.base = (grant.version, {key: params[key].reshape(-1).copy() for key in "abvw"})
        if not grant.ahead:
            self._check_base(*worker.base)
        slack = self.router.policy.slack
        if slack is not None:
            assert grant.clock - grant.slowest <= slack, f"SSP's bound is broken; {self.story()}"

    def _check_base(self, version: int, values: dict[str, Array]) -> None:
        """All workers have the same values of one version, with just its contributions."""
        # Both keys get the same tokens and live on different servers: any tear shows.
        assert np.array_equal(values["a"], values["b"]), f"a grant mixes versions; {self.story()}"
        model = {key: values[key] for key in "vw"}
        for key, value in self.seen.setdefault(version, model).items():
            assert np.array_equal(model[key], value), (
                f"two models of version {version}: {key}; {self.story()}"
            )
        counted = self.counted(version)
        seen = set(np.flatnonzero(values["a"]).tolist())
        assert seen == counted, f"a grant of version {version} has other values; {self.story()}"

    def counted(self, version: int) -> set[int]:
        """Return the tokens of the contributions that lead to a version."""
        found = {
            self.contributions[one.contribution.incarnation, one.contribution.batch].token
            for commit in self.commits()
            if commit.version <= version
            for one in commit.counted
        }
        return found if self.before is None else found | self.before[0].counted(self.first)

    def commits(self) -> list[Any]:
        return [e for e in self.router.log if isinstance(e, c.Commit) and e.group == MODEL]

    def final(self, key: str) -> Array:
        layout = self.router.layout
        kid = layout.kid(key)
        parts = []
        for block in layout.blocks_for([kid]):
            values = (
                self.nodes[self.place(block.server)].shard.store.blocks[block.bid].current.values
            )
            start = 0
            for segment in block.segments:
                if segment.kid == kid:
                    parts.append(
                        (segment.start, values[start : start + segment.stop - segment.start])
                    )
                start += segment.stop - segment.start
        return np.concatenate([values for _, values in sorted(parts, key=lambda part: part[0])])

    def check(self) -> None:
        """Nothing lost, nothing twice, and the same bits as one process that replays the log."""
        self._settle_servers()
        for commit in self.commits():
            for one in commit.counted:
                name = one.contribution
                base = self.contributions[name.incarnation, name.batch].base
                assert base is not None
                assert base[0] == commit.version - 1 - one.staleness, self.story()
                read = self.reads.get((name.incarnation, name.batch), base[0])
                assert read >= base[0], f"a worker has read an older version; {self.story()}"
                self._check_base(*base)
        counts = -self.final("a")
        assert np.array_equal(counts, -self.final("b")), f"the servers disagree; {self.story()}"
        stale = staleness(self.options.staleness)
        worth = {
            self.contributions[one.contribution.incarnation, one.contribution.batch].token: (
                stale.factor(one.staleness)
            )
            for commit in self.commits()
            for one in commit.counted
        }
        counts = counts - self._began_with("a", counts)
        self._count(counts, self.contributions, worth)
        if self.plain:
            plain = -self.final("t")
            self._count(plain - self._began_with("t", plain), self.plain, {})
        assert counts.sum() == pytest.approx(sum(worth.values())), self.story()
        self._check_bits()
        self._check_copies()
        if self.options.samples:
            self._check_samples()
        for manifest in self.manifests():
            self._check_snapshot(manifest)

    def _check_copies(self) -> None:
        """A copy that stands by is what the block is, to the last bit."""
        blocks = self.router.layout.blocks
        for bid, server in self.router.moves.kept.items():
            if {self.place(server), self.place(blocks[bid].server)} & self.dead:
                continue
            owner = self.nodes[self.place(blocks[bid].server)].shard.store.blocks[bid]
            copy = self.nodes[self.place(server)].shard.copies.mirrored[bid]
            assert copy.live, self.story()
            assert copy.store is not None, self.story()
            state = copy.store.blocks[bid]
            of = f"the copy of block {bid} on server {server} differs; {self.story()}"
            assert np.array_equal(state.current.values, owner.current.values), of
            assert state.counts == owner.counts, of
            assert len(state.slots) == len(owner.slots), of
            for mine, its in zip(state.slots, owner.slots, strict=True):
                assert np.array_equal(mine, its), of

    def _began_with(self, key: str, like: Array) -> Array:
        """Return the counts that this run has found in its snapshot."""
        found = {} if self.before is None else self.before[0].values_in(self.before[1])
        return -found[key] if key in found else np.zeros_like(like)

    def values_in(self, manifest: sn.Manifest) -> dict[str, Array]:
        """Return the values of all keys in a snapshot."""
        saved, layout = self.saved(manifest), Layout()
        layout.add([one for init in manifest.inits for one in init.keys], manifest.blocks)
        values: dict[str, Array] = {}
        for block in manifest.blocks:
            found = saved.arrays[f"{block.bid}.0"]
            for segment, start, stop in spans(block):
                spec = layout.entries[segment.kid].spec
                whole = values.setdefault(
                    str(spec.key), np.full(int(np.prod(spec.shape)), np.nan, spec.dtype)
                )
                whole[segment.start : segment.stop] = found[start:stop]
        return values

    def _check_snapshot(self, manifest: sn.Manifest) -> None:
        """A snapshot is one version of all keys, with just the contributions that lead to it."""
        values = self.values_in(manifest)
        version = manifest.version
        counted = self.counted(version)
        assert set(np.flatnonzero(values["a"])) == counted, f"a snapshot is torn; {self.story()}"
        assert np.array_equal(values["a"], values["b"]), f"a snapshot is torn; {self.story()}"
        replayed = self.history.get(version)
        for key, value in (replayed.values if replayed is not None else {}).items():
            assert np.array_equal(values[key], value), (
                f"{key} of {manifest.name} is not version {version}; {self.story()}"
            )
        if "t" in values:
            there = np.flatnonzero(values["t"])
            assert np.array_equal(values["t"][there], self.final("t")[there]), self.story()

    def _check_samples(self) -> None:
        """Each sample counts once in each pass, or is skipped where nothing is handed out again."""
        seen = self.samples_seen(self.router.groups.version)
        shard, pool = self.shard(), self.router.groups.draws.pool
        assert pool is not None, self.story()
        assert pool.done, f"{pool}; {self.story()}"
        total = shard.n * (shard.passes or 0)
        skipped = sum(share.skipped for share in pool.shares.values())
        assert set(seen.values()) <= {1}, f"a sample counts twice; {self.story()}"
        assert len(seen) + skipped == total, f"{len(seen)} + {skipped} of {total}; {self.story()}"
        assert not (shard.retry and skipped), self.story()

    def samples_seen(self, version: int) -> Counter[tuple[int, int]]:
        """Return how often each position of each pass is in what leads to a version."""
        seen = Counter() if self.before is None else self.before[0].samples_seen(self.first)
        for commit in self.commits():
            for one in commit.counted if commit.version <= version else ():
                pushed = self.contributions[one.contribution.incarnation, one.contribution.batch]
                assert pushed.samples is not None, self.story()
                where = pushed.samples
                seen.update((where.pass_number, at) for at in range(where.start, where.stop))
        return seen

    def _count(self, counts: Array, made: dict[Any, Pushed], worth: dict[int, float]) -> None:
        for pushed in made.values():
            seen, one = counts[pushed.token], worth.get(pushed.token, 1.0)
            assert seen in (0.0, one), f"token {pushed.token} counts {seen} times; {self.story()}"
            if pushed.fate is not None:
                told = one if pushed.fate.outcome == "committed" else 0.0
                assert seen == told, (
                    f"token {pushed.token}: {pushed.fate}, but {seen}; {self.story()}"
                )

    def _settle_servers(self) -> None:
        """Let the servers catch up with the log (losses are repaired by resends)."""
        deadline = self.now + 60.0

        def behind(at: int) -> bool:
            node = self.nodes[at]
            if _number(node) in self.router.members.servers:
                return node.shard.index < len(self.router.log)
            return node.shard.copies.left and _number(node) not in self.lost

        while any(behind(at) for at in range(len(self.nodes)) if at not in self.dead):
            assert self.events, self.story()
            assert self.now < deadline, f"a server never caught up; {self.story()}"
            self.now, _, action = heapq.heappop(self.events)
            action()

    def _mean(
        self, key: str, made: list[Pushed], ages: list[int], now: Array, then: list[Array]
    ) -> Array:
        """Return what one process makes of these gradients, older ones treated as configured."""
        stale = staleness(self.options.staleness)
        nothing = np.zeros_like(now)
        gradients = [pushed.gradients.get(key, nothing).reshape(-1) for pushed in made]
        if stale.compensation:
            gradients = [
                stale.compensated(g, now, old) for g, old in zip(gradients, then, strict=True)
            ]
        if not stale.scale:
            return weighted_mean(gradients, [pushed.weight for pushed in made])
        factors = [p.weight * stale.factor(age) for p, age in zip(made, ages, strict=True)]
        total = tree_sum(lambda at: weighted(gradients[at], factors[at]), len(gradients))
        assert total is not None
        return divided(total, float(sum(pushed.weight for pushed in made)))

    def added_up(self) -> dict[int, list[Member]]:
        """Return the updates that workers have added up among themselves to the end."""
        found, apart, foreseen = {}, False, 0
        for entry in self.router.log:
            if isinstance(entry, c.Expect) and entry.expected:
                apart, foreseen = False, entry.version
            elif isinstance(entry, c.Apart):
                apart = True
            elif entry == self._commit_of(foreseen) and not apart and foreseen in self.joint:
                found[foreseen] = self.joint[foreseen]
        return found

    def _commit_of(self, version: int) -> Any:
        return next((one for one in self.commits() if one.version == version), None)

    def _added_up(self, key: str, made: list[Pushed], members: list[Member]) -> Array:
        """Return the mean in the order in which the members add up, of each block by itself."""
        layout = self.router.layout
        sizes = {
            block.bid: block.size * layout.dtype(block).wide.itemsize
            for block in layout.blocks_in(MODEL)
        }
        ring, by_number = in_ring(members), {pushed.worker: pushed for pushed in made}
        assert sorted(ring) == sorted(by_number), self.story()
        ends = owners(sizes, len(ring))
        whole = np.zeros(self.params()[key].size, np.float32)
        for block in layout.blocks_for([layout.kid(key)]):
            for one in block.segments:
                if one.kid != layout.kid(key):
                    continue
                cut = slice(one.start, one.stop)
                terms = {
                    number: weighted(pushed.gradients[key].reshape(-1)[cut], pushed.weight)
                    for number, pushed in by_number.items()
                    if key in pushed.gradients
                }
                if self.options.topology == "ring":
                    last = ends[block.bid]
                    order = [ring[(last + 1 + at) % len(ring)] for at in range(len(ring))]
                    parts = [terms[number] for number in order if number in terms]
                    total = parts[0]
                    for part in parts[1:]:
                        total = total + part
                else:
                    hosts: dict[str, list[Array]] = {}
                    for member in members:
                        if member.number in terms:
                            hosts.setdefault(member.host, []).append(terms[member.number])
                    sums = [tree_sum(lambda at, p=p: p[at].copy(), len(p)) for p in hosts.values()]
                    found = tree_sum(lambda at, sums=sums: sums[at], len(sums))
                    assert found is not None
                    total = found
                whole[cut] = divided(total, float(sum(pushed.weight for pushed in made)))
        return whole

    def _rated(self) -> list[tuple[Any, float]]:
        """Return the commits, each with the learning rate that holds there."""
        rate, found = 0.1, []
        for entry in self.router.log:
            if isinstance(entry, c.Configure):
                rate = OptimizerSpec.from_plain(entry.optimizer["model"]).lr
            elif isinstance(entry, c.Commit) and entry.group == MODEL:
                found.append((entry, rate))
        return found

    def _check_bits(self) -> None:
        if "clip" in self.options.optimizer:
            return
        for key, value in self.replay().items():
            assert np.array_equal(value, self.final(key)), (
                f"{key} differs from the replay; {self.story()}"
            )
        for version, seen in self.seen.items():
            for key, value in seen.items():
                assert np.array_equal(value, self.history[version].view[key]), (
                    f"{key} of version {version} is not the view; {self.story()}"
                )

    def replay(self) -> dict[str, Array]:
        """Do what the log says in one process: keep each version in `history`, return the last."""
        chosen, first = rule(self.options.optimizer.split(":")[0]), self.first
        if self.before is None:
            start = {k: v.reshape(-1).copy() for k, v in self.params().items() if k in "vw"}
            none = {k: tuple(np.zeros_like(v) for _ in chosen.slots) for k, v in start.items()}
            view = self._view(0, start, start)
            self.history = {0: _Replayed(start, none, view, dict.fromkeys(start, 0))}
        else:
            self.history = {first: self.before[0].history[first]}
        begun = self.history[first]
        model, slots = dict(begun.values), dict(begun.slots)
        updates = dict(begun.updates)
        added_up = self.added_up()
        for count, (commit, rate) in enumerate(self._rated(), start=first + 1):
            made = [
                self.contributions[one.contribution.incarnation, one.contribution.batch]
                for one in commit.counted
            ]
            assert [p.worker for p in made] == sorted(p.worker for p in made), self.story()
            ages = [one.staleness for one in commit.counted]
            for key in model:
                # What the gradients were computed on is what their workers had.
                then = [self.history[count - 1 - age].view[key] for age in ages]
                if all(key not in pushed.gradients for pushed in made):
                    # Its rule is not run.
                    continue
                updates[key] += 1
                if count in added_up:
                    mean = self._added_up(key, made, added_up[count])
                else:
                    mean = self._mean(key, made, ages, model[key], then)
                old = tuple(slot.copy() for slot in slots[key])
                model[key], slots[key] = update(
                    chosen, model[key].copy(), old, mean, lr=rate, count=updates[key]
                )
            view = self._view(count, self.history[count - 1].view, model)
            self.history[count] = _Replayed(dict(model), dict(slots), view, dict(updates))
        return model

    def _view(
        self, version: int, before: dict[str, Array], exact: dict[str, Array]
    ) -> dict[str, Array]:
        """Return what workers have of this version: values, or a codec's step toward them."""
        layout, chosen = self.router.layout, plan(self.options.codec_down)
        view = {key: value.copy() for key, value in exact.items()}
        for block in layout.blocks_for([layout.kid(key) for key in exact]):
            codec = chosen.for_block(layout, block)
            if not codec.lossy or not version:
                continue
            cuts = [
                (str(layout.entries[one.kid].spec.key), slice(one.start, one.stop))
                for one in block.segments
            ]
            old = np.concatenate([before[key][cut] for key, cut in cuts])
            goal = np.concatenate([exact[key][cut] for key, cut in cuts])
            shape, seed = layout.shape(block), seed_of(block.bid + 1, version)
            sent, _ = codec.encode(Packed(goal - old, shape), codec.start(shape), seed, NUMPY)
            fresh = old + codec.chain.decode(sent.packed, NUMPY).values
            for (key, cut), (_, start, stop) in zip(cuts, spans(block), strict=True):
                view[key][cut] = fresh[start:stop]
        return view


def _number(node: n.Node) -> int:
    return -1 if node.welcome is None else node.welcome.index


def simulate(seed: int, options: Options, before: tuple[Sim, sn.Manifest] | None = None) -> Sim:
    """Run one cluster to its end and check all laws; it may begin from a snapshot of another."""
    sim = Sim(seed, options, before)
    try:
        sim.run()
    except ZkvError as error:
        raise AssertionError(f"{error}; {sim.story()}") from error
    sim.check()
    return sim
