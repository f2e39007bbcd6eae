"""The cycle of batches: granted, begun, finished or cancelled; one at a time. Knows no frames."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from zkv import control as c
from zkv.dtypes import Array
from zkv.layout import Layout
from zkv_workers.signals import Grant


@dataclass(slots=True)
class Cycle:
    """Where this worker is in its cycle."""

    token: int = 0
    """The call that waits for the next batch; 0: none."""
    asked: bool = False
    """Whether the broker knows that this worker wants batches."""
    on_demand: bool = False
    """Whether it wants them on demand."""
    batch: int = 0
    """How many batches were begun."""
    current: tuple[int, int] | None = None
    """(batch, grant) of the batch that is being computed, unless it was cancelled."""
    version: int = 0
    """The model version that the current batch computes on."""
    samples: int = 0
    """How many samples of the pool the current batch computes on."""
    nbytes: int = 0
    """What was sent of the current batch."""
    weights: set[float] = field(default_factory=set)
    """Those that were sent with it."""
    blocks: Mapping[int, Array] = field(default_factory=dict)
    """The values of the newest grant that are here."""
    _granted: c.Granted | None = None
    _next: tuple[c.Granted, Mapping[int, Array]] | None = None
    """The grant of the batch after this one, and its values, if that came already."""

    def granted(self, message: c.Granted, blocks: Mapping[int, Array]) -> None:
        """The broker allows the next batch; its values come into `blocks`."""
        if self._granted is None:
            self._granted, self.blocks = message, blocks
        else:
            self._next = message, blocks

    def _go_on(self) -> None:
        """The newest grant serves no batch any more."""
        self._granted = None
        if self._next is not None:
            (self._granted, self.blocks), self._next = self._next, None

    def begin(self, layout: Layout) -> tuple[int, Grant] | None:
        """Begin the batch that a call waits for, if it is granted.

        Under a grant ahead of the log not before a value is here: as long as there is none, it may
        be taken back without any work done in vain.
        """
        granted, token = self._granted, self.token
        if granted is None or not token or (granted.ahead and not self.blocks):
            return None
        self.token = 0
        self.batch += 1
        self.current = (self.batch, granted.grant)
        self.version, self.nbytes = granted.version, 0
        self.weights.clear()
        where = granted.samples
        self.samples = 0 if where is None else where.stop - where.start
        return token, Grant(
            batch=self.batch,
            grant=granted.grant,
            version=granted.version,
            clock=granted.clock,
            slowest=granted.slowest,
            fastest=granted.fastest,
            blocks=self.blocks,
            layout=layout.snapshot(),
            samples=where,
            codec=granted.codec,
            codec_down=granted.codec_down,
            chosen=granted.chosen,
            ahead=granted.ahead,
            on_demand=granted.on_demand,
        )

    def sent(self, nbytes: int, weight: float | None) -> None:
        """A block of the current batch was sent."""
        self.nbytes += nbytes
        if weight is not None:
            self.weights.add(weight)

    def declared(self, weight: float) -> float | None:
        """Return the weight that blocks were sent with; if there was another one than the batch
        has in the end, that one."""
        return next(iter(self.weights - {weight}), weight) if self.weights else None

    def grant_of(self, batch: int) -> int | None:
        """Return the grant of the batch that is being computed; None if it was cancelled."""
        return self.current[1] if self.current is not None and self.current[0] == batch else None

    def give_up(self, token: int) -> None:
        """The call with this token does not wait for the next batch any more."""
        if token == self.token:
            self.token = 0

    def finish(self) -> None:
        """The batch is finished, its grant used up."""
        self.current = None
        self._go_on()

    def withdraw(self) -> None:
        """The batch is given up; its grant serves the next one."""
        self.current = None

    def cancel(self, grant: int) -> int | None:
        """The broker takes a grant back; return the batch that is being computed under it."""
        if self._granted is not None and self._granted.grant == grant:
            self._go_on()
        elif self._next is not None and self._next[0].grant == grant:
            self._next = None
        if self.current is None or self.current[1] != grant:
            return None
        batch, self.current = self.current[0], None
        return batch

    def pause(self) -> None:
        """After a barrier the next batch has to be asked for: meanwhile we take part in nothing."""
        self.asked = False

    def restart(self) -> None:
        """The broker is a new one: nothing is granted."""
        self._granted, self._next, self.current = None, None, None
