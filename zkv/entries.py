"""Entries of the control log: what the broker tells every server, in one order.

Each server applies the whole log strictly in that order, so that everything between two commits
happens between the same two commits everywhere. (term, index) names one entry for all time.
"""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta

from zkv.greetings import ServerAt
from zkv.wire import (
    BlockSpec,
    ContributionId,
    Frozen,
    Int,
    KeyEntry,
    Name,
    TableEntry,
    Text,
    UInt,
    Weight,
)


class Init(Frozen, frozen=True, tag=1):
    """Entry: these keys exist from here on, cut into these blocks; this worker sends the values."""

    init: UInt
    incarnation: UInt
    keys: list[KeyEntry]
    blocks: list[BlockSpec]
    plain: bool = False
    """They are no part of the model, whose updates may go on meanwhile."""
    tables: tuple[TableEntry, ...] = ()
    """Tables too, of which nobody sends values."""


class Drop(Frozen, frozen=True, tag=2):
    """Entry: the initialiser died half-way; forget these keys and what it sent of them."""

    init: UInt


class Regroup(Frozen, frozen=True, tag=3):
    """Entry: the key trains alone, as a group of its own; out of its bucket into block `bid`."""

    kid: UInt
    group: UInt
    bid: UInt


class Grant(Frozen, frozen=True, tag=4):
    """Entry: send this worker the named keys (none named: all of the group) as they are now.

    Rows of tables stay at this version for it until its batch is done, or (of a pull of `rows`,
    which sends just the keys that it names) until a `Discard` of the grant.
    """

    incarnation: UInt
    group: Int
    grant: UInt
    version: UInt
    kids: list[UInt]
    held: Int = -1
    """The version of the group that the worker holds completely already; -1: none is known."""
    on_demand: bool = False
    """Send only what the worker asks for, as often as it asks, until its contribution is done."""
    rows: bool = False
    """Of a pull: the worker will ask for rows."""


Fraction = Annotated[float, Meta(ge=0, le=1)]


class Counted(Frozen, frozen=True):
    """One contribution of a commit, with its weight in samples and its age in updates."""

    contribution: ContributionId
    weight: Weight
    staleness: UInt = 0
    clip: Fraction = 1.0
    """What its gradient is multiplied with, as its norm is above a limit."""


class Sum(Frozen, frozen=True, tag=5):
    """Entry: add up this set and answer with each block's square sum; the commit follows."""

    group: UInt
    version: UInt
    counted: list[Counted]


class Commit(Frozen, frozen=True, tag=6):
    """Entry: this set becomes the update to `version`; `square_sum` is over all shards."""

    group: UInt
    version: UInt
    counted: list[Counted]
    square_sum: float | None


class Discard(Frozen, frozen=True, tag=7):
    """Entry: drop what this worker sent under this grant (`batch` -1), or one batch of it."""

    incarnation: UInt
    group: Int
    grant: UInt
    batch: Int
    values: bool = False
    """Whether the grant's values are to go on: its batch was finished, and the next one may compute
    on them."""


class Configure(Frozen, frozen=True, tag=8):
    """Entry: from here on commits use this optimizer (plain data of an `OptimizerSpec`), this rule
    for stale gradients; contributions come in these codecs, and grants are sent in those."""

    optimizer: dict[str, Any]


class Epoch(Frozen, frozen=True, tag=9):
    """Entry: these incarnations are members; what others left behind is dropped, but for `kept`."""

    epoch: UInt
    members: list[UInt]
    kept: list[ContributionId]


class Expected(Frozen, frozen=True):
    """A contribution that an update will be made of: whose, and under which grant."""

    incarnation: UInt
    grant: UInt


class Expect(Frozen, frozen=True, tag=10):
    """Entry: unless an `Expect` takes it back, the update to `version` will be made of just these
    contributions (none: nothing is known any more). Grants at that version may come before it."""

    group: UInt
    version: UInt
    expected: list[Expected]


class Apart(Frozen, frozen=True, tag=18):
    """Entry: what workers have added up of these contributions does not count: each of them comes
    by itself, again under the same name."""

    group: UInt
    expected: list[Expected]


class Mirror(Frozen, frozen=True, tag=11):
    """Entry: from this placement on gradients of these blocks (block, server) come to that server
    too, which will get a copy: to own the block, or to stand by."""

    placement: UInt
    moves: list[tuple[UInt, UInt]]


class Copy(Frozen, frozen=True, tag=12):
    """Entry: copies of these blocks (block, server) begin as the blocks are now; from here on
    updates are made of gradients that came to both. `sources` tells where the owners listen."""

    placement: UInt
    moves: list[tuple[UInt, UInt]]
    sources: list[ServerAt]
    data_address: Name = ""
    """Where the broker relays data, for servers that cannot reach each other."""


class Move(Frozen, frozen=True, tag=13):
    """Entry: these blocks (block, server) belong to that server, which holds live copies, from
    here on."""

    placement: UInt
    moves: list[tuple[UInt, UInt]]
    stays: tuple[UInt, ...] = ()
    """Those of which the former owner keeps a live copy."""
    lost: Int = -1
    """The server that they were on is lost: who has copies sends what it was granted to send."""


class Unmirror(Frozen, frozen=True, tag=14):
    """Entry: copies of these blocks (block, server), live or on their way, are given up; the owners
    stay."""

    placement: UInt
    moves: list[tuple[UInt, UInt]]


class Retire(Frozen, frozen=True, tag=15):
    """Entry: this server owns nothing, and nothing will come to it: it stops once what it was
    granted to send has arrived."""

    server: UInt


class Snapshot(Frozen, frozen=True, tag=90):
    """Entry: write down what you hold as it is here, into the folder `name` of `url`, and answer
    with `Saved`; the log goes on meanwhile."""

    number: UInt
    url: Text
    name: Name


class Restore(Frozen, frozen=True, tag=91):
    """Entry: your blocks have the values that the snapshot `name` in `url` has, whose manifest has
    this checksum; answer with `Restored`. `versions`: of the model and other groups."""

    url: Text
    name: Name
    checksum: Name
    versions: list[tuple[UInt, UInt]]


Entry = (
    Init
    | Drop
    | Regroup
    | Grant
    | Sum
    | Commit
    | Discard
    | Configure
    | Epoch
    | Expect
    | Mirror
    | Copy
    | Move
    | Unmirror
    | Retire
    | Apart
    | Snapshot
    | Restore
)
