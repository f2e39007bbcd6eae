"""How processes meet and part: hellos, welcomes, signs of life, and why somebody waits.

Part of the control messages (`zkv.control` has the others, and the packets that carry them all).
Each struct says in one sentence who sends it; nothing here decides anything.
"""

from __future__ import annotations

from zkv.heartbeat import BEAT_S, Beats
from zkv.wire import Frozen, Int, Name, Text, UInt


class WorkerHello(Frozen, frozen=True, tag=30):
    """Worker to broker: I want to take part (an observer only reads)."""

    name: Name
    rank: Int
    world: UInt
    observer: bool
    host: Name
    pid: UInt


class ServerHello(Frozen, frozen=True, tag=31):
    """Server to broker: I can hold a shard and listen for data at this address."""

    name: Name
    address: Name
    budget_bytes: UInt
    host: Name
    pid: UInt
    started: bool
    """Whether it already holds a model that was granted or committed under an earlier broker."""
    joins: bool = False
    """Whether it is one more, where all servers that were asked for are here."""


class ServerAt(Frozen, frozen=True):
    """Where a server listens."""

    index: UInt
    name: Name
    address: Name


class StateAt(Frozen, frozen=True):
    """Where a worker's own state is in the snapshot that the run begins from."""

    url: Text
    name: Name
    file: Name = ""
    nbytes: UInt = 0
    sha256: Name = ""
    lost: Text = ""
    """Why there is none."""


class Welcome(Frozen, frozen=True, tag=32):
    """Broker to worker: you are in, and the servers are there."""

    number: UInt
    incarnation: UInt
    rank: UInt
    world: UInt
    term: UInt
    servers: list[ServerAt]
    data_address: Name
    """Where route `broker` takes data; empty if the broker has no such port."""
    policy: Name
    topology: Name = "servers"
    """Under some of them, workers have to be reached by each other (`Listens`)."""
    saves: bool = False
    """Whether there are snapshots, for which it may be asked what it began a batch with."""
    state: StateAt | None = None
    beat_s: Beats = BEAT_S
    """How often everybody of this run says that it is alive."""


class ServerWelcome(Frozen, frozen=True, tag=33):
    """Broker to server: you are number `index` of `servers`."""

    index: UInt
    servers: UInt
    term: UInt
    beat_s: Beats = BEAT_S


class Beat(Frozen, frozen=True, tag=34):
    """Anybody to anybody: I am alive, and my clock says `at`, in seconds.

    The broker answers one that asks for that at once, with the `at` of it as `echo`: the round trip
    tells how far apart the clocks are (`zkv.alignment`). `transport`: of a worker, how payloads go
    between it and its servers, for `status`.
    """

    at: float
    echo: float | None = None
    ask: bool = False
    transport: Text = ""


class Waiting(Frozen, frozen=True, tag=35):
    """Broker to worker: what you wait for has not happened, because of this."""

    reason: Text


class Fatal(Frozen, frozen=True, tag=36):
    """Broker to all: the run cannot go on."""

    code: Name
    reason: Text


class Bye(Frozen, frozen=True, tag=37):
    """Broker to worker: your leave is complete. Worker or server to broker: I stop now."""

    reason: Text


class Keyring(Frozen, frozen=True, tag=39):
    """Broker to server or worker: which keys may speak to you, and whose they are.

    It adds to what was said before; `holders`, where it is there, replaces all of them.
    """

    members: list[tuple[UInt, Name]]
    """Incarnations of workers, and their keys."""
    places: list[tuple[Name, Name]]
    """Addresses that you may dial, and the keys that answer there."""
    holders: list[tuple[Name, UInt]] | None = None
    """Keys, and what they may be (bits, as `zkv.roles.mask` has them)."""
