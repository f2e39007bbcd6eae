"""What a server sends to workers: blocks of granted versions, under byte credits.

A granted version stays pinned, bit for bit, until the worker says that it has all of it (or is no
member any more); a commit in between writes new arrays. Under a grant on demand a block is sent
when it is asked for, as often as it is, and all stay pinned until the worker has done with the
batch. Knows no sockets.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass

import numpy as np
from msgspec import structs

from zkv import control as c
from zkv import data_messages as d
from zkv.dtypes import Array
from zkv.errors import ProtocolError
from zkv.pace import Pace
from zkv.window import Window, ready
from zkv.wire import MODEL, BlockSpec
from zkv_brokers.aggregates import spans
from zkv_brokers.store import Pinned, Store

FIRST = 2**60
"""What is asked for has places from minus this on: before all blocks that are sent unasked."""
SENT_MAX = 4
"""Grants of late that a worker's next one may refer to: it keeps the values of the last two."""
NO_BYTES: Array = np.empty(0, np.uint8)
RESEND_S = 4.0
"""Twice a worker's own pause, which asks for what it misses: this is for a lost `Got`."""


@dataclass(frozen=True, slots=True)
class ToWorker:
    """Send this data message, and the payload beside it, to the worker with this incarnation."""

    incarnation: int
    message: d.Data
    payload: Array | None


@dataclass(slots=True)
class _Piece:
    """One block of a grant: the values as granted, or a copy of a few keys of them.

    `coded` is what is sent instead of the values, until the worker says that it has no use for it.
    """

    message: d.Block
    values: Array
    pinned: Pinned | None
    coded: Array | None = None

    @property
    def payload(self) -> Array:
        return self.values if self.coded is None else self.coded

    def make_whole(self) -> None:
        """Send the values from now on. The window counts the bytes that it was offered: a block
        at most is not counted."""
        plain = {"codec": "none", "form": None, "base": -1, "deltas": (), "like": -1}
        self.message, self.coded = structs.replace(self.message, **plain), None


class Grants:
    """All grants that are not fully received, and one window of byte credits for each worker."""

    def __init__(
        self,
        store: Store,
        *,
        window_bytes: int,
        resend_s: float = RESEND_S,
        priority: bool = True,
    ) -> None:
        self.window_bytes = window_bytes
        self.is_handed_on: Callable[[int, int, int], bool] = lambda version, bid, who: False
        """Whether another worker hands a block of a version on to a worker (an incarnation)."""
        self._resend_s = resend_s
        self._store = store
        self._open: dict[tuple[int, int, int], dict[int, _Piece]] = {}
        self._ahead: dict[tuple[int, int, int], tuple[c.Grant, set[int], int]] = {}
        """Grants of a version whose update has not come, the blocks of it that are to come, and
        which grant of all it is."""
        self.priority = priority
        self._serial, self._newest, self._asks = 0, -1, 0
        self.pace = Pace()
        self._windows: dict[int, Window[_Piece]] = {}
        self._asked: dict[tuple[int, int, int], set[int]] = {}
        """Grants on demand, and the blocks of them that are asked for and have not arrived."""
        self._sent: dict[int, dict[int, int]] = {}
        """By incarnation, the last grants of the model and their versions."""
        self._handed_on: set[tuple[int, int, int, int]] = set()
        """Blocks of grants that another worker hands on: sent if they are asked for."""
        self._reachable: set[int] = set()
        self._again: list[tuple[int, _Piece]] = []

    def greet(self, incarnation: int, near: bool = False) -> None:
        """Note that there is a route to this worker; nothing is sent before. `near`: it does not
        leave this machine, so there is no link whose pace is to be kept."""
        if near and incarnation not in self._reachable:
            self._window(incarnation).pace = None
        self._reachable.add(incarnation)

    def add(self, entry: c.Grant, blocks: Sequence[BlockSpec]) -> None:
        """Pin the blocks of a grant as they are now and queue them for the worker, unless it will
        ask for them."""
        pieces: dict[int, _Piece] = {}
        name, serial = (entry.incarnation, entry.group, entry.grant), self._turn(entry)
        self._note(entry)
        named = frozenset(entry.kids)
        for block in blocks:
            piece = self._piece(entry, block, named)
            pieces[block.bid] = piece
            if not entry.on_demand:
                self._offer(piece, serial)
        for before in self._open.pop(name, {}).values():
            # A worker that uses a token twice must not leave the first version pinned for ever.
            self._unpin(before)
        if pieces:
            self._open[name] = pieces
            if entry.on_demand:
                self._asked[name] = set()

    def foresee(self, entry: c.Grant, blocks: Sequence[BlockSpec]) -> None:
        """Note a grant of a version that the log has not reached: `fill` sends its blocks.

        Raises:
            ProtocolError: it is one on demand: nothing may be sent for it unasked.
        """
        if entry.on_demand:
            raise ProtocolError(
                f"grant {entry.grant} of incarnation {entry.incarnation} is on demand, but the log "
                f"has not reached its version {entry.version}"
            )
        name = (entry.incarnation, entry.group, entry.grant)
        self._note(entry)
        serial = self._turn(entry)
        if blocks:
            self._ahead[name] = (entry, {block.bid for block in blocks}, serial)

    def resume(
        self,
        entry: c.Grant,
        blocks: Sequence[BlockSpec],
        pinned: Mapping[int, Pinned],
        coming: Set[int],
    ) -> None:
        """Send these blocks of a grant in the place of a server that is lost, as they are pinned
        already (by block), unless the worker will ask for them; and those that are `coming` when
        the log has come to them."""
        name, serial = (entry.incarnation, entry.group, entry.grant), self._turn(entry)
        if coming:
            _, missing, serial = self._ahead.get(name, (entry, set[int](), serial))
            self._ahead[name] = entry, missing | coming, serial
        if not blocks:
            return
        pieces = self._open.setdefault(name, {})
        if entry.on_demand:
            self._asked.setdefault(name, set())
        for block in blocks:
            piece = pieces[block.bid] = self._piece(
                entry, block, frozenset(entry.kids), pinned[block.bid]
            )
            pinned[block.bid].pins -= 1
            if not entry.on_demand:
                self._offer(piece, serial)

    def _note(self, entry: c.Grant) -> None:
        """Note a grant whose values later ones may be said to be like; who asks for them keeps
        none."""
        if entry.group == MODEL and not entry.kids and not entry.on_demand:
            sent = self._sent.setdefault(entry.incarnation, {})
            sent[entry.grant] = entry.version
            if len(sent) > SENT_MAX:
                del sent[next(iter(sent))]

    def forget_sent(self) -> None:
        """From here on blocks, or how they are sent, are others than under the grants so far."""
        self._sent.clear()

    def _like(self, entry: c.Grant, block: BlockSpec) -> int:
        """Return the grant before this one, if under it the block had the same values; -1: not.

        Only one that has not been taken back: its version may never have come to be.
        """
        earlier = [
            (grant, version)
            for grant, version in self._sent.get(entry.incarnation, {}).items()
            if grant < entry.grant
        ]
        if not earlier or entry.on_demand:
            return -1
        grant, version = earlier[-1]
        same = self._store.blocks[block.bid].changed <= version <= entry.version
        return grant if same else -1

    def fill(self, block: BlockSpec, version: int, pinned: Pinned) -> None:
        """Send a block of a version to those who were granted it before it was made."""
        for name, (entry, missing, serial) in list(self._ahead.items()):
            if entry.version != version or block.bid not in missing:
                continue
            missing.discard(block.bid)
            if not missing:
                del self._ahead[name]
            piece = self._piece(entry, block, frozenset(entry.kids), pinned)
            self._spare(piece, entry, block)
            self._open.setdefault(name, {})[block.bid] = piece
            name_of = (version, block.bid, entry.incarnation)
            if piece.message.like < 0 and self.is_handed_on(*name_of):
                self._handed_on.add((*name, block.bid))
            else:
                self._offer(piece, serial)

    def _turn(self, entry: c.Grant) -> int:
        """Return the place of a grant in the order of sending: grants of one version of the model
        have the same, so that none of their workers gets its last layers before another gets its
        first ones."""
        if entry.group != MODEL or entry.version != self._newest:
            self._serial += 1
        if entry.group == MODEL:
            self._newest = entry.version
        return self._serial

    def _window(self, incarnation: int) -> Window[_Piece]:
        window = self._windows.get(incarnation)
        if window is None:
            window = Window(self.window_bytes, resend_s=self._resend_s, pace=self.pace)
            self._windows[incarnation] = window
        return window

    def _offer(self, piece: _Piece, serial: int, place: int | None = None) -> None:
        """Queue a block: behind those of older grants, and of its own at its place; None: in the
        order of keys, as a forward pass needs them."""
        message = piece.message
        window = self._window(message.incarnation)
        name = (message.group, message.grant, message.bid)
        order = (serial, message.bid if place is None else place) if self.priority else ()
        window.offer(name, piece.payload.nbytes, piece, order)

    def _piece(
        self,
        entry: c.Grant,
        block: BlockSpec,
        named: frozenset[int],
        pinned: Pinned | None = None,
    ) -> _Piece:
        """Make a block's message, of those of its keys that are named (none: of all)."""
        made = pinned is not None
        pinned = pinned or self._store.blocks[block.bid].current
        wanted = [kid for kid in block.kids if kid in named] if named else block.kids
        kids = [] if wanted == block.kids else wanted
        message = d.Block(
            server=block.server,
            incarnation=entry.incarnation,
            group=entry.group,
            grant=entry.grant,
            version=entry.version,
            bid=block.bid,
            codec="none",
            kids=kids,
        )
        if kids:
            parts = [pinned.values[a:b] for segment, a, b in spans(block) if segment.kid in named]
            return _Piece(message, np.concatenate(parts), None)
        if entry.group == MODEL and not made:
            pinned = self._store.granted(block, entry.version)
        pinned.pins += 1
        piece = _Piece(message, pinned.values, pinned)
        if entry.group == MODEL and not made and not self._spare(piece, entry, block):
            fields, piece.coded = self._store.views.coded(block, pinned.values, entry)
            piece.message = structs.replace(message, **fields)
        return piece

    def _spare(self, piece: _Piece, entry: c.Grant, block: BlockSpec) -> bool:
        """Send no values, if the worker has the same ones by its grant before; return whether."""
        like = self._like(entry, block)
        if like < 0 or piece.pinned is not self._store.blocks[block.bid].current:
            # It was made ahead; or it has a lossy codec, and what workers hold of it moves though
            # its values do not.
            return False
        piece.message, piece.coded = structs.replace(piece.message, like=like), NO_BYTES
        return True

    @staticmethod
    def _unpin(piece: _Piece) -> None:
        if piece.pinned is not None:
            piece.pinned.pins -= 1

    def got(
        self, incarnation: int, group: int, grant: int, bids: Sequence[int], now: float
    ) -> None:
        """The worker has these blocks: free their credit and unpin them (it may ask for one on
        demand again: that stays pinned)."""
        window = self._windows.get(incarnation)
        pieces = self._open.get((incarnation, group, grant), {})
        asked = self._asked.get((incarnation, group, grant))
        for bid in bids:
            arrived = window is not None and window.acknowledge((group, grant, bid), now)
            if asked is not None:
                # A late word of an earlier sending says nothing of one that waits for credit.
                asked -= {bid} if arrived else set()
            elif bid in pieces:
                self._unpin(pieces.pop(bid))
                self._handed_on.discard((incarnation, group, grant, bid))
        if not pieces:
            self._open.pop((incarnation, group, grant), None)

    def drop(self, incarnation: int, group: int, grant: int) -> None:
        """The grant no longer counts: unpin its blocks and do not send what is still queued."""
        if group == MODEL:
            self._sent.get(incarnation, {}).pop(grant, None)
        self._ahead.pop((incarnation, group, grant), None)
        self._asked.pop((incarnation, group, grant), None)
        pieces = self._open.pop((incarnation, group, grant), {})
        self._handed_on -= {(incarnation, group, grant, bid) for bid in pieces}
        for piece in pieces.values():
            if piece.pinned is not None:
                piece.pinned.pins -= 1
        window = self._windows.get(incarnation)
        if window is not None and pieces:
            window.forget({(group, grant, bid) for bid in pieces})

    def done(self, incarnation: int, group: int, grant: int) -> None:
        """The worker has finished its batch: it asks for no more of a grant on demand."""
        if (incarnation, group, grant) in self._asked:
            self.drop(incarnation, group, grant)

    def ask(self, message: d.Ask) -> None:
        """The worker lacks these blocks: send again what has been sent before, and what is on
        demand for the first time."""
        who, group, grant = message.incarnation, message.group, message.grant
        window = self._windows.get(who)
        pieces = self._open.get((who, group, grant), {})
        for bid in message.whole:
            if bid in pieces:
                pieces[bid].make_whole()
        asked = self._asked.get((who, group, grant))
        for bid in message.bids:
            if bid not in pieces:
                continue
            handed_on = (who, group, grant, bid) in self._handed_on
            if handed_on or (asked is not None and bid not in asked):
                self._handed_on.discard((who, group, grant, bid))
                if asked is not None:
                    asked.add(bid)
                # Somebody waits for it now: before blocks that are sent unasked, and what was
                # asked for first goes first, whatever its place in the model.
                self._asks += 1
                self._offer(pieces[bid], self._serial, self._asks - FIRST)
            elif window is not None and window.is_sent((group, grant, bid)):
                self._again.append((who, pieces[bid]))

    def outgoing(self, number: int, now: float) -> list[ToWorker]:
        """Return the blocks that may be sent now, for all workers that can be reached."""
        out = [
            ToWorker(incarnation, piece.message, piece.payload)
            for incarnation, piece in self._again
        ]
        self._again.clear()
        windows = [w for who, w in self._windows.items() if who in self._reachable and len(w)]
        pieces = ready(windows, now)
        return out + [ToWorker(p.message.incarnation, p.message, p.payload) for p in pieces]

    def keep_only(self, members: set[int]) -> None:
        """Unpin and forget what was granted to others."""
        for name in [name for name in self._open if name[0] not in members]:
            for piece in self._open.pop(name).values():
                self._unpin(piece)
        self._handed_on = {one for one in self._handed_on if one[0] in members}
        self._ahead = {name: one for name, one in self._ahead.items() if name[0] in members}
        self._asked = {name: bids for name, bids in self._asked.items() if name[0] in members}
        self._sent = {who: sent for who, sent in self._sent.items() if who in members}
        self._windows = {who: window for who, window in self._windows.items() if who in members}
        self._reachable &= members

    @property
    def idle(self) -> bool:
        """Whether nobody waits for anything that was granted."""
        return not (self._open or self._ahead or any(map(len, self._windows.values())))

    @property
    def pinned_versions(self) -> int:
        """How many different model versions somebody still has to receive."""
        return len({p.message.version for pieces in self._open.values() for p in pieces.values()})
