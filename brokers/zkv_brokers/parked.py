"""Data that is ahead of the log, kept until the log has caught up (rule 12)."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from zkv_brokers.shard_events import FromWorker

PARKED_BYTES_MAX = 256 * 1024 * 1024
"""How much is kept; beyond it the sender's repetition brings it again."""
PARKED_HEADER_BYTES = 1024
"""What a header counts, so that headers without a payload are bounded too."""


@dataclass(slots=True)
class Parked:
    """Messages that wait, in the order in which they came."""

    bytes_held: int = 0
    waiting: deque[FromWorker] = field(default_factory=deque)

    def add(self, event: FromWorker) -> None:
        """Keep a message, if there is room."""
        size = PARKED_HEADER_BYTES + (0 if event.payload is None else event.payload.nbytes)
        if self.bytes_held + size <= PARKED_BYTES_MAX:
            self.bytes_held += size
            self.waiting.append(event)
