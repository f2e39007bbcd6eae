"""What is said of blocks that move to other servers, and of servers that come and go.

Part of the control messages (`zkv.control` has the others, and the packets that carry them all).
Each struct says in one sentence who sends it; nothing here decides anything.
"""

from __future__ import annotations

from zkv.entries import Entry
from zkv.greetings import ServerAt
from zkv.wire import Frozen, Int, Key, Name, Text, UInt


class Follow(Frozen, frozen=True, tag=79):
    """Broker to worker: in placement `placement` gradients of these blocks go to these servers, of
    which the first sends their values; answer with `Followed`."""

    placement: UInt
    blocks: list[tuple[UInt, list[UInt]]]
    index: UInt
    """Log index at which these servers know of it: data that is ahead of the log waits there."""


class Followed(Frozen, frozen=True, tag=53):
    """Worker to broker: what I begin from here on goes by this placement; of what I began under an
    older one, these (group, grant) are not settled."""

    placement: UInt
    open: list[tuple[Int, UInt]]


class Servers(Frozen, frozen=True, tag=38):
    """Broker to worker: these are the servers from here on."""

    servers: list[ServerAt]


class Catchup(Frozen, frozen=True, tag=21):
    """Broker to a server that joins late: what entries below `index` have led to, in several
    messages if need be; with the `last` one it is at that index."""

    term: UInt
    index: UInt
    entries: list[Entry]
    versions: list[tuple[UInt, UInt]]
    """(group, version) of all groups."""
    last: bool


class Copied(Frozen, frozen=True, tag=65):
    """Server to broker: in this placement I hold live copies of these blocks; or, with `why`, I
    gave the copies of them up."""

    placement: UInt
    bids: list[UInt]
    why: Text = ""


class Traffic(Frozen, frozen=True, tag=66):
    """Server to broker: payload bytes, in and out, of these blocks since the start."""

    blocks: list[tuple[UInt, UInt]]


class Rearrange(Frozen, frozen=True, tag=54):
    """Anybody to broker: move blocks ("rebalance", "drain" a server, or "move" keys to one); the
    reply is the plan, which is carried out unless it is `dry`."""

    token: UInt
    action: Name
    server: Name = ""
    """Its number or name."""
    keys: tuple[Key, ...] = ()
    """Of "move": those that match one of these patterns."""
    dry: bool = False
