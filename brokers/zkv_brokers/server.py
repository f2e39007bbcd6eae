"""The server process: sockets around a `Shard`. Decides nothing.

It dials the broker for control and binds one port for data, so that a machine with a server needs one
open port. Control has a socket of its own and never queues behind megabytes.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import zmq

from zkv import control as c
from zkv.data_messages import decode_data, encode_data
from zkv.errors import BrokerLost, ClusterNotReady, ProtocolError, ZkvError, from_code
from zkv.link import Link
from zkv.wire import open_envelope, split_route
from zkv_brokers import shard as sh
from zkv_brokers.grants import ToWorker
from zkv_net import loop as net
from zkv_net.sockets import FdSocket, bind, connect, new_socket

log = logging.getLogger("zkv.server")
TICK_S = 0.1
BEAT_S = 0.5
LINGER_MS = 500


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """What `zkv server` is started with. Times in seconds, sizes in bytes."""

    broker: str
    bind: str = "tcp://127.0.0.1:0"
    advertise: str | None = None
    name: str = ""
    budget_bytes: int = 0
    """Room for contributions that wait for their update; 0: no limit."""
    window_bytes: int = 64 * 1024 * 1024
    connect_timeout_s: float = 60.0
    narrate_after_s: float = 2.0
    narrate_every_s: float = 5.0
    broker_lost_s: float = 10.0
    insecure: bool = False
    io_threads: int = 1


class Server:
    """One server: `start` binds, `serve` runs until `stop` or an error, `close` ends it."""

    def __init__(self, config: ServerConfig) -> None:
        self.config = config
        self.address = ""
        self.shard = sh.Shard(window_bytes=config.window_bytes)
        self._context: zmq.Context[Any] = zmq.Context(config.io_threads)
        self._link = Link(net.instance_number())
        self._routes: dict[int, list[bytes]] = {}
        self._control: FdSocket | None = None
        self._data: FdSocket | None = None
        self._stopped: asyncio.Future[None] | None = None
        self._welcome = False
        self._started_at = 0.0
        self._next_beat = 0.0
        self._next_word = 0.0

    def start(self) -> None:
        """Bind the data port and dial the broker.

        Raises:
            ConfigError: an address is in use, cannot be resolved or not be reached by others.
        """
        config = self.config
        net.resolvable(config.broker)
        data = new_socket(self._context, zmq.ROUTER, data=True)
        control = new_socket(self._context, zmq.DEALER, data=False)
        try:
            bound = bind(data, config.bind, insecure=config.insecure)
            self.address = net.advertised(bound, config.broker, config.advertise)
            connect(control, config.broker)
        except BaseException:
            data.close(linger=0)
            control.close(linger=0)
            self._context.term()
            raise
        self._stopped = asyncio.get_running_loop().create_future()
        self._data = FdSocket(data, self._from_worker)
        self._control = FdSocket(control, self._from_broker, turn_over=self._flush)
        self._started_at = self._now()
        self._next_word = self._started_at + config.narrate_after_s
        self._hello()

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    def _hello(self) -> None:
        name = self.config.name or f"{net.host_name()}-{os.getpid()}"
        hello = c.ServerHello(
            name,
            self.address,
            self.config.budget_bytes,
            net.host_name(),
            os.getpid(),
            self.shard.started,
        )
        self._link.send(hello)

    # --- messages ----------------------------------------------------------------------------

    def _from_broker(self, frames: list[zmq.Frame]) -> None:
        envelope = open_envelope(frames[-1].bytes)
        if envelope.target not in (0, self._link.instance):
            return
        change, messages = self._link.receive(c.decode_messages(envelope), self._now())
        if change is not None and change.before:
            log.warning(
                "the broker at %s is a new one; announcing this server again", self.config.broker
            )
            if not self.shard.started:
                self._handle(sh.Reset())
            self._hello()
        for message in messages:
            match message:
                case c.Fatal(code=code, reason=reason) | c.Refusal(code=code, reason=reason):
                    self.fail(from_code(code, reason))
                    return
                case c.ServerWelcome(index=index, servers=servers):
                    self._welcome = True
                    log.info("this is server %d of %d, at %s", index + 1, servers, self.address)
            self._handle(sh.FromBroker(message))

    def _from_worker(self, frames: list[zmq.Frame]) -> None:
        try:
            route, rest = split_route(frames)
            payload = None if len(rest) == 1 else np.frombuffer(rest[1].buffer, dtype=np.uint8)
            message = decode_data(rest[0].buffer, None if payload is None else payload.nbytes)
            incarnation = getattr(message, "incarnation", None)
            if incarnation is None:
                incarnation = message.contribution.incarnation  # type: ignore[union-attr]
            self._routes[incarnation] = [frame.bytes for frame in route]
            self._handle(sh.FromWorker(message, payload))
        except ProtocolError as error:
            log.warning("dropped a data message: %s", error)

    def _handle(self, event: sh.Event) -> None:
        for action in self.shard.handle(event, self._now()):
            match action:
                case sh.ToBroker(message):
                    self._link.send(message)
                case ToWorker(incarnation, data, payload):
                    self._send_data(incarnation, encode_data(data), payload)
        self._flush()

    def _send_data(self, incarnation: int, header: bytes, payload: Any) -> None:
        route = self._routes.get(incarnation)
        if route is None or self._data is None:
            return
        frames: list[Any] = [*route, b"", header]
        if payload is not None:
            frames.append(payload.view(np.uint8))
        self._data.send(frames)

    def _flush(self) -> None:
        if self._control is not None:
            for packet in self._link.outgoing(self._now()):
                self._control.send([c.encode_packet(packet)])

    # --- time --------------------------------------------------------------------------------

    def _tick(self) -> None:
        now = self._now()
        if now >= self._next_beat:
            self._next_beat = now + BEAT_S
            if self._link.peer:
                self._link.send(c.Beat(now))
            self._routes = {
                i: r
                for i, r in self._routes.items()
                if i in self.shard.members or not self._welcome
            }
        self._flush()
        config = self.config
        if not self._welcome:
            waited = now - self._started_at
            text = f"waiting for broker: nothing has answered at {config.broker} for {waited:.1f} s"
            if waited > config.connect_timeout_s:
                self.fail(ClusterNotReady(f"{text}; is it running, and is the address right?"))
            elif now >= self._next_word:
                self._next_word = now + config.narrate_every_s
                log.warning("%s", text)
        elif self._link.heard is not None and now - self._link.heard > config.broker_lost_s:
            silent = now - self._link.heard
            self.fail(
                BrokerLost(f"nothing was heard of the broker at {config.broker} for {silent:.1f} s")
            )

    async def serve(self) -> None:
        """Serve until `stop` is called.

        Raises:
            ClusterNotReady: no broker within `connect_timeout_s`.
            ZkvError: the broker refused this server, was lost, or the run has failed.
        """
        assert self._stopped is not None
        while not self._stopped.done():
            self._tick()
            await asyncio.wait({self._stopped}, timeout=TICK_S)
        await self._stopped

    def stop(self, why: str = "") -> None:
        """Say goodbye to the broker and end `serve`."""
        log.info("stopping %s", why)
        if self._welcome:
            self._link.send(c.Bye(why or "it was told to"))
            self._flush()
        if self._stopped is not None and not self._stopped.done():
            self._stopped.set_result(None)

    def fail(self, error: ZkvError) -> None:
        """End `serve` with an error."""
        if self._stopped is not None and not self._stopped.done():
            self._stopped.set_exception(error)

    def close(self) -> None:
        """Close all sockets in bounded time."""
        for socket in (self._control, self._data):
            if socket is not None:
                socket.close(LINGER_MS)
        self._context.destroy(linger=LINGER_MS)


async def serve(config: ServerConfig, ready: Callable[[Server], None] | None = None) -> None:
    """Run a server until SIGINT, SIGTERM or an error; `ready(server)` is called once it is bound."""
    server = Server(config)
    server.start()
    net.on_stop_signals(server.stop)
    if ready is not None:
        ready(server)
    try:
        await server.serve()
    finally:
        server.close()
