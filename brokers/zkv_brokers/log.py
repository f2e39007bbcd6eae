"""The control log in the broker's memory: what is not with every server yet, or all of it.

Entries are numbered from 0. Once all servers were sent an entry, their links hold it until it has
arrived, so the log itself may forget it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence

from zkv import control as c
from zkv.wire import encode


class Log:
    """Entries by index. With `keep`, nothing is forgotten (for replays and tests)."""

    def __init__(self, *, keep: bool = False) -> None:
        self._keep = keep
        self._first = 0
        self._entries: list[c.Entry] = []
        self._digest = b""
        self._latest: dict[type, c.Entry] = {}

    def __len__(self) -> int:
        """How many entries were ever written: the next one has this index."""
        return self._first + len(self._entries)

    def __iter__(self) -> Iterator[c.Entry]:
        """Iterate over the entries that are still here, oldest first."""
        return iter(self._entries)

    def extend(self, entries: Sequence[c.Entry]) -> None:
        """Write entries."""
        self._entries += entries
        for entry in entries:
            self._latest[type(entry)] = entry
            self._digest = hashlib.sha256(self._digest + encode(entry)).digest()

    @property
    def digest(self) -> str:
        """A digest of all entries that were ever written."""
        return self._digest.hex()

    def latest(self, fresh: Sequence[c.Entry], kinds: Sequence[type[c.Entry]]) -> list[c.Entry]:
        """Return the last entry of each of these kinds; `fresh` are about to be written."""
        found = []
        for kind in kinds:
            last = next((one for one in reversed(fresh) if isinstance(one, kind)), None)
            last = last or self._latest.get(kind)
            if last is not None:
                found.append(last)
        return found

    def since(self, index: int) -> list[c.Entry]:
        """Return the entries from this index on; they must not be forgotten yet."""
        assert index >= self._first, f"log entries {index} … {self._first} are forgotten"
        return self._entries[index - self._first :]

    def forget(self, before: int) -> None:
        """Forget entries below this index: every server was sent them."""
        if not self._keep and before > self._first:
            del self._entries[: before - self._first]
            self._first = before
