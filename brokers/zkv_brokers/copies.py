"""Blocks on their way between servers: states that others ask for, and live copies of their blocks.

Between `Mirror` and `Copy` a block's gradients begin to come here too. At `Copy` in the log the
owner packs the block's state; from there on all that the log does to the block is done to the copy
too, or kept until its state is here. So a copy that is live has the owner's bits, and `Move` only
says whose block it is. Part of one server's shard; knows no sockets.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from msgspec import structs

from zkv import control as c
from zkv import data_messages as d
from zkv.dtypes import Array
from zkv.errors import ProtocolError
from zkv.wire import MODEL, NO_BATCH, BlockSpec, ContributionId
from zkv_brokers import parcels
from zkv_brokers.commits import shares_in, update_block
from zkv_brokers.configured import down_of, settings_of
from zkv_brokers.live_copy import LiveCopy, granted, of_block, squares_of
from zkv_brokers.shadows import Shadows
from zkv_brokers.shard_events import Action, ToBroker, ToServer
from zkv_brokers.store import Pinned, Store

if TYPE_CHECKING:
    from zkv_brokers.shard import Shard

FETCHED_AT_ONCE = 4
"""Blocks whose states are asked for at a time."""
ASK_AGAIN_S = 1.0
PARTS_MAX = 65_536
"""Of a state: 64 GiB."""
PARTS_ASKED_MAX = 4096
"""In one message."""
WAITING_BYTES_MAX = 256 * 1024 * 1024
"""Gradients that wait for a copy's state; beyond it the copy is given up, and may begin anew."""


class Copies:
    """What a shard gives to others, and what it takes over."""

    def __init__(self, shard: Shard) -> None:
        self._shard = shard
        self.mirrored: dict[int, LiveCopy] = {}
        """Blocks of others whose gradients come here too."""
        self.former: set[int] = set()
        """Blocks that were here: what is still sent of them is of no use, and not wrong."""
        self.retiring = False
        """Whether this server stops once nobody waits for anything of it."""
        self.shadows = Shadows()
        shard.commits.streaming.copy_of = self._store_of
        self._given: dict[int, tuple[int, int, Array]] = {}
        """States that are to be asked for: placement, bytes of the head, and the stream."""
        self._waiting_bytes = 0
        self._left = False

    # --- the log -----------------------------------------------------------------------------

    def apply(self, entry: c.Mirror | c.Copy | c.Move | c.Unmirror | c.Retire) -> list[Action]:
        """Do what an entry says of moves; return what it leads to.

        Raises:
            ProtocolError: a block moves here of which there is no live copy.
        """
        out: list[Action] = []
        number = self._shard.number
        match entry:
            case c.Mirror(placement=placement, moves=moves):
                for bid in (bid for bid, to in moves if to == number):
                    # As it will be: room for its values is not beside the owner's other blocks.
                    block = BlockSpec(bid, number, self._shard.layout.blocks[bid].segments)
                    self.mirrored[bid] = LiveCopy(block, placement)
                    self.former.discard(bid)
            case c.Copy(moves=moves):
                for bid, to in moves:
                    if to == number and bid in self.mirrored:
                        self._begin(self.mirrored[bid], entry)
                    elif self._shard.layout.blocks[bid].server == number:
                        self._give(bid, entry.placement)
            case c.Move(moves=moves):
                gone = {b for b, _ in moves if self._shard.layout.blocks[b].server == number}
                for bid in (bid for bid, to in moves if to == number):
                    self._take_over(bid)
                self._shard.layout.move(moves)
                for bid in gone & set(entry.stays):
                    self._keep(bid, entry.placement)
                self._forget(gone - set(entry.stays), out)
                if entry.lost >= 0:
                    self._send_for(entry.lost)
            case c.Unmirror(moves=moves):
                for bid, _ in moves:
                    self._given.pop(bid, None)
                mine = {bid for bid, to in moves if to == number}
                for bid in mine:
                    self.mirrored.pop(bid, None)
                self.shadows.forget(mine)
                self._forget(mine, out)
            case c.Retire(server=server):
                self.retiring = self.retiring or server == number
        return out

    def _begin(self, copy: LiveCopy, entry: c.Copy) -> None:
        shard = self._shard
        copy.clear()
        shard.commits.streaming.by_block.pop(copy.block.bid, None)
        copy.placement = entry.placement
        owner = shard.layout.blocks[copy.block.bid].server
        copy.source = next(at for at in entry.sources if at.index == owner)
        copy.relay, copy.index = entry.data_address, shard.index + 1
        copy.asked_at, copy.asked = None, 0
        copy.store = self._store()

    def _give(self, bid: int, placement: int) -> None:
        shard = self._shard
        block = shard.layout.blocks[bid]
        marks = shard.contributions.marks_of(self._group(block))
        head, stream = parcels.pack(shard.store, shard.commits.bases, block, marks)
        self._given[bid] = placement, head, stream

    def _take_over(self, bid: int) -> None:
        copy, shard = self.mirrored.pop(bid, None), self._shard
        if copy is None or not copy.live or copy.store is None:
            raise ProtocolError(f"block {bid} moves to server {shard.number}, which has no copy")
        shard.store.blocks[bid] = copy.store.blocks[bid]
        shard.store.views.adopt(bid, copy.store.views.kept(bid))
        shard.commits.bases.join(bid, copy.bases)

    def _keep(self, bid: int, placement: int) -> None:
        """A block has another owner, and what is here of it is the copy from now on."""
        shard = self._shard
        block = BlockSpec(bid, shard.number, shard.layout.blocks[bid].segments)
        # What was sent here as to the owner is what a copy has to hold, too.
        copy = self.mirrored[bid] = LiveCopy(block, since=0, placement=placement, live=True)
        store = copy.store = self._store()
        store.blocks[bid] = shard.store.blocks[bid]
        store.views.adopt(bid, shard.store.views.kept(bid))
        copy.bases.join(bid, shard.commits.bases)
        self._given.pop(bid, None)
        shard.store.drop(bid)

    def _store(self) -> Store:
        """Return what a copy is made in."""
        known = self._shard.store
        store = Store(self._shard.layout, known.clock, known.memory)
        store.configure(known.settings)
        store.views.use(known.views.plan)
        return store

    def is_made_here(self, block: BlockSpec) -> bool:
        """Return whether a block's next version may be made here: it is here, or a live copy."""
        return block.server == self._shard.number or self._store_of(block.bid) is not None

    def _store_of(self, bid: int) -> Store | None:
        """Return what a live copy of a block is in; None: there is none."""
        copy = self.mirrored.get(bid)
        return copy.store if copy is not None and copy.live else None

    def _send_for(self, server: int) -> None:
        """Send what a lost server was granted to send and has not, of blocks that had copies
        here."""
        shard = self._shard
        for entry, pinned, coming in self.shadows.taken(server):
            blocks = [shard.layout.blocks[bid] for bid in pinned]
            shard.grants.resume(entry, blocks, pinned, coming)

    def _forget(self, bids: set[int], out: list[Action]) -> None:
        """Nothing more is needed here of these blocks but what grants still send."""
        shard = self._shard
        self.former |= bids
        for bid in bids:
            self._given.pop(bid, None)
            shard.store.drop(bid)
            shard.commits.streaming.by_block.pop(bid, None)
        if bids:
            shard.held_elsewhere(shard.contributions.strip(bids))

    def _group(self, block: BlockSpec) -> int:
        return self._shard.layout.group_of[block.segments[0].kid]

    # --- what the log does to copies -----------------------------------------------------------

    def note(self, entry: c.Entry) -> list[Action]:
        """Do to all copies what an entry does to their blocks; return what that leads to.

        Raises:
            ProtocolError: an update counts what is not held here.
        """
        out: list[Action] = []
        for copy in [one for one in self.mirrored.values() if one.store is not None]:
            self._note(copy, copy.store, entry, out)
        return out

    def _note(self, copy: LiveCopy, store: Store | None, entry: c.Entry, out: list[Action]) -> None:
        assert store is not None
        bases, block = copy.bases, copy.block
        match entry:
            case c.Commit(group=group) if group == self._group(block):
                self._commit(copy, store, entry, out)
            case c.Grant(group=group) if group == MODEL == self._group(block):
                self._grant(copy, store, entry)
            case c.Configure():
                copy.do(lambda: store.configure(settings_of(entry)))
                copy.do(lambda: store.views.go_by(down_of(entry)))
            case c.Discard(incarnation=who, group=group, grant=grant, batch=batch) if (
                batch == NO_BATCH and group == MODEL
            ):
                copy.do(lambda: bases.release(who, grant))
                if not entry.values:
                    self.shadows.drop(who, grant)
            case c.Epoch(members=members, kept=kept):
                needed = {*members, *(name.incarnation for name in kept)}
                copy.do(lambda: bases.keep_only(needed))
                self.shadows.keep_only(set(members))
            case _:
                pass

    def _grant(self, copy: LiveCopy, store: Store, entry: c.Grant) -> None:
        """The owner is granted to send a block; what of it must be sent in its place is kept, if
        the copy is live: of those before, the broker knows that it is not."""
        block, bases = copy.block, copy.bases
        owner = self._shard.layout.blocks[block.bid].server
        if entry.version > self._shard.versions.get(MODEL, 0):
            if copy.live:
                self.shadows.keep(entry, block.bid, owner, None)
            return
        if copy.live:
            self.shadows.keep(entry, block.bid, owner, store.granted(block, entry.version))
        copy.do(lambda: granted(store, bases, block, entry))

    def _commit(self, copy: LiveCopy, store: Store, entry: c.Commit, out: list[Action]) -> None:
        block, bases = copy.block, copy.bases
        counted = [of_block(one, block.bid) for one in self._shard.commits.counted(entry)]

        def commit() -> None:
            shares = shares_in(block.bid, entry, counted, bases)
            adopted = self._shard.commits.adopted(block, entry, shares)
            update_block(store, block, shares, entry, adopted=adopted)
            for one, held in zip(entry.counted, counted, strict=True):
                bases.release(one.contribution.incarnation, held.grant)
            if entry.group == MODEL and self.shadows.awaits(block.bid, entry.version):
                made = store.granted(block, entry.version)
                self.shadows.made(block.bid, entry.version, made)

        copy.do(commit)
        if not copy.live:
            self._waiting_bytes += sum(p.nbytes for one in counted for p in one.payloads.values())
            if self._waiting_bytes > WAITING_BYTES_MAX:
                why = f"more than {WAITING_BYTES_MAX} bytes of gradients waited for its state"
                self._give_up(copy, why, out)

    def _give_up(self, copy: LiveCopy, why: str, out: list[Action]) -> None:
        copy.clear()
        if not self._filling():
            self._waiting_bytes = 0
        out.append(ToBroker(c.Copied(copy.placement, [copy.block.bid], why)))

    # --- states on their way -------------------------------------------------------------------

    def _filling(self) -> list[LiveCopy]:
        return [one for one in self.mirrored.values() if one.store is not None and not one.live]

    def take(self, message: d.Fetch | d.Part, payload: Array | None, out: list[Action]) -> None:
        """Another server asks for a state, or sends a part of one."""
        if isinstance(message, d.Fetch):
            self._send(message, out)
            return
        copy = self.mirrored.get(message.bid)
        if copy is None or copy.placement != message.placement or copy not in self._filling():
            return
        if payload is None or not message.at < message.of <= PARTS_MAX:
            raise ProtocolError(f"part {message.at} of {message.of} of block {message.bid}")
        copy.of, copy.head = message.of, message.head
        copy.parts[message.at] = payload.copy()
        if len(copy.parts) == copy.of:
            self._fill(copy, out)

    def _send(self, message: d.Fetch, out: list[Action]) -> None:
        placement, head, stream = self._given.get(message.bid, (-1, 0, np.empty(0, np.uint8)))
        if placement != message.placement:
            return
        of = parcels.parts_of(stream)
        for at in message.parts or range(of):
            if at < of:
                part = d.Part(
                    self._shard.number, message.asker, placement, message.bid, at, of, head
                )
                out.append(ToServer(message.asker, part, parcels.part(stream, at)))

    def _fill(self, copy: LiveCopy, out: list[Action]) -> None:
        stream = np.concatenate([copy.parts[at] for at in range(copy.of)])
        bid, store = copy.block.bid, copy.store
        assert store is not None
        try:
            found = parcels.unpack(copy.head, stream, copy.block.size)
        except ProtocolError as error:
            self._give_up(copy, str(error), out)
            return
        # Where workers of this machine read them without a copy.
        values = found.state.current.values
        found.state.current = Pinned(store.memory.empty(values.size, values.dtype))
        found.state.current.values[:] = values
        store.blocks[bid] = found.state
        store.views.adopt(bid, found.view)
        for (who, grant), pinned in found.bases.items():
            copy.bases.add(who, grant, {bid: pinned})
        self._shard.contributions.know(self._group(copy.block), found.marks)
        copy.live, waiting = True, copy.waiting[:]
        copy.parts.clear()
        copy.waiting.clear()
        for act in waiting:
            act()
        if not self._filling():
            self._waiting_bytes = 0
        out.append(ToBroker(c.Copied(copy.placement, [bid])))

    def requests(self, now: float) -> list[Action]:
        """Return what to ask other servers for now, and the goodbye of a server that may go."""
        out: list[Action] = []
        for copy in self._filling()[:FETCHED_AT_ONCE]:
            if copy.asked_at is None or now - copy.asked_at >= ASK_AGAIN_S:
                out.append(self._request(copy))
                copy.asked_at, copy.asked = now, copy.asked + 1
        if self.retiring and not self._left and self._shard.grants.idle:
            self._left = True
            out.append(ToBroker(c.Bye("it was drained")))
        return out

    def _request(self, copy: LiveCopy) -> Action:
        assert copy.source is not None
        missing = [at for at in range(copy.of) if at not in copy.parts][:PARTS_ASKED_MAX]
        number = self._shard.number
        fetch = d.Fetch(number, copy.placement, copy.block.bid, copy.index, missing)
        # Servers that cannot reach each other can by way of the broker, which reaches all.
        relayed = bool(copy.relay) and copy.asked % 2 == 1
        address = copy.relay if relayed else copy.source.address
        return ToServer(copy.source.index, fetch, None, address, relayed)

    def got(self, message: d.Got) -> None:
        """A worker has these blocks, which this server may have copies of."""
        bids = [bid for bid in message.bids if bid in self.mirrored]
        if bids and message.group == MODEL:
            self.shadows.got(message.incarnation, message.grant, bids)

    def done(self, name: ContributionId, grant: int) -> None:
        """A batch of a worker is done: it asks for no more of a grant on demand."""
        if name.group == MODEL:
            self.shadows.done(name.incarnation, grant)

    def held(self, names: list[tuple[ContributionId, int]]) -> c.Held:
        """Return the report that these are held; if norms have a limit, with the square sums of
        copies, too, as their owners may be lost."""
        shard = self._shard
        held = shard.commits.held(names, shard.index, shard.mine(MODEL))
        live = [one for one in self.mirrored.values() if one.live]
        if not held.squares or not live:
            return held
        squares = []
        for (name, _), known in zip(held.contributions, held.squares, strict=True):
            made = shard.contributions.open.get(name)
            if made is None or name.group != MODEL:
                squares.append(known)
                continue
            # As if it were all of an update, with a weight of 1: nothing is divided.
            entry = c.Sum(MODEL, 1, [c.Counted(name, 1.0)])
            of = [one for one in live if self._group(one.block) == MODEL]
            squares.append(known + [(one.block.bid, squares_of(one, entry, made)) for one in of])
        return structs.replace(held, squares=tuple(squares))

    def elsewhere(self, bid: int, placement: int) -> bool:
        """Return whether what goes by a placement counts elsewhere, though it comes here too: the
        block has moved away, or a later copy of it is made here."""
        copy = self.mirrored.get(bid)
        return bid in self.former or (copy is not None and placement < copy.since)

    @property
    def left(self) -> bool:
        """Whether this server has said goodbye, as it was drained."""
        return self._left
