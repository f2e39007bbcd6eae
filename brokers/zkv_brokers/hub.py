"""The hub: the broker's links to everybody, by the instance number of the peer's process.

It turns frames into messages and messages into frames, and knows over which route a peer was last
heard. It must not know what messages mean, nor sockets or clocks. A hub that is recovered from a
journal (`restart`) goes on with all links; each is taken up when its peer is heard again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf

from msgspec import structs

from zkv import control as c
from zkv.errors import ProtocolError, VersionMismatch
from zkv.heartbeat import Rhythm
from zkv.limits import MEMBERS_MAX
from zkv.link import STRANGER, Link
from zkv.wire import open_envelope


@dataclass(frozen=True, slots=True)
class Send:
    """Send this control frame over this route; `bare`: it is a receipt, which may wait a little."""

    route: bytes
    frame: bytes
    bare: bool = False


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


def _everybody(peer: int, *, workers: bool = False) -> bool:
    return True


class Hub:
    """All links of one broker. `instance` is a number that no other process has; `lasts`: its links
    outlive this process."""

    def __init__(
        self, instance: int, *, resend_s: float, members: int = MEMBERS_MAX, lasts: bool = False
    ) -> None:
        self.now = 0.0
        self.allow(members)
        self.superseded = False
        """Whether a later broker has taken these links over: this one is of the past."""
        self.believes: Callable[..., bool] = _everybody
        """Whether what a peer says of brokers counts (`Gatekeeper.believes`)."""
        self.forgetful = False
        """Whether somebody has heard more, before a restart, than this hub knows of."""
        self.instance = instance
        self._origin = instance.to_bytes(8, "big") if lasts else b""
        self._lives = {instance}
        """The instance numbers that this broker has had."""
        self._away: dict[int, int] = {}
        """Peers that were not heard since the last restart, and the number of the first message
        that they cannot have heard before."""
        self._returned: set[int] = set()
        """Peers that were heard for the first time since then, and were not answered yet."""
        self._rhythms: dict[int, Rhythm] = {}
        self._resend_s = resend_s
        self._links: dict[int, Link] = {}
        self._routes: dict[int, bytes] = {}
        self._keys: dict[int, str] = {}
        self._busy: set[int] = set()
        self._closing: set[int] = set()
        self._out: list[Send | Note | Strike] = []

    @property
    def lives(self) -> int:
        """In how many processes this hub has been, one after the other."""
        return len(self._lives)

    def allow(self, members: int) -> None:
        """Set how many members there may be."""
        # Those who ask something and go are remembered for a while, too.
        self._peers_max = 2 * members + 1024

    def restart(self, instance: int) -> None:
        """Go on in another process. All that was sent and is not acknowledged is sent again."""
        self.instance = instance
        self._lives.add(instance)
        for peer, link in self._links.items():
            link.instance = instance
            self._away[peer] = link.next_number

    def is_away(self, peer: int) -> bool:
        """Return whether a peer was not heard since the last restart."""
        return peer in self._away

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
            packet = c.Packet(self.instance, 0, 1, 1, [refusal], self._origin)
            self._out.append(Send(route, c.encode_packet(packet)))
            return 0, []
        except ProtocolError as error:
            self._out.append(Strike(route, f"a control frame of {len(frame)} bytes: {error}"))
            return 0, []
        link = self._links.get(packet.source)
        if link is None:
            if packet.source == 0 or packet.target not in (0, self.instance):
                self._turn_away(route, packet)
                return 0, []
            if len(self._links) >= self._peers_max:
                self.note("warning", f"{len(self._links)} peers are known, the most there can be")
                return 0, []
            link = self._links[packet.source] = Link(
                self.instance, peer=packet.source, resend_s=self._resend_s, origin=self._origin
            )
        if self._keys.setdefault(packet.source, key) != key:
            self.note("warning", f"dropped a packet of another peer's, sent by key {key[:8]}…")
            return 0, []
        if packet.target in self._lives:
            packet = structs.replace(packet, target=self.instance)
        elif packet.target > self.instance and self.believes(packet.source):
            self.superseded = True
        self._routes[packet.source] = route
        self._busy.add(packet.source)
        _, messages = link.receive(packet, self.now)
        if packet.source in self._away:
            unheard = self._away.pop(packet.source)
            self._returned.add(packet.source)
            if packet.received > unheard and self.believes(packet.source, workers=True):
                self.forgetful = True
            link.again()
        return packet.source, messages

    def key_of(self, peer: int) -> str:
        """Return the key that a peer has come with; "" where there are no keys."""
        return self._keys.get(peer, "")

    def _turn_away(self, route: bytes, packet: c.Packet) -> None:
        """Answer a peer of another broker, or one that this broker has let go before it was
        restarted: the bare answer tells it that this one is new."""
        answer = c.Packet(self.instance, packet.source, STRANGER, 1, [], self._origin)
        self._out.append(Send(route, c.encode_packet(answer)))

    def send(self, peer: int, message: c.Message) -> None:
        """Queue a message for a peer, if it is still known."""
        link = self._links.get(peer)
        if link is not None and not link.full:
            link.send(message)
            self._busy.add(peer)

    def ask(self, peer: int) -> int:
        """Send a peer something that only a live process can acknowledge, and return its number."""
        self.send(peer, c.Beat(self.now))
        link = self._links.get(peer)
        return 0 if link is None else link.next_number - 1

    def has_acknowledged(self, peer: int, number: int) -> bool:
        """Return whether a peer that is still known has heard all up to this number."""
        link = self._links.get(peer)
        return link is not None and link.has_acknowledged(number)

    def echo(self, peer: int, beat: c.Beat) -> None:
        """Note a beat, and answer it if it asks for that."""
        self._rhythms.setdefault(peer, Rhythm()).beaten(self.now)
        if beat.ask:
            self.send(peer, c.Beat(self.now, echo=beat.at))

    def note(self, level: str, text: str) -> None:
        """Tell the operator."""
        self._out.append(Note(level, text))

    def silent_s(self, peer: int) -> float:
        """Return for how long nothing was heard of a peer."""
        link = self._links.get(peer)
        if link is not None and link.full:
            # It speaks, but does not listen: what is kept for it must not grow without end.
            return inf
        return self.now - link.heard if link is not None and link.heard is not None else 0.0

    def overdue_s(self, peer: int, floor_s: float) -> float:
        """Return for how long nothing was heard of a peer, if it is lost: for more than `floor_s`,
        and longer than is usual if its beats come irregularly. 0.0: it is not."""
        rhythm, silent = self._rhythms.get(peer), self.silent_s(peer)
        if silent <= floor_s or (rhythm is not None and silent <= rhythm.patience_s(floor_s)):
            return 0.0
        return silent

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
        self._rhythms.pop(peer, None)
        self._closing.discard(peer)
        self._busy.discard(peer)
        self._away.pop(peer, None)
        self._returned.discard(peer)

    def outgoing(self) -> list[Send | Note | Strike]:
        """Return what to send and to say now."""
        out, self._out = self._out, []
        for peer in list(self._busy - self._away.keys() if self._away else self._busy):
            link = self._links[peer]
            packets = link.outgoing(self.now)
            # To who has just come back a bare receipt is news.
            waits = peer not in self._returned
            self._returned.discard(peer)
            route = self._routes[peer]
            out += [
                Send(route, c.encode_packet(packet), waits and not packet.messages)
                for packet in packets
            ]
            if link.idle:
                self._busy.discard(peer)
                if peer in self._closing:
                    self.forget(peer)
        return out
