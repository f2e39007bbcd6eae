"""Links: control messages between two process instances, in order, each exactly once.

ZeroMQ alone is at-most-once: a broken connection loses what was in flight, without a word. A link
numbers the messages, keeps them until they are acknowledged, sends them again when no
acknowledgement comes, and drops what arrives twice or out of order (go back N: connections keep
order, so a gap only follows a loss). Pure: time comes in as `now`, in seconds of any monotonic
clock.

An instance number is drawn by each process at its start, so that a restarted peer is never taken
for the old one: `receive` then reports `PeerChanged`, the link starts afresh, and whoever owns it
brings the new instance up to date.

A broker that recovers from its journal is another instance, but its links go on: it has all that
it ever acknowledged, and what it was never sent is sent again. Its packets bear the same `origin`
as before, which is how the other end knows (`PeerChanged.goes_on`).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from zkv.control import Message, Packet
from zkv.window import SLOWEST_BYTES_PER_S
from zkv.wire import CONTROL_BYTES_MAX, MESSAGES_PER_PACKET_MAX, encode

PACKET_BYTES_MAX = CONTROL_BYTES_MAX // 2
"""The messages of one packet: half of what a frame may have, as its outer part counts too."""
PATIENCE_BYTES = 64 * 1024
BACKLOG_MAX = 100_000
BACKLOG_BYTES_MAX = 256 * 1024 * 1024
"""Messages that wait to be acknowledged: the manifest of 100,000 keys, ten times over, is less."""
STRANGER = 0
"""The number of an empty packet that says: I do not know you, begin anew. Messages count from 1."""


@dataclass(frozen=True, slots=True)
class PeerChanged:
    """The peer is another process instance than before (or the first one heard)."""

    peer: int
    before: int
    goes_on: bool = False
    """Whether it has recovered what the one before had taken: the link is the same."""


class Link:
    """One end of a link. `resend_s`: the first pause before messages go out again, in seconds.

    With `rising`, only a peer with a higher instance number replaces another: a late packet of an
    earlier broker must not be taken for a newer one's. `origin`: see above; b"": when this process
    ends its links end.
    """

    def __init__(
        self,
        instance: int,
        *,
        peer: int = 0,
        resend_s: float = 1.0,
        rising: bool = False,
        origin: bytes = b"",
    ) -> None:
        self.instance = instance
        self.peer = peer
        self.origin = origin
        self._peer_origin = b""
        self.heard: float | None = None
        self._resend_first_s = resend_s
        self._rising = rising
        self._former: deque[int] = deque(maxlen=64)
        self._fresh()

    def _fresh(self) -> None:
        self._unacked: deque[Message] = deque()
        self._unacked_bytes = 0
        self._sizes: deque[int] = deque()
        self._first_unacked = 1
        self._sent_up_to = 0
        self._expected = 1
        self._ack_due = False
        self._resend_at: float | None = None
        self._resend_s = self._resend_first_s

    def resend_after(self, resend_s: float) -> None:
        """From the next acknowledgement on, pause so long before messages go out again."""
        self._resend_first_s = resend_s

    @property
    def idle(self) -> bool:
        """Whether everything that was sent has been acknowledged."""
        return not self._unacked

    @property
    def full(self) -> bool:
        """Whether the peer leaves so much unacknowledged that it cannot be reading."""
        return len(self._unacked) > BACKLOG_MAX or self._unacked_bytes > BACKLOG_BYTES_MAX

    @property
    def next_number(self) -> int:
        """The number of the next message that is sent: the other end cannot have heard it."""
        return self._first_unacked + len(self._unacked)

    def has_acknowledged(self, number: int) -> bool:
        """Whether the other end has said that it has heard all up to this number."""
        return self._first_unacked > number

    def send(self, message: Message) -> None:
        """Queue a message; `outgoing` gives the packets to put on the wire.

        Raises:
            ValueError: it is too large for a packet.
        """
        size = len(encode(message))
        if size > PACKET_BYTES_MAX:
            name = type(message).__name__
            raise ValueError(
                f"a {name} of {size} bytes does not fit into a packet of {PACKET_BYTES_MAX}; "
                "initialise fewer keys in one call"
            )
        self._unacked.append(message)
        self._sizes.append(size)
        self._unacked_bytes += size

    def receive(self, packet: Packet, now: float) -> tuple[PeerChanged | None, list[Message]]:
        """Take a packet in; return a change of the peer, if any, and the new messages in order."""
        change: PeerChanged | None = None
        older = self._rising and packet.source < self.peer
        if packet.source == 0 or older or packet.source in self._former:
            # 0 is no instance; what comes late from one that is gone must not bring it back.
            return None, []
        if packet.source != self.peer:
            change = self._changed(packet)
        self.heard = now
        if packet.target not in (0, self.instance):
            # Meant for the process that was here before: answer, so that the peer learns of us.
            self._ack_due = True
            return change, []
        if packet.target == self.instance:
            self._acknowledge(packet.received, now)
        return change, self._take(packet)

    def _changed(self, packet: Packet) -> PeerChanged:
        known = self.peer and packet.origin and packet.number != STRANGER
        goes_on = bool(known) and packet.origin == self._peer_origin
        change = PeerChanged(packet.source, self.peer, goes_on)
        if self.peer:
            self._former.append(self.peer)
            if goes_on:
                self.again()
            else:
                self._fresh()
        self.peer, self._peer_origin = packet.source, packet.origin
        return change

    def again(self) -> None:
        """Send what is not acknowledged once more, now: the other end, or this one, was away."""
        self._sent_up_to = self._first_unacked - 1
        self._resend_s, self._resend_at = self._resend_first_s, None
        self._ack_due = True

    def _acknowledge(self, received: int, now: float) -> None:
        progressed = False
        while (
            self._unacked
            and self._first_unacked < received
            and self._first_unacked <= self._sent_up_to
        ):
            self._unacked.popleft()
            self._unacked_bytes -= self._sizes.popleft()
            self._first_unacked += 1
            progressed = True
        if progressed:
            self._resend_s = self._resend_first_s
            self._resend_at = (
                now + self._resend_s + self._patience_s()
                if self._sent_up_to >= self._first_unacked
                else None
            )

    def _take(self, packet: Packet) -> list[Message]:
        if not packet.messages:
            return []
        self._ack_due = True
        skip = self._expected - packet.number
        if skip < 0:
            return []
        fresh = packet.messages[skip:]
        self._expected += len(fresh)
        return fresh

    def outgoing(self, now: float) -> list[Packet]:
        """Return the packets to send now: what is new or overdue, else an acknowledgement."""
        if self._resend_at is not None and now >= self._resend_at:
            self._sent_up_to = self._first_unacked - 1
            self._resend_s = min(self._resend_s * 2, 8 * self._resend_first_s)
            self._resend_at = None
        packets = []
        while part := self._next_part():
            packets.append(self._packet(self._sent_up_to + 1, part))
            self._sent_up_to += len(part)
        if packets and self._resend_at is None:
            # What a slow link may take for all of it is no reason to send it again.
            self._resend_at = now + self._resend_s + self._patience_s()
        if not packets and self._ack_due:
            packets.append(self._packet(self._sent_up_to + 1, []))
        self._ack_due = False
        return packets

    def _patience_s(self) -> float:
        """What a slow link may take for more than a handful of bytes, in seconds."""
        return max(0, sum(self._sizes) - PATIENCE_BYTES) / SLOWEST_BYTES_PER_S

    def _next_part(self) -> list[Message]:
        """Return the next unsent messages that fit into one packet."""
        start = self._sent_up_to + 1 - self._first_unacked
        size = 0
        part: list[Message] = []
        for at in range(start, len(self._unacked)):
            size += self._sizes[at]
            if part and (size > PACKET_BYTES_MAX or len(part) == MESSAGES_PER_PACKET_MAX):
                break
            part.append(self._unacked[at])
        return part

    def _packet(self, number: int, messages: list[Message]) -> Packet:
        return Packet(self.instance, self.peer, number, self._expected, messages, self.origin)

    def deadline(self) -> float | None:
        """Return when `outgoing` has to be asked again, if nothing else happens before."""
        return self._resend_at
