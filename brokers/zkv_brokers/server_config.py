"""What the server's process is started with."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from zkv.limits import LIMITS, Limits
from zkv.wire import SHARED_BYTES


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """What `zkv server` is started with. Times in seconds, sizes in bytes."""

    broker: str
    bind: str = "tcp://127.0.0.1:0"
    advertise: str | None = None
    name: str = ""
    budget_bytes: int = 0
    """Room for contributions that wait for their update; 0: no limit."""
    window_bytes: int = 64 * 1024 * 1024
    connect_timeout_s: float = 60.0
    narrate_after_s: float = 2.0
    narrate_every_s: float = 5.0
    broker_lost_s: float = 10.0
    insecure: bool = False
    keys: str = ""
    """The keys folder; "": the one that ZKV_KEYS names, else the default one if keys are needed."""
    limits: Limits = LIMITS
    """What its data port bears."""
    joins: bool = False
    """Whether it is one more, where all servers that were asked for are here."""
    io_threads: int = 1
    socket_bytes: int = 0
    """Buffers of its data connections, each way; 0: as the system likes."""
    shared_bytes: int = SHARED_BYTES
    """Memory for payloads to workers of the same machine; 0: they go through sockets too."""
    record: Path | None = None
    """Where to write down all that is heard, for a replay."""
    trace: str = ""
    """The folder that its spans are left in at the end; "": nowhere."""
