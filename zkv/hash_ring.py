"""A ring of hashed points on which keys find their servers (consistent hashing).

The hash is BLAKE2b of canonical bytes, so the ring is the same on every machine and in every
process; Python's own `hash` differs between processes. Pure.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from hashlib import blake2b


def _position(kind: bytes, name: bytes) -> int:
    return int.from_bytes(blake2b(name, digest_size=8, person=kind).digest(), "big")


def _utf8(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def name_of(key: str | int, start: int = 0) -> bytes:
    """Return the canonical bytes of a key's slice that begins at element `start`.

    The text key "7" and the integer key 7 are two keys, and have two names.
    """
    named = b"int " + str(key).encode() if isinstance(key, int) else b"str " + _utf8(key)
    return start.to_bytes(8, "big") + named


class Ring:
    """Servers (by number), each with `virtual` points of its own.

    A server's points depend on its number alone: whoever comes or goes, those of the others stay.
    """

    def __init__(self, servers: Iterable[int], virtual: int) -> None:
        points = sorted(
            (_position(b"server", f"{server} {at}".encode()), server)
            for server in set(servers)
            for at in range(virtual)
        )
        self._positions = [position for position, _ in points]
        self._servers = [server for _, server in points]

    def owner(self, name: bytes) -> int:
        """Return the server of a name: that of the next point clockwise."""
        return self._servers[bisect_right(self._positions, _position(b"key", name)) % len(self)]

    def walk(self, name: bytes) -> Iterator[int]:
        """Yield all servers in the order of their first points clockwise: the owner first."""
        begin = bisect_right(self._positions, _position(b"key", name))
        seen: set[int] = set()
        for at in range(len(self)):
            server = self._servers[(begin + at) % len(self)]
            if server not in seen:
                seen.add(server)
                yield server

    def __len__(self) -> int:
        return len(self._servers)
