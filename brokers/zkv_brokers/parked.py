"""Data that is ahead of the log, on one server: it waits here until the log has caught up."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from zkv_brokers.shard_events import FromWorker

PARKED_BYTES_MAX = 256 * 1024 * 1024
"""How much data that is ahead of the log is kept; beyond it the worker's resend brings it again."""
PARKED_HEADER_BYTES = 1024
"""What a parked header counts, so that headers without a payload are bounded too."""


@dataclass(slots=True)
class Parked:
    """What waits, in the order in which it came."""

    bytes_held: int = 0
    waiting: deque[FromWorker] = field(default_factory=deque)

    def put(self, event: FromWorker) -> None:
        """Keep an event, if there is room."""
        size = PARKED_HEADER_BYTES + (0 if event.payload is None else event.payload.nbytes)
        if self.bytes_held + size <= PARKED_BYTES_MAX:
            self.bytes_held += size
            self.waiting.append(event)
