"""One grant whose blocks are coming in. Part of the session."""

from __future__ import annotations

from dataclasses import dataclass, field

from zkv import control as c
from zkv.dtypes import Array


@dataclass(slots=True)
class Assembly:
    """A grant whose blocks are coming in."""

    granted: c.Granted
    missing: set[int]
    touched: float
    since: float
    """When it was granted."""
    blocks: dict[int, Array] = field(default_factory=dict)
    parts: dict[int, tuple[int, ...]] = field(default_factory=dict)
    useless: set[int] = field(default_factory=set)
    """Blocks that came in a form that is of no use here: they are asked for as plain values."""
    refused: set[int] = field(default_factory=set)
    """Those that were not asked for since."""

    @property
    def complete(self) -> bool:
        """Whether every block is here; of a grant on demand never: a part of it is wanted."""
        return not (self.missing or self.granted.on_demand)
