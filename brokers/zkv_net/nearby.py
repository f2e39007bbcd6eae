"""Peers on this machine get their payloads through memory instead of through their sockets.

Messages stay what they are; of one whose payload lies in memory, the payload's frame is empty, and
a third frame tells where it lies. A server offers its memory to whoever greets it, and offers again
until it has an answer; who can open it answers so, and offers its own. What cannot be opened (on
another machine, in another container, of another user) costs nothing but that answer.
"""

from __future__ import annotations

import logging
import os
import secrets
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import zmq

from zkv.data_messages import Share, Shared
from zkv.dtypes import Array
from zkv.errors import ProtocolError
from zkv.wire import SHARED_BYTES
from zkv_net.inbox import Inbox, NotHere
from zkv_net.loop import is_own
from zkv_net.segment import TOKEN_BYTES, Outbox, Place, Shape
from zkv_net.sockets import is_loopback, join_address
from zkv_net.spares import Spares

log = logging.getLogger("zkv.net")
SLOT_BYTES = 8 * 1024 * 1024
"""A block of the largest."""
SLOTS = 8
"""So few that caches hold what was just written until it is read."""
COPIES_BYTES_MAX = 32 * 1024 * 1024
"""Of what was copied out of peers' memory, so many bytes are kept to be used again."""
ENTRIES = 8192
"""Payloads that may be under way."""
LEAST_BYTES = 32 * 1024
"""Below this a socket is as quick."""
NO_ANSWER, ELSEWHERE = "no answer yet", "it is on another machine"
WAITING_MAX = 65_536
"""Messages to a peer that wait for room; more go through the socket."""


def machine() -> str:
    """Return what two processes have in common if their sockets can reach each other on loopback.

    Processes in two network namespaces may see each other, and are two machines all the same.
    """
    try:
        return os.readlink("/proc/self/ns/net")
    except OSError:
        return ""


NO_TOKEN = bytes(TOKEN_BYTES)
"""Says of any memory that it cannot be read."""


class NeverShown(ProtocolError):
    """A payload is said to lie in memory that its sender has not shown, or that was forgotten."""


@dataclass(slots=True)
class _Peer:
    """What is known of one peer."""

    inbox: Inbox | None = None
    reads: bool = False
    """Whether it can read from our memory."""
    why: str = NO_ANSWER
    """Why it cannot."""
    waiting: deque[tuple[bytes, Array | None, Hashable]] = field(default_factory=deque)


class Nearby:
    """The peers of one process. `post(peer, frames)` puts a message into a peer's socket.

    `shared_bytes`: of this process's memory; 0: none is offered, and none is opened. `why`: as with
    0, for this reason.
    """

    def __init__(
        self,
        post: Callable[[int, list[Any]], None],
        clock: Callable[[], float],
        shared_bytes: int = SHARED_BYTES,
        why: str = "",
    ) -> None:
        self._post, self._clock = post, clock
        self._bytes = shared_bytes
        self._outbox: Outbox | None = None
        self.memory = Spares(make=self._make, look=self._look)
        """Where payloads should be made: what lies there needs no copy to get to a peer that reads
        from our memory."""
        self._peers: dict[int, _Peer] = {}
        self._stalled: set[int] = set()
        """Peers for whom something waits."""
        self.why = why or ("" if shared_bytes >= SLOT_BYTES else "it is switched off")
        """Why nothing is shared with anybody."""
        self._copies = Spares(COPIES_BYTES_MAX)
        self._is_read = False

    @property
    def transport(self) -> str:
        """How payloads go: "memory" (both ways, to all peers), "tcp" and why, or some each way."""
        if self.why:
            return f"tcp: {self.why}"
        ways = [(one.reads, one.inbox is not None) for one in self._peers.values()]
        if not any(any(way) for way in ways):
            return f"tcp: {next((one.why for one in self._peers.values()), 'nobody is here yet')}"
        return "memory" if all(all(way) for way in ways) else "memory and tcp"

    # --- who is near -------------------------------------------------------------------------

    def offer(self, peer: int, *, server: int, incarnation: int) -> Share | None:
        """Return what offers our memory to a peer; None if it has answered, or gets none."""
        known, outbox = self._known(peer), self._own()
        if outbox is None or known.why != NO_ANSWER:
            return None
        shape = outbox.shape
        return Share(
            server,
            incarnation,
            machine(),
            os.getpid(),
            outbox.fd,
            shape.entries,
            shape.data_bytes,
            outbox.token,
        )

    def _known(self, peer: int) -> _Peer:
        return self._peers.setdefault(peer, _Peer())

    def _own(self) -> Outbox | None:
        if self._outbox is None and not self.why:
            shape = Shape(ENTRIES, self._bytes)
            token = secrets.token_bytes(TOKEN_BYTES)
            try:
                self._outbox = Outbox(shape, token, slots=SLOTS, slot_bytes=SLOT_BYTES)
            except OSError as error:
                self.why = f"no memory can be shared: {error}"
                log.info("payloads go through sockets, also on this machine: %s", error)
        return self._outbox

    def offered(self, peer: int, message: Share, frame: Any) -> Shared:
        """A peer offers its memory: return what tells it whether it can be read.

        `frame` is one that has come from it. For whoever is elsewhere nothing is looked up: it must
        not learn which processes there are.
        """
        why = self._open(peer, message) if _is_here(frame) else ELSEWHERE
        return Shared(message.server, message.incarnation, message.token, why)

    def _open(self, peer: int, message: Share) -> str:
        if self.why:
            return self.why
        if not message.machine or message.machine != machine():
            return ELSEWHERE
        shape = Shape(message.entries, message.data_bytes)
        try:
            self._known(peer).inbox = Inbox(
                message.pid, message.fd, shape, message.token, self._copies
            )
        except NotHere as error:
            return str(error)
        return ""

    def answered(self, peer: int, message: Shared) -> None:
        """A peer has answered our offer."""
        known, outbox = self._peers.get(peer), self._outbox
        if known is None or outbox is None or message.token not in (outbox.token, NO_TOKEN):
            return
        if not message.why and not self._is_read:
            # From here on arrays are made where peers can read them.
            self._is_read = True
            self.memory.clear()
        known.reads, known.why = not message.why, message.why

    @staticmethod
    def forgotten(server: int, incarnation: int) -> Shared:
        """Return what tells a peer that its memory cannot be read, and is to be offered again."""
        return Shared(server, incarnation, NO_TOKEN, NO_ANSWER)

    # --- memory ------------------------------------------------------------------------------

    def _make(self, nbytes: int) -> Array | None:
        outbox = self._outbox
        return outbox.allocate(nbytes) if outbox is not None and self._is_read else None

    def _look(self) -> None:
        if self._outbox is not None:
            self._outbox.sweep(self._clock())

    def is_lent(self, values: Array) -> bool:
        """Return whether a peer looks at this array where it lies, so that it must not change."""
        return self._outbox is not None and self._outbox.is_lent(values, self._clock())

    def gone(self, peer: int) -> None:
        """A peer is gone."""
        known = self._peers.pop(peer, None)
        self._stalled.discard(peer)
        if known is not None and self._outbox is not None:
            self._outbox.forget(peer)

    # --- messages ----------------------------------------------------------------------------

    def send(self, peer: int, header: bytes, payload: Array | None, key: Hashable = None) -> None:
        """Send a message once there is room for its payload, after those before it.

        `key`: the same only for the same values, if they lie in the same array.
        """
        known = self._peers.get(peer)
        if known is None or not known.reads:
            self._post(peer, [b"", header] if payload is None else [b"", header, _flat(payload)])
            return
        known.waiting.append((header, payload, key))
        if len(known.waiting) == 1:
            self._send_waiting(peer, known)

    def turn(self) -> None:
        """Send what waits for room, as far as there is some. Call it whenever a peer has spoken, as
        it has taken something by then, and from time to time."""
        for peer in tuple(self._stalled):
            self._send_waiting(peer, self._peers[peer])

    def _send_waiting(self, peer: int, known: _Peer) -> None:
        while known.waiting:
            header, payload, key = known.waiting[0]
            frames: list[Any] = [b"", header]
            if payload is not None:
                flat = _flat(payload)
                if known.reads and self._outbox and self._outbox.takes(flat, LEAST_BYTES):
                    named = None if key is None else (key, flat.ctypes.data, flat.nbytes)
                    place = self._outbox.put(peer, flat, named, self._clock())
                    if place is None and len(known.waiting) < WAITING_MAX:
                        self._stalled.add(peer)
                        return
                    frames += [flat] if place is None else [b"", place.encode()]
                else:
                    frames.append(flat)
            known.waiting.popleft()
            self._post(peer, frames)
        self._stalled.discard(peer)

    def payload(
        self, peer: int, frames: list[Any], *, stay: bool = False
    ) -> tuple[Array | None, bool]:
        """Return the payload of a message (its frames without the header): flat, uint8, and whether
        it came whole. One that was given up before it was read is as good as lost.

        `stay`: what lies in the peer's memory is not copied, is read-only, and may be changed by a
        peer that does what it must not.

        Raises:
            NeverShown: it is said to lie where this peer has shown nothing: answer `forgotten`.
            ProtocolError: it is said to lie outside of what was shown.
        """
        if not frames:
            return None, True
        if len(frames) == 1:
            return np.frombuffer(frames[0].buffer, dtype=np.uint8), True
        known = self._peers.get(peer)
        if len(frames) != 2 or len(frames[0]) or known is None or known.inbox is None:
            raise NeverShown(f"a payload in memory that peer {peer} has never shown")
        found = known.inbox.take(Place.decode(frames[1].buffer), stay=stay)
        return found, found is not None

    def close(self) -> None:
        """Give the memory back."""
        self._peers.clear()
        self._stalled.clear()
        self.memory.clear()
        self._copies.clear()
        if self._outbox is not None:
            self._outbox.close()
            self._outbox = None


def _is_here(frame: Any) -> bool:
    """Return whether a frame has come from an address of this machine."""
    try:
        address = str(frame.get("Peer-Address"))
    except zmq.ZMQError:
        return False
    return is_loopback(address) or is_own(join_address(address, 9))


def payload_bytes(frames: list[Any]) -> int | None:
    """Return the size of a message's payload as its frames from the header on tell it; None: none.

    Raises:
        ProtocolError: it is said to lie in memory, but not where.
    """
    if len(frames) < 3:
        return len(frames[1]) if len(frames) == 2 else None
    return Place.decode(frames[2].buffer).nbytes


def _flat(payload: Array) -> Array:
    return payload.view(np.uint8)
