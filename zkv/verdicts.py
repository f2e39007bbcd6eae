"""What the broker tells workers: where keys are, when they may compute, what became of it.

Part of the control messages (`zkv.control`). Each struct says in one sentence who sends it.
"""

from __future__ import annotations

from typing import Any

from zkv.wire import BlockSpec, Frozen, Int, KeyEntry, Name, TableEntry, Text, UInt


class Layout(Frozen, frozen=True, tag=70):
    """Broker to worker: keys and where their blocks are; `seed` asks this worker for the values."""

    init: UInt
    keys: list[KeyEntry]
    blocks: list[BlockSpec]
    seed: bool
    index: UInt
    """Log index at which servers know these keys: data that is ahead of the log waits there."""
    tables: tuple[TableEntry, ...] = ()


class Ready(Frozen, frozen=True, tag=71):
    """Broker to worker: every server holds the values of this initialisation."""

    init: UInt


class Regrouped(Frozen, frozen=True, tag=72):
    """Broker to worker: the key has a group of its own from this log index on."""

    kid: UInt
    group: UInt
    bid: UInt
    index: UInt


class Samples(Frozen, frozen=True):
    """Positions `[start, stop)` of the permutation of a pass of the model's pool."""

    pass_number: UInt
    start: UInt
    stop: UInt


class Granted(Frozen, frozen=True, tag=73):
    """Broker to worker: you may compute on this version; `bytes_follow` says if servers send it."""

    group: Int
    grant: UInt
    version: UInt
    bytes_follow: bool
    clock: UInt
    slowest: UInt
    fastest: UInt
    index: UInt
    kids: list[UInt]
    token: UInt
    samples: Samples | None = None
    """What to compute on; None if the model has no pool."""
    codec: Text = "none"
    """How to encode the gradients (a plan of `zkv_codecs.plan`)."""
    codec_down: Text = "none"
    """How the values of later grants will come."""
    chosen: Text = ""
    """The codec that stands for `bits:...` in that plan at present; "" if the plan has none."""
    ahead: bool = False
    """Whether the log has not reached this version yet: it will, or the grant is taken back."""
    on_demand: bool = False
    """Whether servers send only what is asked of them."""
    joint: bool = False
    """Whether its gradient waits until `Together` or `Separate` says where it goes."""


class Exhausted(Frozen, frozen=True, tag=78):
    """Broker to worker: the pool has nothing left, and nothing can come back: no more batches."""


class Cancel(Frozen, frozen=True, tag=74):
    """Broker to worker: the work under this grant no longer counts."""

    group: Int
    grant: UInt


class Companion(Frozen, frozen=True):
    """One of those whose gradients are added up among workers, and where it is reached."""

    number: UInt
    incarnation: UInt
    grant: UInt
    host: Name
    """Alike for those of one machine."""
    address: Name


class Together(Frozen, frozen=True, tag=83):
    """Broker to worker: the update to `version` is made of what these bring under these grants; add
    it up among yourselves (`zkv.topology`)."""

    grant: UInt
    """The receiver's own."""
    version: UInt
    topology: Name
    members: list[Companion]
    index: UInt
    """Log index at which servers know of it: sums that are ahead of the log wait there."""


class Separate(Frozen, frozen=True, tag=84):
    """Broker to worker: send what you bring under this grant to the servers yourself, also what you
    have given to others."""

    grant: UInt
    index: UInt


class Settled(Frozen, frozen=True, tag=75):
    """Broker to worker: the fate of contributions, as (group, batch, version or -1, why)."""

    fates: list[tuple[Int, UInt, Int, Text]]


class Reply(Frozen, frozen=True, tag=76):
    """Broker to anybody: the answer to the request with this token."""

    token: UInt
    value: Any
    index: UInt = 0
    """Log index at which servers know what was asked for: data that is ahead of it waits there."""


class Refusal(Frozen, frozen=True, tag=77):
    """Broker to anybody: the request with this token is turned down (token 0: everything is)."""

    token: UInt
    code: Name
    reason: Text
