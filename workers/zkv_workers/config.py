"""What a session is made with: who this worker is, and how patient."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from zkv.errors import ConfigError
from zkv.heartbeat import BEAT_S
from zkv.wire import IO_THREADS_MAX, SHARED_BYTES, SOCKET_BYTES_MAX

ROUTES = ("direct", "broker")
"""How data travels: from worker to server, or through the broker's data port."""


@dataclass(frozen=True, slots=True)
class SessionConfig:
    """One worker's settings. Times in seconds, sizes in bytes."""

    name: str
    broker: str
    rank: int = -1
    world: int = 0
    observer: bool = False
    host: str = "?"
    pid: int = 0
    connect_timeout_s: float = 60.0
    wait_timeout_s: float = 600.0
    narrate_after_s: float = 2.0
    narrate_every_s: float = 5.0
    broker_lost_s: float = 10.0
    beat_s: float = BEAT_S
    """How often it beats until the broker says how often; a traced one is no slower later."""
    resend_s: float = 2.0
    companion_lost_s: float = 10.0
    """After so much silence of another worker, gradients are not added up through it."""
    report: str = ""
    """The folder that its figures are left in at the end; "": nowhere."""
    trace: str = ""
    """The folder that its spans are left in at the end; "": nowhere."""
    window_bytes: int = 64 * 1024 * 1024
    shared_bytes: int = SHARED_BYTES
    """Memory for payloads to servers of the same machine; 0: they go through sockets too."""
    io_threads: int = 1
    """ZeroMQ's threads that move bytes to and from the kernel."""
    socket_bytes: int = 0
    """Buffers of data connections, each way; 0: as the system likes."""
    keys: str = ""
    """The keys folder; "": the one that ZKV_KEYS names, else the default one if keys are needed."""
    insecure: bool = False
    """Dial a broker on another machine without keys."""
    prefetch: int = 0
    """1: a batch computes on the values that were granted to the one before it."""
    measures: bool = False
    """Measure the way to a server before keys are initialised: it may be a slow link."""
    near: bool = False
    """Servers are on this machine: no link has to be kept free for what is urgent."""
    priority: bool = True
    """Send what the next forward pass needs first before the rest; else as it was pushed."""

    def __post_init__(self) -> None:
        """Check what users give.

        Raises:
            ConfigError: a setting is not of its kind, or out of its bounds.
        """
        if not isinstance(self.name, str):
            raise ConfigError(f"name={self.name!r} is no str")
        for setting, least in (
            ("rank", -1),
            ("world", 0),
            ("window_bytes", 1),
            ("shared_bytes", 0),
        ):
            number = getattr(self, setting)
            if type(number) is not int or number < least:
                raise ConfigError(f"{setting}={number!r} is no int of at least {max(0, least)}")
        for setting, least, most in (
            ("io_threads", 1, IO_THREADS_MAX),
            ("socket_bytes", 0, SOCKET_BYTES_MAX),
        ):
            number = getattr(self, setting)
            if type(number) is not int or not least <= number <= most:
                raise ConfigError(f"{setting}={number!r} is no int from {least} to {most}")
        for setting in _SECONDS:
            seconds = getattr(self, setting)
            if not isinstance(seconds, int | float) or not 0 < seconds < inf:
                raise ConfigError(f"{setting}={seconds!r} is no number of seconds above 0")


_SECONDS = (
    "connect_timeout_s",
    "wait_timeout_s",
    "narrate_after_s",
    "narrate_every_s",
    "broker_lost_s",
)
