"""Keys on every socket of one process: CURVE, who is let in, and links that are cut.

The broker reads who is let in from its keys folder; servers and workers hear it from the broker,
whose key they know. A key that is let in no more is refused at the gate, what its live links still
bring is dropped unread, and the links are cut.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import zmq

from zkv.control import Keyring
from zkv.roles import ROLES, unmask
from zkv_net.gate import DOMAIN, Gate
from zkv_net.keys import Own, printable
from zkv_net.links import cut, far_end
from zkv_net.safety import Safety, Vet
from zkv_net.sparing import Sparing

log = logging.getLogger("zkv.net")
LINKS_MAX = 16_384
ALL = frozenset({*ROLES, "broker"})


@dataclass(frozen=True, slots=True)
class _Live:
    """A connection that a message came over: whose, its descriptor, and the far end of that."""

    key: str
    fd: int
    far: Any


class Curve(Safety):
    """CURVE for the sockets of a context. `broker` is the public key that all trust is from."""

    encrypts = True

    def __init__(self, context: zmq.Context[Any], own: Own, broker: str) -> None:
        super().__init__()
        self.own = own
        self.key, self.broker = own.public, broker
        self._context = context
        self._gate: Gate | None = None
        self._roles: Mapping[str, frozenset[str]] = {broker: ALL}
        """What keys may be, replaced as a whole: the gate's thread reads it."""
        self._places: dict[str, str] = {}
        self._members: dict[int, str] = {}
        self._live: dict[tuple[str, bytes], _Live] = {}
        self._refused, self._dropped = Sparing(), Sparing()

    def listen(self, socket: zmq.Socket[bytes]) -> None:
        """Ask who connects for a key, from the bind on."""
        if self._gate is None:
            self._gate = Gate(self._context, self._admits)
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, printable(self.own.secret))
        socket.setsockopt(zmq.ZAP_DOMAIN, DOMAIN)
        # Else whoever connects while the gate does not answer would be let in.
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)

    def dial(self, socket: zmq.Socket[bytes], address: str) -> None:
        """Expect the key that answers at this address, and show the own one."""
        socket.setsockopt(zmq.CURVE_SERVERKEY, printable(self._places.get(address, self.broker)))
        socket.setsockopt(zmq.CURVE_PUBLICKEY, printable(self.own.public))
        socket.setsockopt(zmq.CURVE_SECRETKEY, printable(self.own.secret))

    def place(self, address: str, key: str) -> None:
        """Note which key answers at an address."""
        self._places[address] = key

    # --- who may ---------------------------------------------------------------------------

    def let_in(self, roles: Mapping[str, frozenset[str]]) -> None:
        """From here on only these keys are let in, and the broker's."""
        self._roles = {**roles, self.broker: ALL}

    def learn(self, ring: Keyring) -> None:
        """Take the broker's word on whose keys are whose, and who is let in."""
        self._members.update(ring.members)
        self._places.update(ring.places)
        if ring.holders is not None:
            self.let_in({key: unmask(bits) for key, bits in ring.holders})
            self.cut()

    def roles(self, key: str) -> frozenset[str]:
        """Return what a key may be; nothing if it is not let in."""
        return self._roles.get(key, frozenset())

    def knows(self, incarnation: int) -> bool:
        """Return whether the broker has said whose an incarnation is."""
        return incarnation in self._members

    def is_of(self, incarnation: int, key: str) -> bool:
        """Return whether an incarnation belongs to a key."""
        return self._members.get(incarnation) == key

    def _admits(self, key: str, address: str) -> str:
        if key in self._roles:
            return ""
        if self._refused.may(address):
            who = "the broker does not know it, or it was revoked"
            if self.key == self.broker:
                who = f"to let it in: zkv keys add ROLE NAME {key}"
            log.warning(
                "refused a connection from %s with the key %s: %s%s",
                *(address, key, who, self._refused.more()),
            )
        return "this key is not let in here"

    def vet(self, roles: Iterable[str], where: str) -> Vet | None:
        """Return what drops all that does not come with a key of these roles."""
        wanted = frozenset({*roles, "broker"})

        def vets(frames: Sequence[zmq.Frame]) -> bool:
            key = self.sender(frames[-1])
            route = (where, frames[0].bytes)
            if route not in self._live:
                self._note(route, key, frames[-1])
            may = self._roles.get(key)
            if may is not None and may & wanted:
                return True
            if self._dropped.may(key):
                why = "is not let in any more" if may is None else f"is for {', '.join(may)}"
                log.warning(
                    "dropped what came to %s: the key %s… %s%s",
                    *(where, key[:8], why, self._dropped.more()),
                )
            return False

        return vets

    def sender(self, frame: zmq.Frame) -> str:
        """Return the key that a frame has come with."""
        try:
            return str(frame.get("User-Id"))
        except zmq.ZMQError:
            return ""

    # --- live links ------------------------------------------------------------------------

    def _note(self, route: tuple[str, bytes], key: str, frame: zmq.Frame) -> None:
        if len(self._live) >= LINKS_MAX:
            # Those that were noted first are most likely gone.
            del self._live[next(iter(self._live))]
        fd = int(frame.get(zmq.SRCFD))
        self._live[route] = _Live(key, fd, far_end(fd))

    def cut(self) -> int:
        """Cut the live links of all keys that are not let in; return how many there were."""
        gone = [route for route, one in self._live.items() if one.key not in self._roles]
        links = [self._live.pop(route) for route in gone]
        return sum(cut(one.fd, one.far) for one in links)

    # --- words -----------------------------------------------------------------------------

    def why_refused(self, address: str, event: int) -> str:
        """Return what is probably wrong, and the command that mends it."""
        if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            return (
                f"{address} does not let this process's key in (not added yet, or revoked); on the "
                f"broker's machine: {self.own.add_command}"
            )
        if event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
            return (
                f"{address} answers without encryption: it was started with --insecure, or is no "
                "zkv process; start it with keys, or this one with --insecure (a worker: "
                "ZKV_INSECURE=1)"
            )
        expected = self._places.get(address, self.broker)
        return (
            f"{address} has another key than {expected[:8]}…, or answers without encryption (was "
            "it started with --insecure?); if that is the broker, compare with `zkv keys list` on "
            f"its machine, then here: zkv keys new {','.join(self.own.roles)} --broker-key KEY "
            "(the own key stays)"
        )

    def close(self) -> None:
        """End the gate."""
        if self._gate is not None:
            self._gate.close()
