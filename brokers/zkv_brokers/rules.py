"""What a group of keys has to know of the settings in force, beside its policy."""

from __future__ import annotations

from dataclasses import dataclass, field

from zkv.staleness import Staleness
from zkv_brokers.coding import Coding


@dataclass(slots=True)
class Rules:
    """Settings that decide what a group logs and grants; they change between two commits."""

    capacity: int | None = None
    """How many contributions fit into the smallest server's budget; None: not limited."""
    clips: bool = False
    """Whether commits need the gradient's norm over all shards first."""
    staleness: Staleness = field(default_factory=Staleness)
    streaming: bool = True
    """Whether the next version may be granted before its update is in the log."""
    tables: bool = False
    """Whether the model has tables: then servers are told of each grant, to pin its rows."""
    coding: Coding = field(default_factory=Coding)
    """How workers encode their gradients, and servers what grants send."""
