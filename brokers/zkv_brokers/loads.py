"""Measured load: payload bytes, in and out, of each block at each server, over the last minute.

Servers tell sums since their start; what is measured is the difference to a mark of up to a minute
ago, and none from before the last move: then the blocks were elsewhere. Pure: the time comes in.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping

MARK_S = 10.0
MARKS = 6

Totals = dict[tuple[int, int], int]
"""Bytes by (server, block)."""


class Loads:
    """All servers' figures."""

    def __init__(self) -> None:
        self._totals: Totals = {}
        self._marks: deque[tuple[float, Totals]] = deque(maxlen=MARKS)

    def told(self, server: int, blocks: Iterable[tuple[int, int]], now: float) -> None:
        """A server tells bytes of blocks since its start."""
        if not self._marks or now - self._marks[-1][0] >= MARK_S:
            self._marks.append((now, dict(self._totals)))
        for bid, nbytes in blocks:
            self._totals[server, bid] = nbytes

    def anew(self, now: float) -> None:
        """From here on blocks are elsewhere."""
        self._marks.clear()
        self._marks.append((now, dict(self._totals)))

    def _measured(self) -> Totals:
        before = self._marks[0][1] if self._marks else {}
        return {name: total - before.get(name, 0) for name, total in self._totals.items()}

    def seconds(self, now: float) -> float:
        """Return over how long is measured."""
        return now - self._marks[0][0] if self._marks else 0.0

    def by_block(self) -> dict[int, float]:
        """Return measured bytes of each block, wherever it was."""
        found: dict[int, float] = {}
        for (_, bid), nbytes in self._measured().items():
            found[bid] = found.get(bid, 0.0) + nbytes
        return found

    def by_server(self, servers: Iterable[int]) -> dict[int, float]:
        """Return measured bytes of each of these servers."""
        found = dict.fromkeys(servers, 0.0)
        for (server, _), nbytes in self._measured().items():
            if server in found:
                found[server] += nbytes
        return found


def rates(measured: Mapping[int, float], seconds: float) -> dict[int, float]:
    """Return bytes per second."""
    return {one: nbytes / seconds if seconds else 0.0 for one, nbytes in measured.items()}
