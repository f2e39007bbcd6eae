"""Sockets between workers that add gradients up among themselves. Decides nothing.

Each worker binds one ROUTER that only listens, and dials one DEALER to each worker that it sends
anything: what goes back goes over that one's own. A connection begins with a `Greet`, and nothing
is believed that does not come over the connection on which its sender has greeted. Workers of one
machine pass payloads through memory (`zkv_net.nearby`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import zmq

from zkv.data_messages import (
    Data,
    Greet,
    Pass,
    Push,
    Share,
    Shared,
    Took,
    decode_data,
    encode_data,
)
from zkv.dtypes import Array
from zkv.errors import ConfigError, ProtocolError
from zkv.wire import split_route
from zkv_net import loop as net
from zkv_net import nearby
from zkv_net.dialling import Dialled
from zkv_net.listening import Listening
from zkv_net.nearby import Nearby, NeverShown, payload_bytes
from zkv_net.safety import Safety
from zkv_net.sockets import FdSocket, bind, join_address, new_socket

log = logging.getLogger("zkv.worker")
LINGER_MS = 500
GREET_EVERY_S = 1.0


class Peers:
    """One worker's connections to others. All methods must be called on its loop.

    `receive(message, payload)` takes what comes, and `turn_over()` is called when that is all for
    now. `me()` is this worker's (incarnation, term).
    """

    def __init__(
        self,
        context: zmq.Context[Any],
        shared_bytes: int,
        receive: Callable[[Data, Array | None], None],
        turn_over: Callable[[], None],
        me: Callable[[], tuple[int, int]],
        *,
        safety: Safety | None = None,
    ) -> None:
        self._context = context
        self._safety = safety or Safety()
        self._greet_at = 0.0
        self._receive = receive
        self._turn_over = turn_over
        self._me = me
        self._sockets: dict[int, tuple[str, FdSocket]] = {}
        self._routes: dict[int, list[bytes]] = {}
        self._listener: FdSocket | None = None
        self.turn = 0
        """Of the loop: what is sent in one turn to several workers may be the same values."""
        self._address = ""
        self.nearby = Nearby(self._post, time.monotonic, shared_bytes)

    def listen(self, broker: str) -> str:
        """Bind a port on the interface that leads to the broker; return its address, "" if that
        cannot be done."""
        if self._address:
            return self._address
        socket = new_socket(self._context, zmq.ROUTER, data=True)
        try:
            # Who has let the broker be reached from other machines has said that it is safe there.
            host = join_address(net.address_toward(broker), 0)
            self._safety.listen(socket)
            self._address = bind(socket, host, insecure=True)
        except ConfigError as error:
            socket.close(linger=0)
            log.warning("other workers cannot reach this one: %s", error)
            return ""
        where = "this worker's port for others"
        self._listener = Listening(
            *(socket, self._received, self._safety, ("worker",), where), turn_over=self._turn_over
        )
        return self._address

    # --- out ---------------------------------------------------------------------------------

    def send(self, peer: int, address: str, message: Data, payload: Array | None) -> None:
        """Send a message to the worker with this incarnation."""
        known = self._sockets.get(peer)
        if known is None or known[0] != address:
            self.drop(peer)
            self._dial(peer, address)
        self.nearby.send(peer, encode_data(message), payload, self.turn)

    def _dial(self, peer: int, address: str) -> None:
        socket = new_socket(self._context, zmq.DEALER, data=True)
        self._sockets[peer] = address, Dialled(socket, address, self._ignore, self._safety)
        self._greet(peer)
        self._offer(peer)

    def _greet(self, peer: int) -> None:
        incarnation, term = self._me()
        self._say(peer, Greet(incarnation, term))

    @staticmethod
    def _ignore(frames: list[zmq.Frame]) -> None:
        log.warning("dropped %d frames that came back over a connection to a worker", len(frames))

    def _offer(self, peer: int) -> None:
        """Offer memory to a worker that may be on this machine."""
        offer = self.nearby.offer(peer, server=peer, incarnation=self._me()[0])
        if offer is not None:
            self._say(peer, offer)

    def _say(self, peer: int, message: Data) -> None:
        self._post(peer, [b"", encode_data(message)])

    def _post(self, peer: int, frames: list[Any]) -> None:
        known = self._sockets.get(peer)
        if known is not None:
            known[1].send(frames)

    def drop(self, peer: int) -> None:
        """Nothing more goes to this worker."""
        known = self._sockets.pop(peer, None)
        if known is not None:
            known[1].close()
            self.nearby.gone(peer)

    # --- in ----------------------------------------------------------------------------------

    def _received(self, frames: list[zmq.Frame]) -> None:
        try:
            route, rest = split_route(frames)
            message = decode_data(rest[0].buffer, payload_bytes(rest))
            peer = _sender(message)
            if not self._may(peer, frames[-1]):
                return
            came_over = [frame.bytes for frame in route]
            if isinstance(message, Greet):
                self._routes[peer] = came_over
                return
            if self._routes.get(peer) != came_over:
                log.warning("dropped a %s that came over another route", type(message).__name__)
                return
            payload, came = self.nearby.payload(peer, rest[1:])
        except NeverShown as error:
            self._say(peer, self.nearby.forgotten(self._me()[0], peer))
            log.warning("dropped a message of a worker: %s", error)
            return
        except ProtocolError as error:
            log.warning("dropped a message of a worker: %s", error)
            return
        self.nearby.turn()
        if isinstance(message, Share):
            self._say(peer, self.nearby.offered(peer, message, rest[0]))
        elif isinstance(message, Shared):
            self.nearby.answered(peer, message)
        elif came:
            self._receive(message, payload)

    def _may(self, peer: int, frame: zmq.Frame) -> bool:
        """Return whether a message may come from this worker's incarnation, by its key.

        Raises:
            ProtocolError: it may not, and that is no matter of time.
        """
        if not self._safety.knows(peer):
            # The broker's word is on its way; who greets does so again.
            return False
        key = self._safety.sender(frame)
        if not self._safety.is_of(peer, key):
            raise ProtocolError(f"incarnation {peer} is not of the key {key[:8]}…")
        return True

    def tick(self) -> None:
        """Time has passed: offer memory again to who has not answered, and greet again, as a
        connection may be a new one."""
        self.nearby.turn()
        again = time.monotonic() >= self._greet_at
        if again:
            self._greet_at = time.monotonic() + GREET_EVERY_S
        for peer in self._sockets:
            if again:
                self._greet(peer)
            self._offer(peer)

    def close(self) -> None:
        """Close all sockets in bounded time."""
        for _, socket in self._sockets.values():
            socket.close(LINGER_MS)
        if self._listener is not None:
            self._listener.close(LINGER_MS)
        self.nearby.close()


def machine() -> str:
    """Return what workers have in common that are on one machine and see each other on loopback.

    Hosts that only look alike (containers of one image, say) differ in it.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
    except OSError:
        return net.host_name()
    return f"{boot} {nearby.machine()}"


def _sender(message: Data) -> int:
    """Return the incarnation of the worker that a message is from.

    Raises:
        ProtocolError: no worker says this to another.
    """
    if isinstance(message, Push):
        return message.contribution.incarnation
    if isinstance(message, Greet | Pass | Took | Share):
        return message.incarnation
    if isinstance(message, Shared):
        # The answer names who offered in its other field.
        return message.server
    raise ProtocolError(f"a {type(message).__name__} from another worker")
