"""What a worker has sent to each server, and for how long something was on its way there.

Pure: the time comes in. The busiest server, or the slowest link, shows here.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Flight:
    """One server's: bytes that it has acknowledged, and seconds in which some were not."""

    nbytes: int = 0
    busy_s: float = 0.0
    since: float | None = None


@dataclass(slots=True)
class Flights:
    """All of one worker's, by server."""

    by_server: dict[int, Flight] = field(default_factory=dict)

    def note(self, server: int, in_flight: int, arrived: int, now: float) -> None:
        """At `now` so many bytes are on their way to a server, and `arrived` more are there."""
        one = self.by_server.setdefault(server, Flight())
        one.nbytes += arrived
        if one.since is not None:
            # What is still on its way is busy up to its last acknowledgement only.
            if arrived or not in_flight:
                one.busy_s += now - one.since
                one.since = now if in_flight else None
        elif in_flight:
            one.since = now

    def stop(self, server: int) -> None:
        """Nothing is on its way there any more, as nobody needs it."""
        if server in self.by_server:
            self.by_server[server].since = None

    def plain(self) -> dict[str, dict[str, float]]:
        """Return plain data for JSON: bytes and seconds, by server."""
        return {
            str(server): {"bytes": one.nbytes, "busy_s": round(one.busy_s, 6)}
            for server, one in sorted(self.by_server.items())
        }
