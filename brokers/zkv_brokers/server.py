"""The server process: sockets around a `Node`. Decides nothing.

It dials the broker for control and binds one port for data, so that a machine with a server needs
one open port. Control has a socket of its own and never queues behind megabytes.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable
from threading import Thread
from typing import Any

import zmq

from zkv.data_messages import (
    Block,
    Data,
    Fetch,
    Got,
    Greet,
    Push,
    Share,
    Shared,
    decode_data,
    encode_data,
)
from zkv.dtypes import Array
from zkv.errors import ProtocolError
from zkv.heartbeat import tick_s
from zkv.wire import split_route
from zkv_brokers import aggregates, dense
from zkv_brokers.couriers import Couriers
from zkv_brokers.disk import Disk
from zkv_brokers.grants import ToWorker
from zkv_brokers.memory import Memory
from zkv_brokers.node import Action, Drained, Failed, Keyed, Node, NodeConfig, Note, SendControl
from zkv_brokers.recording import Recorder, digest_of, plain_of_disk
from zkv_brokers.senders import Senders, sender
from zkv_brokers.server_config import ServerConfig as ServerConfig
from zkv_brokers.shard import Prepare, Shard, ToServer
from zkv_brokers.shard_events import Load, Loaded, Write, Wrote
from zkv_codecs.plan import Plan
from zkv_net import descriptors, tracing
from zkv_net import loop as net
from zkv_net.dialling import Dialled
from zkv_net.listening import Listening
from zkv_net.nearby import Nearby, NeverShown, payload_bytes
from zkv_net.safety import Safety, choose
from zkv_net.sockets import FdSocket, bind, new_socket

log = logging.getLogger("zkv.server")
LINGER_MS = 500
SIGNAL_TURNS = 8
"""A loop comes to a signal within so many turns."""


class Server:
    """One server: `start` binds, `serve` runs until `stop` or an error, `close` ends it."""

    def __init__(self, config: ServerConfig) -> None:
        self.config = config
        self.address = ""
        self.node: Node | None = None
        self.on_welcome: Callable[[int, int], None] = lambda index, servers: None
        """Called with the server's index and how many there are, when a broker lets it in."""
        self._context: zmq.Context[Any] = zmq.Context(config.io_threads)
        self._control: FdSocket | None = None
        self._data: Listening | None = None
        self._stopped: asyncio.Future[None] | None = None
        self._recorder: Recorder | None = None
        self._spans = tracing.recorder(config.trace)
        self._sends = None if self._spans is None else tracing.Sends(self._spans)
        self._turn, self._descriptors = 0, descriptors.Watch(log)
        self._nearby = Nearby(self._post, self._now, config.shared_bytes)
        self._senders = Senders(self._nearby.gone)
        self._safety, self._disk = Safety(), Disk(self._disk_says)
        self._couriers = Couriers(
            *(self._context, self._answer, self._hear, self._turn_over), safety=lambda: self._safety
        )

    @property
    def shard(self) -> Shard:
        """The shard, for a look at its figures."""
        assert self.node is not None, "the server was not started"
        return self.node.shard

    def start(self) -> None:
        """Bind the data port and dial the broker.

        Raises:
            ConfigError: an address is in use, cannot be resolved or not be reached by others.
            OSError: the recording cannot be written.
        """
        config = self.config
        size = config.socket_bytes
        data = new_socket(self._context, zmq.ROUTER, data=True, buffer_bytes=size)
        control = new_socket(self._context, zmq.DEALER, data=False)
        try:
            net.resolvable(config.broker)
            # What is wrong with an address is said before keys are looked for.
            net.advertised(config.bind, config.broker, config.advertise)
            self._safety = choose(
                *(self._context,),
                binds=[config.bind],
                dials=[config.broker],
                insecure=config.insecure,
                keys=config.keys,
            )
            self._safety.listen(data)
            self._senders.safety = self._safety
            bound = bind(data, config.bind, insecure=config.insecure)
            self.address = net.advertised(bound, config.broker, config.advertise)
            self._make_node()
            self._control = Dialled(
                *(control, config.broker, self._from_broker, self._safety),
                troubled=self._troubled,
            )
        except BaseException:
            # A context with an open socket would be waited for without end when it is collected.
            data.close(linger=0)
            control.close(linger=0)
            self._safety.close()
            self._context.term()
            raise
        self._stopped = asyncio.get_running_loop().create_future()
        roles, where = ("worker", "server", "follower", "admin"), "this server's data port"
        self._data = Listening(
            *(data, self._from_worker, self._safety, roles, where),
            turn_over=self._turn_over,
            limits=config.limits,
        )
        self._tick()

    def _make_node(self) -> None:
        """Make what decides, and its recorder."""
        config = self.config
        node_config = NodeConfig(
            broker=config.broker,
            name=config.name or f"{net.host_name()}-{os.getpid()}",
            address=self.address,
            host=net.host_name(),
            pid=os.getpid(),
            budget_bytes=config.budget_bytes,
            window_bytes=config.window_bytes,
            connect_timeout_s=config.connect_timeout_s,
            narrate_after_s=config.narrate_after_s,
            narrate_every_s=config.narrate_every_s,
            broker_lost_s=config.broker_lost_s,
            beat_s=tracing.beat_s(config.trace),
            asks=bool(config.trace),
            priority=not os.environ.get("ZKV_FIFO"),
            joins=config.joins,
        )
        instance, now = net.instance_number(), self._now()
        clock, spans = time.perf_counter, self._spans
        memory = Memory(self._nearby.memory.empty, self._nearby.is_lent)
        self.node = Node(
            node_config, instance=instance, now=now, clock=clock, spans=spans, memory=memory
        )
        if config.record is not None:
            self._recorder = Recorder(config.record)
            self._recorder.server(node_config, instance, now)

    def _hears(self, kind: str, *what: Any) -> float:
        """Note an event of the node, if this life is recorded; return the time."""
        now = self._now()
        if self._recorder is not None:
            self._recorder.heard(kind, now, *what)
        return now

    def _troubled(self, text: str) -> None:
        if self.node is not None:
            self.node.trouble = text

    def _tick(self) -> None:
        assert self.node is not None
        self._safety.tick()
        self._carry_out(self.node.tick(self._hears("tick")))

    def _now(self) -> float:
        # A loop's own time may be that of the beginning of its turn, in whole milliseconds.
        return time.monotonic()

    def _from_broker(self, frames: list[zmq.Frame]) -> None:
        if self.node is not None:
            before = self.node.welcome
            frame = frames[-1].bytes
            self._carry_out(self.node.broker_says(frame, self._hears("control", frame)))
            welcome = self.node.welcome
            if welcome is not None and welcome is not before:
                self.on_welcome(welcome.index, welcome.servers)

    def _from_worker(self, frames: list[zmq.Frame]) -> None:
        if self.node is None:
            return
        try:
            route, rest = split_route(frames)
            message = decode_data(rest[0].buffer, payload_bytes(rest))
            if not self._senders.may(message, route, frames[-1]):
                return
            if isinstance(message, Fetch):
                self._couriers.asked(message, [frame.bytes for frame in route])
                self._hear(rest[0].bytes, message, None)
                return
            if not self._senders.is_known(message, [frame.bytes for frame in route]):
                log.warning("dropped a %s that came over another route", type(message).__name__)
                return
            peer = sender(message)
            # What is summed as it is may stay where it is; what is decoded must not change
            # between its check and its use.
            stays = isinstance(message, Push) and message.form is None
            try:
                payload, came = self._nearby.payload(peer, rest[1:], stay=stays)
            except NeverShown:
                number = 0 if self.node.welcome is None else self.node.welcome.index
                self._say(peer, self._nearby.forgotten(number, peer))
                raise
            self._nearby.turn()
            if not came or self._shares(peer, message, rest[0]):
                return
            if self._sends is not None and isinstance(message, Got):
                self._sends.got(message)
            self._hear(rest[0].bytes, message, payload)
        except ProtocolError as error:
            if self._data is not None:
                self._data.strike(frames[0].bytes, error)

    def _hear(self, header: bytes, message: Data, payload: Array | None) -> None:
        if self.node is not None:
            now = self._now()
            if self._recorder is not None:
                content = None if payload is None else payload.tobytes()
                self._recorder.heard("data", now, header, content)
            self._carry_out(self.node.worker_says(message, payload, now))

    def _disk_says(self, event: Wrote | Loaded) -> None:
        if self.node is not None:
            self._carry_out(self.node.disk_says(event, self._hears(*plain_of_disk(event))))

    def _answer(self, route: list[bytes], frames: list[Any]) -> None:
        if self._data is not None:
            self._data.send([*route, *frames])

    def _shares(self, peer: int, message: Data, frame: zmq.Frame) -> bool:
        """Offer memory to whoever greets; return whether this is all that the message is about."""
        if isinstance(message, Share):
            self._say(peer, self._nearby.offered(peer, message, frame))
        elif isinstance(message, Shared):
            self._nearby.answered(peer, message)
        elif isinstance(message, Greet) and self.node is not None and self.node.welcome is not None:
            server = self.node.welcome.index
            offer = self._nearby.offer(peer, server=server, incarnation=message.incarnation)
            if offer is not None:
                self._say(peer, offer)
        return isinstance(message, Share | Shared)

    def _say(self, incarnation: int, message: Data) -> None:
        self._send_data(incarnation, encode_data(message), None)

    def _turn_over(self) -> None:
        if self.node is not None:
            self._carry_out(self.node.turn_over(self._hears("over")))

    def _carry_out(self, actions: list[Action]) -> None:
        assert self._control is not None
        self._turn += 1
        for action in actions:
            match action:
                case SendControl(frame):
                    self._control.send([frame])
                case ToWorker(incarnation, message, payload):
                    if self._sends is not None and isinstance(message, Block):
                        self._sends.block(message, payload)
                    self._send_data(incarnation, encode_data(message), payload)
                case Keyed(ring):
                    self._safety.learn(ring)
                case Prepare(plans):
                    # On a machine that never used these codecs, the loop would be silent so long
                    # that the server seems lost.
                    Thread(target=self._prepare, args=(plans,), daemon=True).start()
                case Note(level, text):
                    log.log(logging.getLevelName(level.upper()), "%s", text)
                case Write() | Load():
                    self._disk.carry_out(action)
                case ToServer():
                    self._couriers.send(action)
                case Drained():
                    if self._stopped is not None and not self._stopped.done():
                        self._stopped.set_result(None)
                case Failed(error):
                    self._fail(error, SIGNAL_TURNS)

    def _fail(self, error: Exception, turns: int) -> None:
        """End `serve` with an error, some turns of the loop later. Where all are told to end, the
        first goodbye ends the run for the others: a signal that is here already comes first."""
        if self._stopped is None or self._stopped.done():
            return
        if turns:
            self._stopped.get_loop().call_soon(self._fail, error, turns - 1)
        else:
            self._stopped.set_exception(error)

    def _prepare(self, plans: tuple[Plan, ...]) -> None:
        for plan in plans:
            plan.warm(self.shard.store.backend)
            aggregates.warm(plan, self.shard.store.backend)
        if self.shard.store.backend.name == "numba":
            dense.warm()

    def _send_data(self, incarnation: int, header: bytes, payload: Any) -> None:
        if incarnation in self._senders.routes:
            # What is to be sent in one turn to several workers may be the same values: nothing that
            # is sent changes before the turn is over, and later it may.
            self._nearby.send(incarnation, header, payload, self._turn)

    def _post(self, incarnation: int, frames: list[Any]) -> None:
        route = self._senders.routes.get(incarnation)
        if route is not None:
            self._answer(route, frames)

    def _write_spans(self) -> None:
        if self._spans is None or self.node is None:
            return
        number = -1 if self.node.welcome is None else self.node.welcome.index
        config, alignment = self.node.config, self.node.round_trips.alignment
        about = {"name": config.name, "host": config.host}
        tracing.write(self.config.trace, "server", number, self._spans, alignment, about)

    async def serve(self) -> None:
        """Serve until `stop` is called.

        Raises:
            ClusterNotReady: no broker within `connect_timeout_s`.
            ZkvError: the broker refused this server, was lost, or the run has failed.
        """
        assert self._stopped is not None
        assert self.node is not None
        while not self._stopped.done():
            self._tick()
            self._senders.forget_those_gone(self.node.shard.members, self._now())
            self._nearby.turn()
            self._descriptors.look(self._now())
            await asyncio.wait({self._stopped}, timeout=tick_s(self.node.pulse.beat_s))
        await self._stopped

    def stop(self, why: str = "") -> None:
        """Say goodbye to the broker and end `serve`."""
        log.info("stopping %s", why)
        if self.node is not None and self._control is not None:
            why = why or "it was told to"
            self._carry_out(self.node.stop(why, self._hears("stop", why)))
        if self._stopped is not None and not self._stopped.done():
            self._stopped.set_result(None)

    def close(self) -> None:
        """Close all sockets in bounded time, and end the recording and the trace."""
        self._write_spans()
        if self._recorder is not None and self.node is not None:
            self._recorder.close(digest_of(self.node.shard))
        self._couriers.close()
        self._disk.close()
        for socket in (self._control, self._data):
            if socket is not None:
                socket.close(LINGER_MS)
        self._safety.close()
        self._context.destroy(linger=LINGER_MS)
        self._nearby.close()


async def serve(config: ServerConfig, ready: Callable[[Server], None] | None = None) -> None:
    """Run a server until SIGINT, SIGTERM or an error; `ready(server)` is called once it is
    bound."""
    server = Server(config)
    server.start()
    net.on_stop_signals(server.stop)
    if ready is not None:
        ready(server)
    try:
        await server.serve()
    finally:
        server.close()
