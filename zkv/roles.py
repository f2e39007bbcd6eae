"""Who may say what: the roles of keys, and what messages each role may send to a broker.

A key is the public part of a CURVE pair, as 64 hexadecimal digits. The broker knows which keys have
which roles; its own key has all of them, as whoever holds that decides about the others anyway.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from zkv import control as c
from zkv.errors import NotAuthorised

ROLES = ("worker", "server", "follower", "admin")
"""What a key may be: a worker trains, a server holds a shard, a follower only reads, and an admin
changes settings and moves blocks (and reads)."""
KEYS_MAX = 4096
"""Keys that one broker lets in at most."""
KEY_BYTES = 32
KEY_DIGITS = 2 * KEY_BYTES
NAME_MAX = 64

_SAFE = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.-")
_ALWAYS = c.Status | c.Beat | c.Bye | c.WentBack
_READS = c.Pull | c.Received | c.Leave | c.Followed | c.Accounts | c.Listens
"""What a member says that only reads."""


def check_key(text: str) -> str:
    """Return a public key in its plain form.

    Raises:
        ValueError: it is none.
    """
    plain = text.strip().lower()
    if len(plain) != KEY_DIGITS or set(plain) - set("0123456789abcdef"):
        raise ValueError(
            f"{text[:80]!r} is no public key: one has {KEY_DIGITS} hexadecimal digits, as "
            "`zkv keys new` and `zkv keys list` print it"
        )
    return plain


def check_roles(text: str) -> frozenset[str]:
    """Return the roles that a text such as "worker" or "server,worker" names.

    Raises:
        ValueError: a role that there is not, or none at all.
    """
    names = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in names if name not in ROLES]
    if unknown or not names:
        given = unknown[0] if unknown else text
        raise ValueError(f"{given[:80]!r} is no role; there are {', '.join(ROLES)}")
    return frozenset(names)


def check_name(text: object) -> str:
    """Return the name of a key.

    Raises:
        ValueError: it is empty, too long, or has other signs than letters, digits, `_`, `.`, `-`.
    """
    # A file may have anything in a name's place.
    if not isinstance(text, str) or not 0 < len(text) <= NAME_MAX or set(text) - _SAFE:
        given = str(text)[:80]
        raise ValueError(
            f"{given!r} cannot be the name of a key: 1 to {NAME_MAX} letters, digits, _ . -"
        )
    return text


@dataclass(frozen=True, slots=True)
class Holder:
    """Who holds a key: what it is called, and what it may be."""

    key: str
    name: str
    roles: frozenset[str]

    def __str__(self) -> str:
        return f"key {self.name!r} ({', '.join(sorted(self.roles))}; {self.key[:8]}…)"


def mask(roles: Iterable[str]) -> int:
    """Return roles as bits, for messages."""
    return sum(1 << ROLES.index(role) for role in roles)


def unmask(bits: int) -> frozenset[str]:
    """Return the roles of these bits; bits of no role are passed over."""
    return frozenset(role for at, role in enumerate(ROLES) if bits >> at & 1)


def check_message(holder: Holder, message: c.Message, *, member: bool) -> None:
    """Check that the holder of a key may say this to the broker; `member`: it is a worker already.

    Raises:
        NotAuthorised: it may not; the key, its roles and what to do are named.
    """
    roles = holder.roles
    match message:
        case c.ServerHello():
            _need(holder, roles & {"server"}, "be a server", "server")
        case c.WorkerHello(observer=True):
            _need(holder, roles - {"server"}, "read the model", "follower")
        case c.WorkerHello():
            _need(holder, roles & {"worker"}, "be a worker", "worker")
        case c.TakeSnapshot():
            _need(holder, roles & {"admin"}, "take a snapshot", "admin")
        case c.GoBack():
            _need(holder, roles & {"admin"}, "roll the run back", "admin")
        case c.Rearrange():
            _need(holder, roles & {"admin"}, "move blocks", "admin")
        case c.Change():
            allowed = roles & ({"admin", "worker"} if member else {"admin"})
            _need(holder, allowed, f"change {message.setting!r}", "admin")
        case _ if isinstance(message, _ALWAYS) or (member and isinstance(message, _READS)):
            return
        case _ if member:
            what = f"send a {type(message).__name__}, which is a worker's"
            _need(holder, roles & {"worker"}, what, "worker")


def _need(holder: Holder, may: frozenset[str], what: str, role: str) -> None:
    if not may:
        wanted = ",".join(sorted({*holder.roles, role}))
        raise NotAuthorised(
            f"{holder} may not {what}; on the broker's machine: "
            f"zkv keys add {wanted} {holder.name} {holder.key}"
        )
