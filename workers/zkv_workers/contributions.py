"""What a worker contributes, batches and plain pushes, from the first block to the contribution's
fate.

Part of the session: messages go to its link, blocks to the uploads, answers to whoever asked.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from msgspec import structs

from zkv import control as c
from zkv.errors import Refused
from zkv.layout import Layout
from zkv.link import Link
from zkv.wire import MODEL, ContributionId
from zkv_workers import signals as s
from zkv_workers.cycle import Cycle
from zkv_workers.encoding import Sealed
from zkv_workers.packing import cut
from zkv_workers.plain import PlainPushes
from zkv_workers.row_signals import PushRows
from zkv_workers.together import Together
from zkv_workers.transfers import Uploads

CANCELLED = s.Fate(None, "cancelled: the update happened without it")


@dataclass(slots=True)
class _Open:
    """A contribution that is not settled, and the call that waits for its fate."""

    name: ContributionId
    grant: int
    token: int
    base: int
    """The model version that it was computed on."""
    samples: int
    """How many samples of the pool it was computed on."""


class Contributions:
    """All contributions of one worker. `answer` ends a call; `tell` says what only members may."""

    def __init__(
        self,
        layout: Layout,
        link: Link,
        uploads: Uploads,
        answer: Callable[[int, object], None],
        tell: Callable[[c.Message], None],
        prefetch: int,
        together: Together,
    ) -> None:
        self.incarnation = 0
        self.index = 0
        """The log index at which servers know all that this worker knows of the layout."""
        self.started = False
        """Whether anything was begun: from here on a new broker cannot be joined."""
        self.cycle = Cycle(prefetch)
        self.plain = PlainPushes()
        self.uploads = uploads
        self._together = together
        self.counts = dict.fromkeys(
            ("batches", "committed", "cancelled", "discarded", "undone", "plain", "samples"), 0
        )
        self.staleness: Counter[int] = Counter()
        """How many committed batches were how many updates old."""
        self._layout = layout
        self._link = link
        self._answer = answer
        self._tell = tell
        self._open: dict[tuple[int, int], _Open] = {}

    def name(self, group: int, batch: int) -> ContributionId:
        """Return the name of one of this worker's contributions."""
        return ContributionId(self.incarnation, group, batch)

    # --- batches -----------------------------------------------------------------------------

    def begin(self, token: int, on_demand: bool) -> None:
        """A call wants the next batch.

        Raises:
            Refused: the batches before were on demand, and this one is not, or the reverse; or it
                is, and batches begin on values that are here.
        """
        if self.cycle.asked and on_demand != self.cycle.on_demand:
            raise Refused(
                "the batches of one worker are all just in time, or none of them is: connect "
                "another worker for the others"
            )
        if on_demand and self.cycle.prefetch:
            raise Refused(
                "batches whose values come just in time hold none to begin on: connect with "
                "prefetch=0"
            )
        self.cycle.token, self.cycle.on_demand = token, on_demand
        if not self.cycle.asked:
            self.cycle.asked = True
            self._tell(c.Begin(on_demand))
        self.answer_begin()

    def answer_begin(self) -> None:
        """Begin the batch that a call waits for, if it is granted and here."""
        begun = self.cycle.begin(self._layout)
        if begun is not None:
            self.started = True
            self._answer(*begun)

    def exhausted(self) -> None:
        """There are no samples left: no batch will be granted, unless it is asked for again."""
        self.cycle.asked = False
        if self.cycle.token:
            token, self.cycle.token = self.cycle.token, 0
            self._answer(token, None)

    def send_block(self, block: s.SendBlock) -> None:
        """Send one block of the current batch; of a cancelled one, nothing."""
        grant = self.cycle.grant_of(block.batch)
        if grant is not None:
            self.cycle.sent(block.sealed.payload.nbytes, block.weight)
            name = self.name(MODEL, block.batch)
            if self._together.keeps(grant):
                self._together.block(name, grant, block.bid, block.sealed, block.weight)
                return
            self.uploads.push(name, grant, block.bid, block.sealed, self.index, block.weight)

    def push_rows(self, piece: PushRows) -> None:
        """Send one piece of what the current batch pushes to a table; of a cancelled one,
        nothing."""
        grant = self.cycle.grant_of(piece.batch)
        if grant is not None:
            self.cycle.sent(piece.payload.nbytes, None)
            name, place = self.name(MODEL, piece.batch), self.cycle.next_place(piece.bid)
            self.uploads.push(name, grant, place, Sealed(piece.payload), self.index)

    def finish(self, event: s.Finish) -> None:
        """The current batch is complete."""
        grant = self.cycle.grant_of(event.batch)
        self.counts["batches"] += 1
        if grant is None:
            self.counts["cancelled"] += 1
            self._answer(event.token, CANCELLED)
            return
        finish = c.Finish(
            self.name(MODEL, event.batch),
            grant,
            event.weight,
            event.loss,
            self.cycle.nbytes,
            self.cycle.declared(event.weight),
            self.cycle.behind,
        )
        self._together.finish(finish.contribution, grant, event.weight, event.skipped)
        self._conclude(finish, event.skipped, event.token)
        self.cycle.finish()

    def withdraw(self, batch: int) -> None:
        """Nothing of the current batch counts; its grant serves the next one."""
        grant = self.cycle.grant_of(batch)
        if grant is not None:
            name = self.name(MODEL, batch)
            self.uploads.forget(name)
            self._together.withdraw(grant)
            self._link.send(c.Withdraw(name, grant))
            self.cycle.withdraw()

    @property
    def inside(self) -> bool:
        """Whether a part of the current batch was sent."""
        return self.cycle.current is not None and self.cycle.nbytes > 0

    def _conclude(self, finish: c.Finish, skipped: tuple[int, ...], token: int) -> None:
        """Say to every server of the group, and to the broker, that a contribution is complete."""
        name, grant = finish.contribution, finish.grant
        placement = self.uploads.places.begun(name, grant)
        if name.group == MODEL:
            self.uploads.places.over(grant)
        places = self.cycle.places if name.group == MODEL else ()
        self.uploads.conclude(name, grant, finish.weight, skipped, self.index, places)
        samples = self.cycle.samples if name.group == MODEL else 0
        self._open[name.group, name.batch] = _Open(name, grant, token, self.cycle.version, samples)
        self._link.send(structs.replace(finish, placement=placement))

    # --- plain pushes ------------------------------------------------------------------------

    def push_plain(self, event: s.PushPlain) -> None:
        """Queue a plain push, and send it if its turn has come.

        Raises:
            UnknownKey: the key was never initialised.
        """
        kid = self._layout.kid(event.key)
        group = self._layout.group_of[kid]
        if self.plain.add(kid, event, group):
            self._link.send(c.Plain(event.token, event.key))
        self.next_plain(group)

    def next_plain(self, group: int) -> None:
        """Send the next plain push of a group, if one is queued and granted."""
        ready = self.plain.take(group)
        if ready is None:
            return
        push, grant, batch, kid = ready
        name = self.name(group, batch)
        self.started = True
        self.counts["plain"] += 1
        values = {self._layout.entries[kid].spec.key: push.value}
        blocks, empty = self._layout.blocks_in(group), self.uploads.empty
        for bid, payload in cut(self._layout, blocks, values, empty).items():
            self.uploads.push(name, grant, bid, Sealed(payload), self.index)
        self._conclude(c.Finish(name, grant, push.weight), (), push.token)

    # --- what the broker says ----------------------------------------------------------------

    def cancel(self, group: int, grant: int) -> int | None:
        """A grant is taken back; return the batch that is being computed under it, if any."""
        if group != MODEL:
            self.plain.cancelled(group, grant)
            return None
        batch = self.cycle.cancel(grant)
        self._together.cancel(grant)
        if batch is not None:
            self.uploads.forget(self.name(MODEL, batch))
        # The broker's own word on what was finished under it comes behind the next grant.
        for name in [name for name, held in self._open.items() if held.grant == grant]:
            if name[0] == MODEL:
                self.settled(*name, -1, CANCELLED.why, 0.0)
        return batch

    def settled(self, group: int, batch: int, version: int, why: str, now: float) -> None:
        """A contribution has met its fate."""
        held = self._open.pop((group, batch), None)
        if held is None:
            return
        fate = s.Fate(version if version >= 0 else None, why)
        self.uploads.forget(held.name, now if fate.version is not None else None)
        self.counts[fate.outcome] += 1
        if group == MODEL:
            self._together.settled(held.grant, counted=fate.version is not None)
        if fate.version is not None and group == MODEL:
            self.staleness[fate.version - 1 - held.base] += 1
            self.counts["samples"] += held.samples
        self._answer(held.token, fate)
        if group != MODEL:
            self.plain.settled(group)
            self.next_plain(group)

    def restart(self) -> list[int]:
        """The broker is a new one, before anything was begun; return the pushes that were
        queued."""
        self.uploads.clear()
        self._together.clear()
        self.cycle.restart()
        self.index = 0
        return self.plain.clear()
