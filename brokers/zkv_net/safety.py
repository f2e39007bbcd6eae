"""How one process's sockets are kept safe: by keys (CURVE), or not at all on loopback and where
somebody said `--insecure`.

`choose` decides which. All sockets of a process are alike: a `Safety` does nothing to them, a
`Curve` (`zkv_net.curve`) encrypts and asks for keys.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from time import monotonic
from typing import Any

import zmq

from zkv.control import Keyring
from zkv.errors import ConfigError
from zkv_net.keys import INSECURE, KeyFolder, check_curve, named_folder
from zkv_net.sockets import is_loopback, split_address

log = logging.getLogger("zkv.net")
REMIND_S = 60.0

Vet = Callable[[Sequence[zmq.Frame]], bool]
"""Says of a message, before any byte of it is read, whether its sender may send here."""


class Safety:
    """No keys: everybody who reaches a socket may speak. `open_at`: addresses of which others were
    allowed to do so; that is told every minute."""

    encrypts = False
    key = ""
    """The own public key."""

    def __init__(self, open_at: Iterable[str] = ()) -> None:
        self._open_at = list(open_at)
        self._remind_at = monotonic() + REMIND_S

    def listen(self, socket: zmq.Socket[bytes]) -> None:
        """Set what a socket needs before it is bound."""

    def dial(self, socket: zmq.Socket[bytes], address: str) -> None:
        """Set what a socket needs before it is connected to this address."""

    def vet(self, roles: Iterable[str], where: str) -> Vet | None:
        """Return what looks at each message that comes in over a listening socket; None: nothing.

        `roles` may speak there; `where` says what it is, for the log.
        """
        return None

    def sender(self, frame: zmq.Frame) -> str:
        """Return the key of who has sent a frame to a listening socket; "" without keys."""
        return ""

    broker = ""
    """The broker's public key."""

    def roles(self, key: str) -> frozenset[str]:
        """Return what a key may be; without keys nobody asks."""
        return frozenset()

    def knows(self, incarnation: int) -> bool:
        """Return whether the broker has said whose a worker's incarnation is."""
        return True

    def is_of(self, incarnation: int, key: str) -> bool:
        """Return whether a worker's incarnation belongs to that key."""
        return True

    def learn(self, ring: Keyring) -> None:
        """Take the broker's word on whose keys are whose, and who may speak to this process."""

    def cut(self) -> int:
        """Cut the live links of all keys that are not let in; return how many there were."""
        return 0

    def place(self, address: str, key: str) -> None:
        """Note which key answers at an address."""

    def why_refused(self, address: str, event: int) -> str:
        """Return what is probably wrong when a handshake has failed at an address, and what mends
        it; `event` is the socket monitor's."""
        # Which event it is depends on who hangs up first.
        return (
            f"{address} asks for keys, and this process has none in use (or it is no zkv process): "
            "name the keys folder with --keys or ZKV_KEYS (zkv keys new makes one)"
        )

    def tick(self) -> None:
        """Time has passed: remind of what is open."""
        if self._open_at and monotonic() >= self._remind_at:
            self._remind_at = monotonic() + REMIND_S
            warn_open(self._open_at)

    def close(self) -> None:
        """Stop asking for keys: after the listening sockets, before their context."""


def warn_open(addresses: Iterable[str]) -> None:
    """Say that there is no protection."""
    log.warning(
        "--insecure: whoever reaches %s can read and change everything; traffic is neither "
        "encrypted nor authenticated",
        ", ".join(addresses),
    )


def said_insecure() -> bool:
    """Return whether ZKV_INSECURE allows dialling other machines without keys.

    Raises:
        ConfigError: it is neither "1" nor "0" nor empty.
    """
    text = os.environ.get(INSECURE, "")
    if text not in ("", "0", "1"):
        raise ConfigError(f"environment variable {INSECURE}={text!r} is neither 1 nor 0")
    return text == "1"


def choose(
    context: zmq.Context[Any],
    *,
    binds: Sequence[str] = (),
    dials: Sequence[str] = (),
    insecure: bool = False,
    keys: str = "",
    is_broker: bool = False,
) -> Safety:
    """Return how to keep the sockets of a process safe that binds and dials these addresses.

    Keys are used where a folder of them is named (`keys`, or ZKV_KEYS), or an address is not of
    this machine alone.

    Raises:
        ConfigError: keys are needed and there are none, they are of no use, or this ZeroMQ has no
            CURVE; what to type is named.
    """
    wide = [one for one in (*binds, *dials) if not is_loopback(split_address(one)[0])]
    if insecure:
        return Safety(one for one in binds if one in wide)
    named = Path(keys) if keys else named_folder()
    if not wide and named is None:
        return Safety()
    folder = KeyFolder(named)
    if not folder.exists and wide:
        what = "can be reached from other machines" if wide[0] in binds else "is on another machine"
        role = "broker" if is_broker else "server" if binds else "worker"
        raise ConfigError(
            f"{wide[0]} {what}, and without keys traffic is neither encrypted nor "
            f"authenticated; there are none in {folder.path}: make them with `zkv keys new {role}` "
            f"(docs/security.md), {'bind to 127.0.0.1, ' if binds else ''}or say --insecure "
            f"({INSECURE}=1 for a worker) if everybody in that network is trusted"
        )
    check_curve()
    from zkv_net.curve import Curve

    own = folder.own()
    if is_broker and "broker" not in own.roles:
        raise ConfigError(
            f"the keys in {folder.path} were made for {', '.join(own.roles)}, not for a broker: "
            "zkv keys new broker --keys OTHER_FOLDER"
        )
    return Curve(context, own, own.public if is_broker else folder.broker())
