"""What a worker's grants send: blocks on their way here, and the calls that wait for some of them.

Part of the session. A batch may begin as soon as it is granted: a call waits for the blocks of the
keys that it names, and for no others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from zkv import control as c
from zkv import data_messages as d
from zkv.dtypes import Array
from zkv.errors import ProtocolError
from zkv.layout import Layout
from zkv.link import Link
from zkv.wire import MODEL, PULLS
from zkv_workers import signals as s
from zkv_workers.assembly import Assembly
from zkv_workers.contributions import Contributions
from zkv_workers.on_demand import Demand
from zkv_workers.pulls import Pulls
from zkv_workers.transfers import Downloads


@dataclass(slots=True)
class _Wait:
    """A call that waits for blocks of the batch with this number."""

    token: int
    batch: int
    missing: set[int]


class Incoming:
    """Grants and their blocks. `answer` ends a call."""

    def __init__(
        self,
        layout: Layout,
        link: Link,
        made: Contributions,
        pulls: Pulls,
        ask_s: float,
        answer: Callable[[int, object], None],
    ) -> None:
        self.downloads = Downloads(layout, ask_s=ask_s)
        self._layout = layout
        self._link = link
        self._made = made
        self._pulls = pulls
        self._answer = answer
        self._waits: list[_Wait] = []
        self._demands: dict[int, Demand] = {}
        """By grant, those on demand."""
        self._asks: list[s.SendData] = []

    def granted(self, message: c.Granted, now: float) -> None:
        """The broker grants a batch, a pull or a plain push; what follows comes from servers."""
        made = self._made
        made.index = max(made.index, message.index)
        if message.group == PULLS:
            blocks = self._layout.blocks_for(message.kids)
            self._arrived(self.downloads.expect(message, blocks, now))
        elif message.group == MODEL:
            assembly = self.downloads.held(message.version)
            if message.bytes_follow:
                blocks = [] if message.on_demand else self._layout.blocks_in(MODEL)
                assembly = self.downloads.expect(message, blocks, now)
            if assembly is None:
                raise ProtocolError(
                    f"the broker grants version {message.version} as one that this worker holds, "
                    "which it does not"
                )
            if message.on_demand:
                self._demands[message.grant] = Demand(assembly, self._layout)
            made.cycle.granted(message, assembly)
            if message.bytes_follow:
                self._arrived(assembly)
            made.answer_begin()
        else:
            made.plain.granted(message.group, message.grant)
            made.next_plain(message.group)

    def take(self, message: d.Block, payload: Array, now: float) -> None:
        """A server sends a block."""
        self._arrived(self.downloads.take(message, payload, now))
        for assembly in self.downloads.followers(message.bid, now):
            self._arrived(assembly)
        if message.group == MODEL and self._made.cycle.token:
            self._made.answer_begin()

    def drop(self, group: int, grant: int, batch: int | None) -> None:
        """A grant is taken back, and with it the batch that is being computed under it, if any.

        Who waits for values of that batch looks at it again, and sees that it is cancelled.
        """
        self.downloads.drop(group, grant)
        if group == MODEL:
            self._demands.pop(grant, None)
        for wait in [wait for wait in self._waits if wait.batch == batch]:
            self._waits.remove(wait)
            self._answer(wait.token, None)

    def receipts(self) -> list[s.SendData | s.Narrate]:
        """Return what to tell servers: what has come since, and what is wanted now."""
        asks, self._asks = self._asks, []
        return [*self.downloads.receipts(), *asks]

    # --- on demand ---------------------------------------------------------------------------

    def _demand(self, batch: int) -> Demand | None:
        grant = self._made.cycle.grant_of(batch)
        return None if grant is None else self._demands.get(grant)

    def note(self, event: s.Want | s.Await | s.Forget, now: float) -> None:
        """Values of the current batch are needed, or not any more: ask for them, or forget them,
        if they come on demand."""
        demand = self._demand(event.batch)
        if demand is not None and isinstance(event, s.Forget):
            demand.forget(event.kids)
        elif demand is not None:
            bids = demand.want(event.kids, now)
            self._asks += self.downloads.asked(demand.assembly, self._made.incarnation, bids)

    def left(self, batch: int, *, finished: bool) -> None:
        """The current batch will need no values any more; `finished`: nor will its grant."""
        demand = self._demand(batch)
        if demand is None:
            return
        demand.clear()
        if finished:
            grant = demand.assembly.granted.grant
            del self._demands[grant]
            self.downloads.drop(MODEL, grant)

    # --- waiting -----------------------------------------------------------------------------

    def wait(self, event: s.Await, now: float) -> None:
        """Answer when the blocks of these keys are here, or their batch does not count."""
        cycle = self._made.cycle
        if cycle.grant_of(event.batch) is None:
            self._answer(event.token, None)
            return
        self.note(event, now)
        bids = event.bids or [block.bid for block in self._layout.blocks_for(event.kids)]
        missing = set(bids) - cycle.blocks.keys()
        self._waits.append(_Wait(event.token, event.batch, missing))
        self._serve()

    def give_up(self, token: int) -> None:
        """Nobody waits for this call's answer any more."""
        self._waits = [wait for wait in self._waits if wait.token != token]

    def _serve(self) -> None:
        here = self._made.cycle.blocks.keys()
        waits, self._waits = self._waits, []
        for wait in waits:
            wait.missing -= here
            if wait.missing:
                self._waits.append(wait)
            else:
                self._answer(wait.token, None)

    def _arrived(self, assembly: Assembly | None) -> None:
        if assembly is None:
            return
        granted = assembly.granted
        if self._waits and granted.group == MODEL:
            self._serve()
        if not assembly.complete:
            return
        if granted.group == PULLS:
            self._pulls.done(granted.token)
            values = s.Values(
                granted.version,
                tuple(granted.kids),
                assembly.blocks,
                assembly.parts,
                self._layout.snapshot(),
            )
            self._answer(granted.token, values)
            return
        self._link.send(c.Received(granted.group, granted.grant))
