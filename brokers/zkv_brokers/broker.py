"""The broker process: sockets around the `Router`, and the relay of route `broker`.

Decides nothing. Control comes in over one ROUTER that workers and servers dial; with route `broker`
a second ROUTER takes the workers' data, and one DEALER for each server passes it on.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zmq

from zkv.alignment import Alignment
from zkv.entries import Commit, Entry, Grant
from zkv.errors import ConfigError, JournalError, ZkvError
from zkv.placements import placement
from zkv.policy import SyncPolicy
from zkv.spans import TURNS, Spans
from zkv.topology import topology
from zkv_brokers import router as r
from zkv_brokers.keeping import Keeping
from zkv_brokers.recording import Recorder
from zkv_brokers.relay import Relay
from zkv_net import loop as net
from zkv_net import tracing
from zkv_net.sockets import (
    FdSocket,
    bind,
    join_address,
    new_socket,
    split_address,
)

log = logging.getLogger("zkv.broker")
TICK_S = 0.1
LINGER_MS = 500


@dataclass(frozen=True, slots=True)
class BrokerConfig:
    """What `zkv broker` is started with. Times in seconds."""

    policy: SyncPolicy
    bind: str = "tcp://127.0.0.1:5555"
    data_bind: str | None = None
    """Where route `broker` takes data; None: one port above `bind` (any free one if that is 0)."""
    advertise: str | None = None
    servers: int = 1
    workers: int = 1
    min_workers: int = 0
    on_short: str = "wait"
    optimizer: str | None = None
    staleness: str = "none"
    codec: str = "none"
    codec_down: str = "none"
    block_bytes: int = 0
    placement: str = "by_size"
    topology: str = "servers"
    insecure: bool = False
    worker_lost_s: float = 10.0
    server_lost_s: float = 20.0
    io_threads: int = 1
    socket_bytes: int = 0
    """Buffers of the connections of route `broker`, each way; 0: as the system likes."""
    journal: Path | None = None
    """The folder of the journal, by which another process can go on; None: it cannot."""
    record: Path | None = None
    """Where to write down all that is heard, for a replay."""
    trace: str = ""
    """The folder that its spans are left in at the end; "": nowhere."""


class Broker:
    """One broker: `start` binds, `serve` runs until `stop`, `close` ends it."""

    def __init__(self, config: BrokerConfig) -> None:
        self.config = config
        self.address = ""
        self.data_address = ""
        self._keeping: Keeping | None = None
        self._context: zmq.Context[Any] = zmq.Context(config.io_threads)
        self._control: FdSocket | None = None
        self._relay: Relay | None = None
        self._recorder: Recorder | None = None
        self._spans = tracing.recorder(config.trace)
        self._received_now: list[r.Event] = []
        self._stopped = asyncio.Event()
        self._failed: ZkvError | None = None

    @property
    def router(self) -> r.Router | None:
        """What decides; None before the start."""
        return None if self._keeping is None else self._keeping.router

    def start(self) -> None:
        """Bind both ports.

        Raises:
            ConfigError: an address is in use, not of this machine, or open without `insecure`; or
                the placement pins keys to a server that there is not.
            JournalError: the journal cannot be used, or is of another run.
            ValueError: a codec, a rule or a placement is none.
            OSError: the recording cannot be written.
        """
        control = new_socket(self._context, zmq.ROUTER, data=False)
        size = self.config.socket_bytes
        data = new_socket(self._context, zmq.ROUTER, data=True, buffer_bytes=size)
        try:
            self._bind(control, data)
            self._decide()
        except BaseException:
            # A context with an open socket would be waited for without end when it is collected.
            control.close(linger=0)
            data.close(linger=0)
            self._context.term()
            if self._keeping is not None:
                self._keeping.close(done=False)
            raise
        self._control = FdSocket(control, self._received, turn_over=self._turn_over)
        self._relay = Relay(self._context, data, self._link_changed, size)
        assert self._keeping is not None
        self._do(self._keeping.first)

    def _bind(self, control: zmq.Socket[bytes], data: zmq.Socket[bytes]) -> None:
        config = self.config
        bound = bind(control, config.bind, insecure=config.insecure)
        data_bound = bind(data, self._data_bind(bound), insecure=config.insecure)
        self.address = announced(bound, config.advertise)
        self.data_address = announced(data_bound, config.advertise)

    def _decide(self) -> None:
        """Make what decides, or take it up from its journal, and its recorder."""
        config = self.config
        placement(topology(config.topology).placement(config.placement)).check(config.servers)
        router_config = r.RouterConfig(
            address=self.address,
            policy=config.policy,
            servers=config.servers,
            workers=config.workers,
            min_workers=config.min_workers,
            on_short=config.on_short,
            optimizer=config.optimizer,
            staleness=config.staleness,
            codec=config.codec,
            codec_down=config.codec_down,
            block_bytes=config.block_bytes,
            placement=config.placement,
            topology=config.topology,
            data_address=self.data_address,
            worker_lost_s=config.worker_lost_s,
            server_lost_s=config.server_lost_s,
            lasts=config.journal is not None,
        )
        self._keeping = Keeping(router_config, config.journal)
        if config.record is not None:
            self._recorder = Recorder(config.record)
            self._recorder.broker(router_config, *self._keeping.origin())

    def _data_bind(self, bound: str) -> str:
        if self.config.data_bind is not None:
            return self.config.data_bind
        host, _, port = self.config.bind.rpartition(":")
        return f"{host}:{int(port) + 1 if port.isdecimal() and int(port) else 0}"

    def _received(self, frames: list[zmq.Frame]) -> None:
        if len(frames) == 2:
            self._received_now.append(r.Received(frames[0].bytes, frames[1].bytes))
        else:
            log.warning("dropped a control message of %d frames", len(frames))

    def _link_changed(self, index: int, up: bool) -> None:
        self._handle([r.ServerLink(index, up)])

    def _turn_over(self) -> None:
        """What came in during one turn of the loop is decided at once, and travels together."""
        events, self._received_now = self._received_now, []
        if events:
            self._handle(events)

    def _handle(self, events: list[r.Event]) -> None:
        assert self._keeping is not None
        if self._failed is not None:
            return
        now = self._keeping.now()
        if self._recorder is not None:
            self._recorder.turn(events, now)
        try:
            actions = self._keeping.turn(events, now)
        except JournalError as error:
            # Nothing that this turn has decided may be known to anybody.
            self._failed = error
            self.stop("as its journal has failed")
            return
        if self._spans is not None:
            turn_spans(self._spans, now, self._keeping.router.decided)
        self._do(actions)

    def _do(self, actions: Sequence[r.Action]) -> None:
        assert self._control is not None
        assert self._relay is not None
        for action in actions:
            match action:
                case r.Send(route, frame):
                    self._control.send([route, frame])
                case r.Note(level, text):
                    log.log(logging.getLevelName(level.upper()), "%s", text)
                case r.ServersChanged(addresses):
                    self._relay.connect(dict(addresses))

    async def serve(self) -> None:
        """Serve until `stop` is called.

        Raises:
            JournalError: the journal could not be written, or a later broker has taken over.
        """
        while not self._stopped.is_set():
            self._handle([r.Tick()])
            try:
                await asyncio.wait_for(self._stopped.wait(), TICK_S)
            except TimeoutError:
                continue
        if self._failed is not None:
            raise self._failed

    def stop(self, why: str = "") -> None:
        """End `serve`."""
        log.info("stopping %s", why)
        self._stopped.set()

    def close(self) -> None:
        """Close all sockets in bounded time, and end the recording and the trace."""
        if self._spans is not None:
            itself, about = Alignment(0.0, 0.0, 0), {"name": self.address, "host": net.host_name()}
            tracing.write(self.config.trace, "broker", 0, self._spans, itself, about)
        if self._recorder is not None and self.router is not None:
            self._recorder.close(self.router.log.digest)
        if self._keeping is not None:
            self._keeping.close(done=self._failed is None)
        if self._control is not None:
            self._control.close(LINGER_MS)
        if self._relay is not None:
            self._relay.close()
        self._context.destroy(linger=LINGER_MS)


def turn_spans(spans: Spans, began_s: float, decided: Sequence[Entry]) -> None:
    """Record a turn that has decided something, and what; seconds of the spans' clock."""
    if not decided:
        return
    now = spans.clock()
    spans.span(TURNS, "turn", began_s, now, entries=len(decided))
    for entry in decided:
        match entry:
            case Grant(incarnation=incarnation, version=version, group=group):
                about = {"incarnation": incarnation, "version": version, "group": group}
                spans.instant(TURNS, "grant", now, **about)
            case Commit(version=version, group=group, counted=counted):
                about = {"version": version, "group": group, "of": len(counted)}
                spans.instant(TURNS, "commit", now, **about)


def announced(bound: str, chosen: str | None) -> str:
    """Return the address for others: the chosen host, else what was bound; never a wildcard.

    For a wildcard it is the interface that leads away from this machine, found with an address that
    belongs to nobody (TEST-NET-1 and the documentation prefix, RFC 5737 and 3849); nothing is sent.

    Raises:
        ConfigError: a wildcard, and no interface leads away from this machine.
    """
    if chosen:
        return net.advertised(bound, bound, chosen)
    host, port = split_address(bound)
    if host not in ("0.0.0.0", "::", "*"):
        return bound
    try:
        toward = "tcp://[2001:db8::1]:9" if host == "::" else "tcp://192.0.2.1:9"
        return join_address(net.address_toward(toward), port)
    except ConfigError as error:
        raise ConfigError(
            f"{bound} is a wildcard, and this machine has no default route that tells which "
            f"address "
            "others reach: name it with --advertise, or bind to it"
        ) from error


async def serve(config: BrokerConfig, ready: Any = None) -> None:
    """Run a broker until SIGINT or SIGTERM; `ready(broker)` is called once it is bound."""
    broker = Broker(config)
    broker.start()
    net.on_stop_signals(broker.stop)
    if ready is not None:
        ready(broker)
    try:
        await broker.serve()
    finally:
        broker.close()
