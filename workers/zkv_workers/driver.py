"""The worker's driver: sockets and futures around a `Session`, on an event loop. Decides
nothing."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import logging
import os
import time
from collections.abc import Callable, Set
from typing import Any

import zmq

from zkv.control import SaveState
from zkv.data_messages import (
    Ack,
    Block,
    Data,
    Fenced,
    Greet,
    Probed,
    Push,
    Rows,
    Share,
    Shared,
    decode_data,
    encode_data,
)
from zkv.errors import Closed, ConfigError, ProtocolError
from zkv.heartbeat import tick_s
from zkv.spans import Spans
from zkv.wire import split_route
from zkv_net import loop as net
from zkv_net import tracing
from zkv_net.dialling import Dialled
from zkv_net.nearby import Nearby, NeverShown, payload_bytes
from zkv_net.safety import choose
from zkv_net.sockets import FdSocket, is_loopback, new_socket, split_address
from zkv_workers import signals as s
from zkv_workers.assembly import coded
from zkv_workers.choosing import Traffic
from zkv_workers.config import ROUTES, SessionConfig
from zkv_workers.peers import Peers, machine
from zkv_workers.pipeline import Pipeline
from zkv_workers.session import Session

log = logging.getLogger("zkv.worker")
TICK_S = 0.05
LINGER_MS = 500


def now() -> float:
    """Return the time in seconds.

    A loop's own may be that of the beginning of its turn, in whole milliseconds.
    """
    return time.monotonic()


class Driver:
    """Carries out what a session says. All methods must be called on the loop that it was made
    on."""

    def __init__(
        self, config: SessionConfig, *, route: str = "direct", spans: Spans | None = None
    ) -> None:
        if route not in ROUTES:
            raise ValueError(f"route {route!r} is none of {', '.join(ROUTES)}")
        net.resolvable(config.broker)
        self._pid = os.getpid()
        # Where the broker is on loopback, all is on one machine.
        far = not is_loopback(split_address(config.broker)[0])
        config = dataclasses.replace(config, measures=far, near=not far)
        self.session = Session(config, instance=net.instance_number())
        self.cancelled: Callable[[int], None] = lambda batch: None
        self.saving: Callable[[SaveState], None] = lambda message: None
        self._route = route
        self._sends = None if spans is None else tracing.Sends(spans)
        self._loop = asyncio.get_running_loop()
        self._tokens = itertools.count(1)
        self._futures: dict[int, asyncio.Future[Any]] = {}
        self._context: zmq.Context[Any] = zmq.Context(config.io_threads)
        self._data: dict[int, FdSocket] = {}
        why = "" if route == "direct" else "they go through the broker"
        self.nearby = Nearby(self._post, now, config.shared_bytes, why)
        self.session.uploads.empty = self.nearby.memory.empty
        self._trouble = ""
        socket = new_socket(self._context, zmq.DEALER, data=False)
        try:
            self._safety = choose(
                self._context, dials=[config.broker], keys=config.keys, insecure=config.insecure
            )
            self._control = Dialled(
                *(socket, config.broker, self._from_broker, self._safety), troubled=self._troubled
            )
        except BaseException:
            socket.close(linger=0)
            self._context.term()
            raise
        self.others = Peers(
            *(self._context, config.shared_bytes, self._from_peer, self.flush, self._me),
            safety=self._safety,
        )
        self._closed = False
        self._made_at = now()
        self._timer = self._loop.call_later(TICK_S, self._tick)

    @property
    def silent_s(self) -> float:
        """For how long nothing was heard of the broker, in seconds."""
        heard = self.session.heard
        return now() - (self._made_at if heard is None else heard)

    def broker_is_gone(self, least_s: float) -> bool:
        """Return whether the broker was not heard for three beats, and for so many seconds."""
        return self.silent_s > self.session.pulse.patience_s(least_s)

    def traffic(self) -> Traffic:
        """Return what this worker's links have carried so far; may be called on any thread."""
        up, down = self.session.uploads, self.session.downloads
        return Traffic(up.bytes_arrived, up.busy_s, down.bytes_received, down.model_s)

    # --- calls -------------------------------------------------------------------------------

    def call(
        self, make: Callable[[int], s.Input], behind: Pipeline | None = None
    ) -> asyncio.Future[Any]:
        """Give the session a call; the future has its answer. Cancelling it only stops the
        waiting. `behind`: it is made when all jobs are done that are in that pipeline now.

        Raises:
            Closed: this is another process than the one that connected.
        """
        self.check_process()
        token = next(self._tokens)
        future: asyncio.Future[Any] = self._loop.create_future()
        if self._closed:
            future.set_exception(Closed("the worker was closed"))
            return future
        self._futures[token] = future
        future.add_done_callback(lambda done: self._given_up(token, done))
        if behind is None:
            self._make(token, make)
        else:
            behind.put(lambda: self.beside(self._make, token, make))
        return future

    def _make(self, token: int, make: Callable[[int], s.Input]) -> None:
        try:
            event = make(token)
        except Exception as error:
            future = self._futures.pop(token, None)
            if future is not None and not future.done():
                future.set_exception(error)
            return
        self.feed(event)

    def beside(self, act: Callable[..., object], *arguments: Any) -> None:
        """Do this on the loop; may be called on any thread."""
        # A loop that has ended has nobody to do it for.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(act, *arguments)

    def _given_up(self, token: int, future: asyncio.Future[Any]) -> None:
        self._futures.pop(token, None)
        if future.cancelled() and not self._closed:
            self.feed(s.GiveUp(token))

    def check_process(self) -> None:
        """Check that this is the process that connected: sockets are of no use after a fork.

        Raises:
            Closed: it is not.
        """
        if os.getpid() != self._pid:
            raise Closed(
                "this worker belongs to the process that connected; connect again after a fork"
            )

    def feed(self, *events: s.Input) -> None:
        """Give the session inputs, in this order, and carry out what it says to all of them.

        Raises:
            Closed: this is another process than the one that connected.
        """
        self.check_process()
        if not self._closed:
            for event in events:
                self.session.take(event, now())
            self.flush()

    def flush(self) -> None:
        """Carry out what the inputs of this turn led to."""
        if self._closed:
            return
        self.others.turn += 1
        for action in self.session.turn_over(now()):
            match action:
                case s.SendControl(frame):
                    self._control.send([frame])
                case s.SendData(server, message, payload):
                    if self._sends is not None and isinstance(message, Push):
                        self._sends.push(server, message, payload)
                    self._send_data(server, encode_data(message), payload)
                    if isinstance(message, Greet):
                        self._offer(server, message)
                case s.Keyed(ring):
                    self._safety.learn(ring)
                case s.Connect(servers, broker_data, anew):
                    self._disconnect(self._data.keys() if anew else set())
                    self._connect(dict(servers), broker_data)
                case s.SendPeer(incarnation, address, message, payload):
                    self.others.send(incarnation, address, message, payload)
                case s.DropPeer(incarnation):
                    self.others.drop(incarnation)
                case s.Listen():
                    # Who lets all data pass through the broker reaches nobody else.
                    broker = self.session.config.broker
                    address = "" if self._route == "broker" else self.others.listen(broker)
                    self._loop.call_soon(self.feed, s.Listening(address, machine()))
                case s.Answer(token, value):
                    future = self._futures.pop(token, None)
                    if future is not None and not future.done():
                        future.set_result(value)
                case s.Fail(token, error):
                    future = self._futures.pop(token, None)
                    if future is not None and not future.done():
                        future.set_exception(error)
                case s.CancelBatch(batch):
                    self.cancelled(batch)
                case s.SaveState(message):
                    self.saving(message)
                case s.Narrate(level, text):
                    log.log(logging.getLevelName(level.upper()), "%s", text)
                case s.Broken(error):
                    log.log(
                        logging.DEBUG if isinstance(error, Closed) else logging.ERROR, "%s", error
                    )

    # --- sockets -----------------------------------------------------------------------------

    def _connect(self, servers: dict[int, str], broker_data: str) -> None:
        """Connect to these servers and no others; connections that are there stay."""
        self._disconnect(self._data.keys() - servers.keys())
        fresh = {at: address for at, address in servers.items() if at not in self._data}
        if self._route == "broker":
            there = list(self._data.values())
            socket = there[0] if there else self._dial(broker_data)
            self._data |= dict.fromkeys(fresh, socket)
        else:
            self._check_reachable(servers)
            self._data |= {index: self._dial(address) for index, address in fresh.items()}

    def _disconnect(self, servers: Set[int]) -> None:
        gone = {server: self._data.pop(server) for server in tuple(servers)}
        for server in gone:
            self.nearby.gone(server)
        for socket in set(gone.values()) - set(self._data.values()):
            socket.close()

    def _check_reachable(self, servers: dict[int, str]) -> None:
        """Fail at once, rather than wait, where a server told an address of its machine only."""
        broker = self.session.config.broker
        if is_loopback(split_address(broker)[0]) or net.is_own(broker):
            return
        for index, address in servers.items():
            if is_loopback(split_address(address)[0]):
                text = f"server {index} announced {address}, which only its own machine reaches: "
                text += "start it with --bind tcp://0.0.0.0:PORT, or use route 'broker'"
                self.session.fail(ConfigError(text))

    def _dial(self, address: str) -> FdSocket:
        size = self.session.config.socket_bytes
        socket = new_socket(self._context, zmq.DEALER, data=True, buffer_bytes=size)
        return Dialled(*(socket, address, self._from_server, self._safety), turn_over=self.flush)

    def _send_data(self, server: int, header: bytes, payload: Any) -> None:
        if server in self._data:
            self.nearby.send(server, header, payload)

    def _post(self, server: int, frames: list[Any]) -> None:
        socket = self._data.get(server)
        if socket is not None:
            route = [] if self._route == "direct" else [server.to_bytes(2, "big")]
            socket.send([*route, *frames])

    def _offer(self, server: int, greet: Greet) -> None:
        """Offer memory to a server that may be on this machine; it offers its own when greeted."""
        offer = self.nearby.offer(server, server=server, incarnation=greet.incarnation)
        if offer is not None:
            self._send_data(server, encode_data(offer), None)

    def _from_broker(self, frames: list[zmq.Frame]) -> None:
        self.feed(s.FromBroker(frames[-1].bytes))

    def _from_server(self, frames: list[zmq.Frame]) -> None:
        try:
            _, rest = split_route(frames)
            message = decode_data(rest[0].buffer, payload_bytes(rest))
            server = server_of(message)
            stays = isinstance(message, Block) and not coded(message)
            try:
                payload, came = self.nearby.payload(server, rest[1:], stay=stays)
            except NeverShown:
                self._send_forgotten(server)
                raise
        except ProtocolError as error:
            log.warning("dropped a data message: %s", error)
            return
        self.nearby.turn()
        if isinstance(message, Share):
            answer = self.nearby.offered(server, message, rest[0])
            self._send_data(server, encode_data(answer), None)
            return
        if isinstance(message, Shared):
            self.nearby.answered(server, message)
            return
        if self._sends is not None and isinstance(message, Ack):
            self._sends.acknowledged(message)
        if came and not self._closed:
            self.session.take(s.FromServer(message, payload), now())

    def _me(self) -> tuple[int, int]:
        """Return this worker's incarnation, and the term of its broker."""
        member = self.session.member
        return (0, 0) if member is None else (member.incarnation, member.term)

    def _from_peer(self, message: Data, payload: Any) -> None:
        if not self._closed:
            self.session.take(s.FromPeer(message, payload), now())

    def _send_forgotten(self, server: int) -> None:
        member = self.session.member
        if member is not None:
            answer = self.nearby.forgotten(server, member.incarnation)
            self._send_data(server, encode_data(answer), None)

    def _tick(self) -> None:
        if not self._closed:
            self.others.tick()
            pause_s = tick_s(self.session.pulse.beat_s, TICK_S)
            self._timer = self._loop.call_later(pause_s, self._tick)
            self.nearby.turn()
            self.feed(s.Tick(self.nearby.transport, self._trouble))

    def _troubled(self, text: str) -> None:
        self._trouble = text

    def close(self) -> None:
        """Close all sockets in bounded time and fail what still waits."""
        if self._closed:
            return
        self._closed = True
        self._timer.cancel()
        self._control.close(LINGER_MS)
        for socket in set(self._data.values()):
            socket.close(LINGER_MS)
        self.others.close()
        self._safety.close()
        self._context.destroy(linger=LINGER_MS)
        self.nearby.close()
        for future in list(self._futures.values()):
            if not future.done():
                future.set_exception(Closed("the worker was closed"))
                future.exception()
        self._futures.clear()


def server_of(message: Data) -> int:
    """Return the server that a data message is from.

    Raises:
        ProtocolError: no server says this.
    """
    if isinstance(message, Ack | Block | Fenced | Probed | Rows | Share | Shared):
        return message.server
    raise ProtocolError(f"a {type(message).__name__} from a server")
