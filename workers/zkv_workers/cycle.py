"""The cycle of batches: granted, begun, finished or cancelled; one at a time. Knows no frames."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from zkv import control as c
from zkv.dtypes import Array
from zkv.layout import Layout
from zkv.table_layout import bid_of, place_of
from zkv_workers.assembly import Assembly
from zkv_workers.signals import Grant


@dataclass(slots=True)
class Cycle:
    """Where this worker is in its cycle."""

    prefetch: int = 0
    """Whether a batch computes on the values that were granted to the one before: its own travel
    meanwhile, and serve the next one."""
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
    reads: int = 0
    """The grant of that version: rows of tables are read under it."""
    places: list[int] = field(default_factory=list)
    """Where something was pushed to of tables, by the current batch."""
    behind: int = 0
    """How many versions that is older than the one that was granted."""
    samples: int = 0
    """How many samples of the pool the current batch computes on."""
    nbytes: int = 0
    """What was sent of the current batch."""
    weights: set[float] = field(default_factory=set)
    """Those that were sent with it."""
    blocks: Mapping[int, Array] = field(default_factory=dict)
    """The values that are here of those that the current batch computes on, or the next one would
    if it began now."""
    _granted: c.Granted | None = None
    _values: Assembly | None = None
    """Those of the newest grant."""
    _next: tuple[c.Granted, Assembly] | None = None
    """The grant of the batch after this one, and its values, if that came already."""
    _before: Assembly | None = None
    """With `prefetch` the values of the last grant that a batch was finished under."""

    def granted(self, message: c.Granted, values: Assembly) -> None:
        """The broker allows the next batch; its values come into `values`."""
        if self._granted is None:
            self._use(message, values)
        else:
            self._next = message, values

    def _use(self, message: c.Granted, values: Assembly) -> None:
        self._granted, self._values, self.blocks = message, values, values.blocks

    def _go_on(self) -> None:
        """The newest grant serves no batch any more."""
        self._granted = None
        if self._next is not None:
            (message, values), self._next = self._next, None
            self._use(message, values)

    def begin(self, layout: Layout) -> tuple[int, Grant] | None:
        """Begin the batch that a call waits for, if it is granted.

        Under a grant ahead of the log not before a value is here: as long as there is none, it may
        be taken back without any work done in vain. (With `prefetch` there mostly is one.)
        """
        granted, token = self._granted, self.token
        values = self._begins_on()
        if granted is None or values is None or not token:
            return None
        if granted.ahead and not values.blocks:
            return None
        self.token = 0
        self.batch += 1
        self.current = (self.batch, granted.grant)
        self.blocks, self.nbytes = values.blocks, 0
        self.version = values.granted.version
        self.behind = granted.version - self.version
        self.weights.clear()
        self.places.clear()
        self.reads = values.granted.grant
        where = granted.samples
        self.samples = 0 if where is None else where.stop - where.start
        return token, Grant(
            batch=self.batch,
            grant=granted.grant,
            version=self.version,
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
            behind=self.behind,
        )

    def _begins_on(self) -> Assembly | None:
        """Return the values that a batch would compute on which began now."""
        # Also where newer ones are here already: a run does not depend on who was quicker.
        return self._before if self.prefetch and self._before is not None else self._values

    def sent(self, nbytes: int, weight: float | None) -> None:
        """A block of the current batch was sent."""
        self.nbytes += nbytes
        if weight is not None:
            self.weights.add(weight)

    def next_place(self, bid: int) -> int:
        """Return where the next piece goes that the current batch pushes to a table's block."""
        before = sum(bid_of(place) == bid for place in self.places)
        self.places.append(place_of(bid, before))
        return self.places[-1]

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
        # A server keeps what somebody has: nobody does what nothing will be computed on.
        self.current, self._before = None, self._values if self.prefetch else None
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
        if self._before is not None and self._before.granted.grant == grant:
            # The version that it was to bring may never come to be.
            self._before = None
        if self.current is None or self.current[1] != grant:
            return None
        batch, self.current = self.current[0], None
        return batch

    def pause(self) -> None:
        """After a barrier the next batch has to be asked for: meanwhile we take part in nothing."""
        self.asked, self._before = False, None

    def restart(self) -> None:
        """The broker is a new one: nothing is granted."""
        self._granted, self._next, self.current = None, None, None
        self._values = self._before = None
