"""What a worker has on its way to other workers: windows of byte credits, and receipts.

Part of the session. What is lost is sent again; who does not answer for too long is given up.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field

from zkv import data_messages as d
from zkv.dtypes import Array
from zkv.pace import Pace
from zkv.window import Window, ready
from zkv.wire import ContributionId
from zkv_workers.config import SessionConfig
from zkv_workers.signals import DropPeer, SendPeer


@dataclass(slots=True)
class _Peer:
    address: str
    window: Window[SendPeer]
    quiet_since: float | None = None
    """Since when something is on its way and nothing has been heard; None: nothing is."""


@dataclass(slots=True)
class Companions:
    """The other workers that are sent anything, by incarnation."""

    config: SessionConfig
    incarnation: int = 0
    """This worker's own."""
    sent_bytes: int = 0
    """Payloads of sums and of values, each counted once however often it was sent."""
    received_bytes: int = 0
    _pace: Pace | None = None
    _peers: dict[int, _Peer] = field(default_factory=dict)
    _took: dict[int, tuple[list[tuple[ContributionId, int]], list[tuple[int, int]]]] = field(
        default_factory=dict
    )

    def __post_init__(self) -> None:
        self._pace = None if self.config.near else Pace()

    def meet(self, addresses: dict[int, str]) -> list[DropPeer]:
        """Only these are of interest from here on."""
        gone = [who for who in self._peers if who not in addresses]
        for who in gone:
            del self._peers[who]
        for who, address in addresses.items():
            if who not in self._peers:
                window: Window[SendPeer] = Window(
                    self.config.window_bytes, resend_s=self.config.resend_s, pace=self._pace
                )
                self._peers[who] = _Peer(address, window)
        return [DropPeer(who) for who in gone]

    def send(
        self, who: int, name: Hashable, message: d.Data, payload: Array, order: tuple[int, ...]
    ) -> None:
        """Queue a message to a peer, until it says that it has it under this name."""
        peer = self._peers.get(who)
        if peer is not None:
            self.sent_bytes += payload.nbytes
            item = SendPeer(who, peer.address, message, payload)
            peer.window.offer(name, payload.nbytes, item, order)

    def received(self, message: d.Push | d.Pass, payload: Array) -> None:
        """Something has come: its sender will be told."""
        self.received_bytes += payload.nbytes
        if isinstance(message, d.Pass):
            sums, passed = self._took.setdefault(message.incarnation, ([], []))
            passed.append((message.version, message.bid))
        else:
            name = message.contribution
            sums, passed = self._took.setdefault(name.incarnation, ([], []))
            sums.append((name, message.bid))

    def took(self, message: d.Took, now: float) -> None:
        """A peer has these."""
        peer = self._peers.get(message.incarnation)
        if peer is None:
            return
        for name in (*message.sums, *message.passed):
            peer.window.acknowledge(name, now)
        peer.quiet_since = now if peer.window.in_flight else None

    def forget(self, names: Iterable[Hashable]) -> None:
        """Nobody wants these any more."""
        unwanted = set(names)
        for peer in self._peers.values():
            peer.window.forget(unwanted)

    def lost(self, now: float) -> list[int]:
        """Give up who has not answered for too long; return their incarnations."""
        patience_s = self.config.companion_lost_s
        found = [
            who
            for who, peer in self._peers.items()
            if peer.quiet_since is not None and now - peer.quiet_since > patience_s
        ]
        for who in found:
            del self._peers[who]
        return found

    def ready(self, now: float) -> list[SendPeer]:
        """Return what may be sent now, receipts first."""
        took, self._took = self._took, {}
        out = [
            SendPeer(who, self._peers[who].address, d.Took(self.incarnation, *said), None)
            for who, said in took.items()
            if who in self._peers
        ]
        out += ready([peer.window for peer in self._peers.values()], now)
        for peer in self._peers.values():
            if not peer.window.in_flight:
                peer.quiet_since = None
            elif peer.quiet_since is None:
                peer.quiet_since = now
        return out

    def clear(self) -> None:
        """Forget everybody."""
        self._peers.clear()
        self._took.clear()
