"""Gradients that are added up with those of other workers, before servers get the sums.

Part of the session: what a batch brings under such a grant stays here until the broker says whether
it is added up (`Together`) or not (`Separate`), and is kept until it is settled, as it may have to
go to the servers after all. The values that come of it are handed on from worker to worker
(`zkv.topology`); servers have them for whoever asks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from zkv import control as c
from zkv import data_messages as d
from zkv.dtypes import Array
from zkv.layout import Layout
from zkv.link import Link
from zkv.topology import topology
from zkv.wire import MODEL, ContributionId
from zkv_codecs.frames import aligned
from zkv_workers import signals as s
from zkv_workers.companions import Companions
from zkv_workers.config import SessionConfig
from zkv_workers.encoding import Sealed
from zkv_workers.joint import Round, Term, own_term
from zkv_workers.transfers import Uploads

if TYPE_CHECKING:
    from zkv_workers.incoming import Incoming

VERSIONS = 4
"""Values of so many versions may be on their way from worker to worker: of the one that the present
update begins at, of those around it, and one more for who computes on older ones."""
NO_VALUES: Array = np.empty(0, np.uint8)


@dataclass(slots=True)
class _Mine:
    """What a grant of mine has brought so far."""

    grant: int
    name: ContributionId | None = None
    round: Round | None = None
    """The update that it is added up for; None: that is not known, or it is not."""
    apart: bool = False
    blocks: dict[int, tuple[Sealed, float | None]] = field(default_factory=dict)
    given: set[int] = field(default_factory=set)
    """The blocks that are in a sum."""
    finished: tuple[float, Sequence[int]] | None = None
    """Its weight, and the keys that it skips."""


class Together:
    """All grants whose gradients may be added up with others'.

    `incoming()` takes a block as if its server had sent it; `index()` is the log index at which
    servers know all that this worker knows.
    """

    def __init__(
        self,
        layout: Layout,
        link: Link,
        uploads: Uploads,
        config: SessionConfig,
        incoming: Callable[[], Incoming],
        index: Callable[[], int],
    ) -> None:
        self.companions = Companions(config)
        self.added_up = 0
        self.came_apart = 0
        self.delivered_bytes = 0
        """Of values that came from other workers in the place of a server."""
        self._layout = layout
        self._link = link
        self._uploads = uploads
        self._incoming = incoming
        self._patience_s = config.resend_s
        self._index = index
        self._grants: dict[int, _Mine] = {}
        self._rounds: dict[int, Round] = {}
        """The last updates that were added up, or are, by the versions that they lead to, whose
        values are handed on."""
        self._ahead: dict[int, int] = {}
        """My grants of versions that the log has not reached, by version."""
        self._early: dict[tuple[int, int], dict[int, tuple[d.Push, Array]]] = {}
        """Sums that came before the broker's word, by their sender and its grant, and by block."""
        self._passed: dict[int, set[int]] = {}
        """The blocks that others have handed on, by version."""
        self._out: list[s.Output] = []

    @property
    def incarnation(self) -> int:
        """This worker's own."""
        return self.companions.incarnation

    # --- what the broker says ------------------------------------------------------------------

    def welcome(self, message: c.Welcome, *, observer: bool) -> None:
        """This worker is a member: under some topologies others have to reach it."""
        self.companions.incarnation = message.incarnation
        if topology(message.topology).joint and not observer:
            self._out.append(s.Listen())

    def granted(self, message: c.Granted) -> None:
        """A batch is granted."""
        if message.group != MODEL:
            return
        if message.joint:
            self._grants[message.grant] = _Mine(message.grant)
        if message.ahead:
            oldest = message.version - VERSIONS
            self._ahead = {v: g for v, g in self._ahead.items() if v > oldest}
            self._ahead[message.version] = message.grant

    def hear(self, message: c.Together | c.Separate, now: float) -> None:
        """The broker says where what a grant brings goes."""
        mine = self._grants.get(message.grant)
        if mine is None:
            return
        if isinstance(message, c.Separate):
            if mine.round is not None:
                self._ask(now)
            self._separate(mine)
            return
        try:
            made = Round.begin(message, self.incarnation, self._layout)
        except ValueError as error:
            self._link.send(c.CutOff(message.grant, str(error)))
            return
        mine.round = self._rounds[made.version] = made
        others = {
            one.incarnation: one.address
            for one in message.members
            if one.incarnation != self.incarnation
        }
        self._out += self.companions.meet(others)
        for bid, (sealed, weight) in list(mine.blocks.items()):
            self._give(mine, bid, sealed, weight)
        self._give_rest(mine)
        self._use_early(made)
        oldest = made.version - VERSIONS
        self._passed = {v: one for v, one in self._passed.items() if v > oldest}
        self._rounds = {v: one for v, one in self._rounds.items() if v > oldest}

    def _use_early(self, made: Round) -> None:
        for one in made.told.members:
            early = self._early.pop((one.incarnation, one.grant), {})
            for message, payload in early.values():
                self._put(made, message, payload)
        newest = {one.incarnation: one.grant for one in made.told.members}
        self._early = {
            (who, grant): kept
            for (who, grant), kept in self._early.items()
            if grant > newest.get(who, grant)
        }

    def _separate(self, mine: _Mine) -> None:
        """Send all of it to the servers."""
        made, name = mine.round, mine.name
        mine.apart = True
        if made is not None:
            mine.round = None
            self.came_apart += bool(mine.given)
            if name is not None:
                self.companions.forget((name, bid) for bid in made.routes)
            self._rounds.pop(made.version, None)
        if name is not None:
            for bid, (sealed, weight) in mine.blocks.items():
                self._uploads.push(name, mine.grant, bid, sealed, self._index(), weight)
        mine.blocks.clear()

    def cancel(self, grant: int) -> None:
        """A grant is taken back."""
        self._grants.pop(grant, None)
        self._ahead = {v: g for v, g in self._ahead.items() if g != grant}

    def settled(self, grant: int, *, counted: bool) -> None:
        """What a grant has brought has met its fate."""
        mine = self._grants.pop(grant, None)
        self.added_up += counted and mine is not None and mine.round is not None

    # --- what this worker brings -----------------------------------------------------------------

    def keeps(self, grant: int) -> bool:
        """Return whether what this grant brings does not go to the servers as it comes."""
        mine = self._grants.get(grant)
        return mine is not None and not mine.apart

    def block(
        self, name: ContributionId, grant: int, bid: int, sealed: Sealed, weight: float | None
    ) -> None:
        """A block of the batch under this grant is here."""
        mine = self._grants[grant]
        mine.name = name
        mine.blocks[bid] = sealed, weight
        self._give(mine, bid, sealed, weight)

    def finish(
        self, name: ContributionId, grant: int, weight: float, skipped: Sequence[int]
    ) -> None:
        """The batch under this grant is complete."""
        mine = self._grants.get(grant)
        if mine is not None and not mine.apart:
            mine.name, mine.finished = name, (weight, skipped)
            self._give_rest(mine)

    def withdraw(self, grant: int) -> None:
        """Nothing of the batch counts; the broker will say where the next one's blocks go."""
        mine = self._grants.get(grant)
        if mine is None:
            return
        if mine.name is not None:
            self.companions.forget((mine.name, bid) for bid in mine.blocks)
        # Others may have sums with what was withdrawn: they are told to separate.
        mine.name = mine.round = mine.finished = None
        mine.blocks.clear()
        mine.given.clear()

    def _give(self, mine: _Mine, bid: int, sealed: Sealed, weight: float | None) -> None:
        """Add a block of mine to its sum, once its weight is known."""
        if mine.round is None or mine.name is None or weight is None or bid in mine.given:
            return
        mine.given.add(bid)
        if sealed.codec != "none" or sealed.form is not None:
            why = f"block {bid} is encoded ({sealed.codec})"
            self._link.send(c.CutOff(mine.grant, why))
            return
        if mine.round.routes[bid].alone:
            self._uploads.push(mine.name, mine.grant, bid, sealed, self._index(), weight)
            return
        block = self._layout.blocks[bid]
        stored = sealed.payload.view(self._layout.dtype(block).stored)
        skipped = () if mine.finished is None else mine.finished[1]
        addend = d.Addend(mine.name, mine.grant, weight)
        term = own_term(self._layout, block, stored, addend, skipped, self._index())
        self._add(mine, mine.round, bid, mine.round.me, term)

    def _give_rest(self, mine: _Mine) -> None:
        """All of the batch is here: what waited for its weight is added, and what is not there."""
        if mine.round is None or mine.finished is None:
            return
        weight, _ = mine.finished
        for bid, (sealed, _) in list(mine.blocks.items()):
            self._give(mine, bid, sealed, weight)
        for bid in mine.round.routes.keys() - mine.blocks.keys():
            self._add(mine, mine.round, bid, mine.round.me, Term(None, index=self._index()))

    def _add(self, mine: _Mine, made: Round, bid: int, number: int, term: Term) -> None:
        """Take a term in, and send on what all terms that come here add up to."""
        found = made.put(bid, number, term)
        if found is None or mine.name is None:
            return
        route, name = made.routes[bid], mine.name
        if route.target is not None:
            target = made.companions[route.target].incarnation
            values = NO_VALUES if found.values is None else found.values
            message = d.Push(name, mine.grant, bid, "none", found.index, of=found.of)
            self.companions.send(target, (name, bid), message, values, (made.version, bid))
        elif found.values is not None:
            sealed = Sealed(found.values)
            self._uploads.push(name, mine.grant, bid, sealed, found.index, of=found.of)

    # --- other workers -----------------------------------------------------------------------

    def take(self, event: s.Listening | s.FromPeer, now: float) -> None:
        """Something has come of another worker, or they can reach this one."""
        if isinstance(event, s.Listening):
            self._link.send(c.Listens(event.address, event.machine))
            return
        message, payload = event.message, event.payload
        if isinstance(message, d.Took):
            self.companions.took(message, now)
        elif isinstance(message, d.Push) and message.of is not None and payload is not None:
            self.companions.received(message, payload)
            sender = (message.contribution.incarnation, message.grant)
            made = next(
                (m.round for m in self._grants.values() if m.round and m.round.is_in(*sender)),
                None,
            )
            if made is None and message.bid in self._layout.blocks:
                self._early.setdefault(sender, {})[message.bid] = message, payload
            elif made is not None:
                self._put(made, message, payload)
        elif isinstance(message, d.Pass) and payload is not None:
            self.companions.received(message, payload)
            self._passed_on(message, payload, now)

    def _put(self, made: Round, message: d.Push, payload: Array) -> None:
        """Take another member's sum in."""
        mine = self._grants.get(made.told.grant)
        block = self._layout.blocks.get(message.bid)
        if mine is None or mine.round is not made or block is None:
            return
        number = made.number(message.contribution.incarnation)
        of = message.of or ()
        wide = self._layout.dtype(block).wide
        if payload.nbytes != (block.size * wide.itemsize if of else 0):
            why = f"worker {number} has sent {payload.nbytes} bytes for block {block.bid}"
            self._link.send(c.CutOff(mine.grant, why))
            return
        values = aligned(payload).view(wide) if of else None
        term = Term(values, of, message.index)
        self._add(mine, made, message.bid, number, term)

    # --- values ------------------------------------------------------------------------------

    def from_server(self, message: d.Block, payload: Array) -> None:
        """A server has sent a block: if I have sent its sum, others get it from me."""
        made = self._rounds.get(message.version)
        if made is None or message.group != MODEL:
            return
        plain = message.codec == "none" and message.like < 0 and message.base < 0
        route = made.routes.get(message.bid)
        granted = self._ahead.get(message.version) == message.grant
        if route is not None and route.target is None and plain and granted and not message.kids:
            self._hand_on(made, message.bid, payload)

    def _passed_on(self, message: d.Pass, payload: Array, now: float) -> None:
        """Use values that another worker hands on, and hand them on.

        They come of sums that I have part in, so that their update is known, and what is granted
        on them; unless it came apart meanwhile, and they are no more what they seem.
        """
        version, bid = message.version, message.bid
        made, grant = self._rounds.get(version), self._ahead.get(version)
        if made is None or grant is None or bid in self._passed.setdefault(version, set()):
            return
        self._passed[version].add(bid)
        self._hand_on(made, bid, payload)
        self._take_in(grant, version, bid, payload, now)

    def _hand_on(self, made: Round, bid: int, values: Array) -> None:
        route = made.routes.get(bid)
        for number in () if route is None else route.followers:
            message = d.Pass(self.incarnation, made.version, bid)
            name, who = (made.version, bid), made.companions[number].incarnation
            self.companions.send(who, name, message, values, name)

    def _ask(self, now: float) -> None:
        """Somebody may have gone with values that he was to hand on: ask servers for them at
        once."""
        late = now + self._patience_s
        self._out += self._incoming().downloads.overdue(self.incarnation, late)

    def _take_in(self, grant: int, version: int, bid: int, values: Array, now: float) -> None:
        """Use a block as if its server had sent it, under a grant that is ahead of the log: others
        hand on no values but those."""
        block = self._layout.blocks.get(bid)
        if block is not None:
            me = self.incarnation
            message = d.Block(block.server, me, MODEL, grant, version, bid, "none", [])
            self.delivered_bytes += values.nbytes
            self._incoming().take(message, values, now)

    # --- time --------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Time has passed: who does not answer is given up."""
        for who in self.companions.lost(now):
            self._out.append(s.DropPeer(who))
            self._ask(now)
            for mine in self._grants.values():
                made = mine.round
                number = -1 if made is None else made.number(who)
                if number >= 0 and made is not None:
                    why = f"worker {number} at {made.companions[number].address} does not answer"
                    self._link.send(c.CutOff(mine.grant, why))

    def ready(self, now: float) -> list[s.Output]:
        """Return what goes out now."""
        out, self._out = self._out, []
        return out + list(self.companions.ready(now))

    def clear(self) -> None:
        """The broker is a new one."""
        self.companions.clear()
        self._grants.clear()
        self._early.clear()
        self._passed.clear()
        self._ahead.clear()
        self._rounds.clear()

    def plain(self) -> dict[str, int]:
        """Return the figures as plain data."""
        return {
            "updates": self.added_up,
            "came_apart": self.came_apart,
            "bytes_to_workers": self.companions.sent_bytes,
            "bytes_from_workers": self.companions.received_bytes,
        }
