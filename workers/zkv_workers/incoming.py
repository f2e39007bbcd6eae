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
from zkv.errors import ProtocolError, ZkvError
from zkv.layout import Layout
from zkv.link import Link
from zkv.wire import MODEL, PULLS
from zkv_workers import signals as s
from zkv_workers.assembly import Assembly
from zkv_workers.config import SessionConfig
from zkv_workers.contributions import Contributions
from zkv_workers.downloads import Downloads
from zkv_workers.on_demand import Demand
from zkv_workers.pulls import Pulls, base_of
from zkv_workers.requests import Requests
from zkv_workers.row_reads import RowReads
from zkv_workers.row_signals import AskRows, PushRows, ReleaseRows


@dataclass(slots=True)
class _Wait:
    """A call that waits for blocks of the batch with this number."""

    token: int
    batch: int
    missing: set[int]


class Incoming:
    """Grants, their blocks, rows of their version. `answer` ends a call, `fail` with an error."""

    def __init__(
        self,
        layout: Layout,
        link: Link,
        made: Contributions,
        pulls: Pulls,
        config: SessionConfig,
        answer: Callable[[int, object], None],
        fail: Callable[[int, ZkvError], None],
    ) -> None:
        others = made.uploads.places.others
        self.downloads = Downloads(layout, ask_s=config.resend_s, others=others)
        self.rows = RowReads(layout, config, answer, fail)
        self._layout = layout
        self._link = link
        self._made = made
        self._pulls = pulls
        self._answer = answer
        self._waits: list[_Wait] = []
        self._demands: dict[int, Demand] = {}
        """By grant, those on demand."""
        self._asks: list[s.SendData] = []
        self._pinned: set[int] = set()
        """Pulls whose version servers keep for rows."""

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
                assembly = self.downloads.expect(message, self._layout.blocks_in(MODEL), now)
            if assembly is None:
                raise ProtocolError(
                    f"the broker grants version {message.version} as one that this worker holds, "
                    "which it does not"
                )
            if message.on_demand:
                made.uploads.places.granted(message.grant)
                self._demands[message.grant] = Demand(assembly, self._layout)
            made.cycle.granted(message, assembly)
            if message.bytes_follow:
                self._arrived(assembly)
            made.answer_begin()
        else:
            made.plain.granted(message.group, message.grant)
            made.next_plain(message.group)

    def take(self, message: d.Block | d.Rows, payload: Array, now: float) -> None:
        """A server sends a block, or rows."""
        if isinstance(message, d.Rows):
            self.rows.take(message, payload, now)
            return
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
            self._made.uploads.places.over(grant)
            self.rows.drop(batch)
        for wait in [wait for wait in self._waits if wait.batch == batch]:
            self._waits.remove(wait)
            self._answer(wait.token, None)

    def servers(self, message: c.Message) -> None:
        """If this says which servers there are: from those that are gone nothing comes, and nothing
        goes there."""
        if isinstance(message, c.Servers):
            here = {at.index for at in message.servers}
            self._made.uploads.here(here)
            for token in self.downloads.lost(here, self._made.index):
                self._pulls.again(token, self._made.cycle.version)

    def receipts(self, now: float) -> list[s.SendData | s.Narrate]:
        """Return what to tell servers: what has come since, and what is wanted now."""
        asks, self._asks = self._asks, []
        return [*self.downloads.receipts(), *asks, *self.rows.ready(now)]

    def owing(self) -> set[int]:
        """Return the servers that have not sent all that was granted, or asked for."""
        return self.downloads.owing() | self.rows.owing()

    def clear(self) -> None:
        """Drop everything (the broker started anew)."""
        self.downloads.clear()
        self.rows.clear()
        self._pinned.clear()

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
        self.rows.drop(batch)
        demand = self._demand(batch)
        if demand is None:
            return
        demand.clear()
        if finished:
            grant = demand.assembly.granted.grant
            del self._demands[grant]
            self.downloads.drop(MODEL, grant)

    def about_rows(
        self, event: AskRows | PushRows | ReleaseRows, requests: Requests, now: float
    ) -> None:
        """Rows of a table are pushed, or needed, or not needed any more under a pull."""
        match event:
            case AskRows(token=token, batch=batch):
                of = f" in batch {batch}" if batch else ""
                requests.open(token, f"the rows of a table{of}", now)
                self._ask_rows(event)
            case PushRows():
                self._made.push_rows(event)
            case ReleaseRows(pull):
                self._unpin(pull)

    def _unpin(self, pull: int) -> None:
        """No rows will be asked for any more under a pull, if this is one."""
        if pull in self._pinned:
            self._pinned.discard(pull)
            self._link.send(c.Received(PULLS, pull))

    def _ask_rows(self, event: AskRows) -> None:
        made = self._made
        if not event.batch:
            self.rows.ask(event, made.incarnation, PULLS, event.pull, made.index)
        elif made.cycle.grant_of(event.batch) is None:
            self._answer(event.token, None)
        else:
            self.rows.ask(event, made.incarnation, MODEL, made.cycle.reads, made.index)

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
        self.rows.give_up(token)
        self._unpin(token)
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
            pull = self._pulls.done(granted.token)
            if pull is None:
                self._link.send(c.Received(PULLS, granted.grant))
            elif pull.rows:
                self._pinned.add(granted.token)
            values = s.Values(
                granted.version,
                tuple(granted.kids),
                assembly.blocks,
                assembly.parts,
                self._layout.snapshot(),
                granted.grant,
            )
            self._answer(base_of(granted.token), values)
            return
        self._link.send(c.Received(granted.group, granted.grant))
