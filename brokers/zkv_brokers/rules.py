"""What a group of keys has to know of the settings in force, beside its policy."""

from __future__ import annotations

from dataclasses import dataclass, field

from zkv.staleness import Staleness
from zkv_brokers.coding import Coding
from zkv_brokers.decisions import Arrival
from zkv_brokers.norms import Norms


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
    norms: Norms = field(default_factory=lambda: Norms(0.0, "refuse", joint=False))
    """The limit for the norm of one contribution."""
    coding: Coding = field(default_factory=Coding)
    """How workers encode their gradients, and servers what grants send."""

    def refuses(self, age: int, arrival: Arrival) -> str:
        """Return why a contribution that is so many updates old does not count; "" if it does."""
        return self.staleness.refuses(age) or self.norms.judge(arrival)
