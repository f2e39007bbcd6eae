"""The hub: the broker's links to everybody, by the instance number of the peer's process.

It turns frames into messages and messages into frames, and knows over which route a peer was last
heard. It must not know what messages mean, nor sockets or clocks.
"""

from __future__ import annotations

from dataclasses import dataclass

from zkv import control as c
from zkv.errors import ProtocolError, VersionMismatch
from zkv.limits import MEMBERS_MAX
from zkv.link import Link
from zkv.wire import open_envelope


@dataclass(frozen=True, slots=True)
class Send:
    """Send this control frame over this route."""

    route: bytes
    frame: bytes


@dataclass(frozen=True, slots=True)
class Strike:
    """What came over this route was no message."""

    route: bytes
    text: str


@dataclass(frozen=True, slots=True)
class Note:
    """Tell the operator; `level` is a logging level's name."""

    level: str
    text: str


class Hub:
    """All links of one broker. `instance` is a number that no other process has."""

    def __init__(self, instance: int, *, resend_s: float, members: int = MEMBERS_MAX) -> None:
        self.now = 0.0
        # Those who ask something and go are remembered for a while, too.
        self._peers_max = 2 * members + 1024
        self._instance = instance
        self._resend_s = resend_s
        self._links: dict[int, Link] = {}
        self._routes: dict[int, bytes] = {}
        self._keys: dict[int, str] = {}
        self._busy: set[int] = set()
        self._closing: set[int] = set()
        self._out: list[Send | Note | Strike] = []

    def peers(self) -> list[int]:
        """Return everybody who was heard and not forgotten."""
        return list(self._links)

    def receive(self, route: bytes, frame: bytes, key: str = "") -> tuple[int, list[c.Message]]:
        """Take a frame in; return the peer (0: nobody) and its new messages, in order. `key` is
        that of the connection it came over: a peer keeps the one that it has come with."""
        try:
            packet = c.decode_messages(open_envelope(frame), by_broker=True)
        except VersionMismatch as error:
            self.note("warning", f"refused a peer: {error}")
            refusal = c.Refusal(0, "VersionMismatch", str(error))
            packet = c.Packet(self._instance, 0, 1, 1, [refusal])
            self._out.append(Send(route, c.encode_packet(packet)))
            return 0, []
        except ProtocolError as error:
            self._out.append(Strike(route, f"a control frame of {len(frame)} bytes: {error}"))
            return 0, []
        link = self._links.get(packet.source)
        if link is None:
            if packet.source == 0 or packet.target not in (0, self._instance):
                # A peer of an earlier broker: the bare answer tells it that this one is new.
                stranger = Link(self._instance, peer=packet.source)
                stranger.receive(packet, self.now)
                self._out += [Send(route, c.encode_packet(p)) for p in stranger.outgoing(self.now)]
                return 0, []
            if len(self._links) >= self._peers_max:
                self.note("warning", f"{len(self._links)} peers are known, the most there can be")
                return 0, []
            link = self._links[packet.source] = Link(
                self._instance, peer=packet.source, resend_s=self._resend_s
            )
        if self._keys.setdefault(packet.source, key) != key:
            self.note("warning", f"dropped a packet of another peer's, sent by key {key[:8]}…")
            return 0, []
        self._routes[packet.source] = route
        self._busy.add(packet.source)
        _, messages = link.receive(packet, self.now)
        return packet.source, messages

    def key_of(self, peer: int) -> str:
        """Return the key that a peer has come with; "" where there are no keys."""
        return self._keys.get(peer, "")

    def send(self, peer: int, message: c.Message) -> None:
        """Queue a message for a peer, if it is still known."""
        link = self._links.get(peer)
        if link is not None:
            link.send(message)
            self._busy.add(peer)

    def echo(self, peer: int, beat: c.Beat) -> None:
        """Answer a beat that asks for it."""
        if beat.ask:
            self.send(peer, c.Beat(self.now, echo=beat.at))

    def note(self, level: str, text: str) -> None:
        """Tell the operator."""
        self._out.append(Note(level, text))

    def silent_s(self, peer: int) -> float:
        """Return for how long nothing was heard of a peer."""
        link = self._links.get(peer)
        return self.now - link.heard if link is not None and link.heard is not None else 0.0

    def close(self, peer: int) -> None:
        """Forget a peer once it has everything that was sent to it."""
        if peer in self._links:
            self._closing.add(peer)
            self._busy.add(peer)

    def is_closing(self, peer: int) -> bool:
        """Return whether a peer was let go."""
        return peer in self._closing

    def forget(self, peer: int) -> None:
        """Forget a peer now."""
        self._links.pop(peer, None)
        self._routes.pop(peer, None)
        self._keys.pop(peer, None)
        self._closing.discard(peer)
        self._busy.discard(peer)

    def outgoing(self) -> list[Send | Note | Strike]:
        """Return what to send and to say now."""
        out, self._out = self._out, []
        for peer in list(self._busy):
            link = self._links[peer]
            packets = link.outgoing(self.now)
            out += [Send(self._routes[peer], c.encode_packet(packet)) for packet in packets]
            if link.idle:
                self._busy.discard(peer)
                if peer in self._closing:
                    self.forget(peer)
        return out
