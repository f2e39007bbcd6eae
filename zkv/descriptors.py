"""How many file descriptors a process of a cluster needs, and when it is short of them.

Each connection is one, and ZeroMQ takes a few of its own. A process without a free one does not
fail: connections to it are accepted by the kernel and never answered. So a process says before what
it needs, and long before the last one that they run out. Pure: figures and the time come in.
"""

from __future__ import annotations

OWN = 64
"""What a process has open without any peer: ZeroMQ's, the event loop's, files and libraries."""
EACH = 2
"""For a member: its connection, and the one that it makes while its old one is not closed yet."""
ALARM = 0.8
AGAIN_S = 60.0


def need(members: int) -> int:
    """Return how many descriptors a process needs that so many members may connect to."""
    return EACH * members + OWN


def fit(limit: int) -> int:
    """Return how many members may connect to a process with that limit."""
    return max(0, (limit - OWN) // EACH)


def too_few(limit: int, members: int) -> str:
    """Return what is wrong with a limit (after it was raised as far as it goes); "": nothing."""
    if limit >= need(members):
        return ""
    return (
        f"at most {limit} files and connections may be open here, but {members} members need "
        f"{need(members)} ({EACH} each and {OWN} of its own): raise the limit with "
        f"ulimit -Hn {need(members)}, LimitNOFILE={need(members)} (systemd) or "
        f"--ulimit nofile={need(members)} (docker)"
    )


class Alarm:
    """Says when descriptors run out: at 80 % of the limit, and once a minute while that lasts."""

    def __init__(self) -> None:
        self._next: float | None = None

    def look(self, opened: int, limit: int, now: float) -> str:
        """Return what to say at this time (seconds); "": nothing."""
        if opened < ALARM * limit:
            self._next = None
            return ""
        if self._next is not None and now < self._next:
            return ""
        self._next = now + AGAIN_S
        return (
            f"{opened} of at most {limit} files and connections are open: without a free one, "
            f"connections are accepted and never answered; let workers leave, or start again with "
            f"a higher limit (ulimit -Hn)"
        )
