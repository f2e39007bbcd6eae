"""A session's blocks of grants on their way here.

Those that arrive are put together by grant; what is missing for too long is asked for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Set

from zkv import control as c
from zkv import data_messages as d
from zkv.dtypes import DTYPES, Array
from zkv.errors import ProtocolError
from zkv.layout import Layout
from zkv.wire import MODEL, PULLS, BlockSpec
from zkv_codecs.backend import fastest
from zkv_codecs.deltas import arrived
from zkv_workers.assembly import Assembly, coded
from zkv_workers.signals import Narrate, SendData

EARLY_BLOCKS_MAX = 4096
"""Blocks kept for grants that are not announced yet; the rest is asked for later."""
OVER_MAX = 256
"""Grants of late that are complete or cancelled: a block of theirs that comes again is dropped."""


class Downloads:
    """Grants whose blocks are coming in, by (group, grant).

    `others` tells the servers that have copies of a block: receipts of the model's go there, too.
    """

    def __init__(
        self,
        layout: Layout,
        *,
        ask_s: float,
        others: Callable[[int], Iterable[int]] = lambda bid: (),
    ) -> None:
        self._layout = layout
        self._others = others
        self._ask_s = ask_s
        self._open: dict[tuple[int, int], Assembly] = {}
        self._early: dict[tuple[int, int], dict[int, tuple[d.Block, Array]]] = {}
        self._over: deque[tuple[int, int]] = deque(maxlen=OVER_MAX)
        self._got: dict[tuple[int, int, int, int], list[int]] = {}
        self._troubles: list[str] = []
        self._held: Assembly | None = None
        """The newest grant of the model that is here completely: what deltas are added to."""
        self._before: Assembly | None = None
        """The one before that, as long as the log has not come to the newest one's version."""
        self._version = 0
        """That the log has come to."""
        self._backend = fastest()
        self.bytes_received = 0
        self.model_s = 0.0
        """Seconds from a grant until the last block of its model was here, over all grants."""

    def held(self, version: int) -> Assembly | None:
        """Return the newest grant of the model at this version, if all of it is here still."""
        for one in (self._held, self._before):
            if one is not None and one.granted.version == version:
                return one
        return None

    @property
    def held_blocks(self) -> Mapping[int, Array]:
        """The blocks that deltas are added to."""
        return {} if self._held is None else self._held.blocks

    def committed(self, version: int) -> None:
        """The log has come to this version: it will not grant an older one again."""
        self._version = max(self._version, version)
        self._let_go()

    def _let_go(self) -> None:
        """Forget what is older than any version that may be granted; a server has to keep it."""
        if self._held is not None and self._held.granted.version <= self._version:
            self._before = None

    def receipts(self) -> list[SendData | Narrate]:
        """Return one receipt for each server and grant: their blocks have arrived since.

        What was of no use is told to the user instead.
        """
        got, self._got = self._got, {}
        troubles, self._troubles = self._troubles, []
        return [
            *(Narrate("warning", text) for text in troubles),
            *(
                SendData(server, d.Got(incarnation, group, grant, bids), None)
                for (server, incarnation, group, grant), bids in got.items()
            ),
        ]

    def expect(self, granted: c.Granted, blocks: Iterable[BlockSpec], now: float) -> Assembly:
        """Wait for these blocks (on demand: for what is wanted of them); some may be here."""
        homes = {block.bid: block.server for block in blocks}
        missing = set[int]() if granted.on_demand else set(homes)
        assembly = Assembly(granted, missing, now, now, homes)
        name = (granted.group, granted.grant)
        self._open[name] = assembly
        for message, payload in self._early.pop(name, {}).values():
            if self._put(assembly, message, payload, now) and coded(message):
                self._receipt(message)
        if assembly.complete:
            self._complete(name, assembly, now)
        return assembly

    def _complete(self, name: tuple[int, int], assembly: Assembly, now: float) -> None:
        self._close(name)
        if assembly.granted.group == MODEL:
            self._before, self._held = self._held, assembly
            self._let_go()
            self.model_s += now - assembly.since

    def _close(self, name: tuple[int, int]) -> None:
        self._open.pop(name, None)
        self._early.pop(name, None)
        self._over.append(name)

    def take(self, message: d.Block, payload: Array, now: float) -> Assembly | None:
        """Take a block in; return the grant that it is of, if that is open."""
        name = (message.group, message.grant)
        self.bytes_received += payload.nbytes
        assembly = self._open.get(name)
        if assembly is None:
            # A server forgets a block that it has a receipt for: none before it is of use here.
            if name in self._over:
                self._receipt(message)
            elif sum(map(len, self._early.values())) < EARLY_BLOCKS_MAX:
                self._early.setdefault(name, {})[message.bid] = (message, payload)
                if not coded(message):
                    self._receipt(message)
            return None
        if self._put(assembly, message, payload, now):
            self._receipt(message, on_demand=assembly.granted.on_demand)
        if assembly.complete:
            self._complete(name, assembly, now)
        return assembly

    def followers(self, bid: int, now: float) -> list[Assembly]:
        """Return the grants that have got this block now, as it is that of one before."""
        found = []
        for name, assembly in list(self._open.items()):
            message = assembly.alike.get(bid)
            if message is not None and self._put_alike(assembly, message, now):
                self._receipt(message)
                if assembly.complete:
                    self._complete(name, assembly, now)
                found.append(assembly)
        return found

    def _put_alike(self, assembly: Assembly, message: d.Block, now: float) -> bool:
        """Take in what an earlier grant has of a block; return whether that is here."""
        known = (self._open.get((message.group, message.like)), self._held, self._before)
        earlier = (one for one in known if one is not None and one.granted.grant == message.like)
        return assembly.put_alike(message, next(earlier, None), now)

    def _receipt(self, message: d.Block, *, on_demand: bool = False) -> None:
        # What comes on demand may be asked for again, of whoever has a copy.
        model = message.group == MODEL and not on_demand
        others = self._others(message.bid) if model else ()
        for server in {message.server, *others}:
            name = (server, message.incarnation, message.group, message.grant)
            self._got.setdefault(name, []).append(message.bid)

    def lost(self, here: Set[int], index: int) -> list[int]:
        """Servers are gone that are not `here`: who has taken over from them, from this index of
        the log on, sends what they have not. Return the pulls that have to be asked for again."""
        pulls = []
        for name, assembly in list(self._open.items()):
            gone = {bid for bid, home in assembly.homes.items() if home not in here}
            missing = gone & assembly.missing
            if missing and assembly.granted.group == PULLS:
                self.drop(*name)
                pulls.append(assembly.granted.token)
            elif gone:
                assembly.homes.update({bid: self._layout.blocks[bid].server for bid in gone})
                assembly.index = index
                assembly.refused |= missing
        return pulls

    def _put(self, assembly: Assembly, message: d.Block, payload: Array, now: float) -> bool:
        """Take a block in, if it is one that is missing; return whether it may be forgotten."""
        block = self._layout.blocks.get(message.bid)
        if block is None or message.bid not in assembly.missing:
            return True
        if message.like >= 0:
            return self._put_alike(assembly, message, now)
        if coded(message):
            return self._put_coded(assembly, block, message, payload, now)
        dtype = self._layout.dtype(block)
        kids = set(message.kids or block.kids)
        if kids != (set(assembly.granted.kids) or kids) & set(block.kids):
            return True
        size = sum(s.stop - s.start for s in block.segments if s.kid in kids)
        if payload.nbytes != size * dtype.itemsize:
            return True
        if payload.ctypes.data % dtype.itemsize:
            payload = payload.copy()
        if message.kids:
            assembly.parts[message.bid] = tuple(message.kids)
        assembly.put(message.bid, payload.view(DTYPES[dtype.name].stored), now)
        return True

    def _put_coded(
        self, assembly: Assembly, block: BlockSpec, message: d.Block, payload: Array, now: float
    ) -> bool:
        held = None
        if self._held is not None and block.bid in self._held.blocks:
            held = (self._held.granted.version, self._held.blocks[block.bid])
        try:
            dtype, right = self._layout.dtype(block), assembly.granted.version
            if message.version != right or message.kids or dtype.name != "float32":
                raise ProtocolError(
                    f"block {block.bid} ({dtype.name}, version {message.version}, {right} expected)"
                    f" cannot come by codec {message.codec} or as deltas"
                )
            shape = self._layout.shape(block)
            values = arrived(message, payload, shape, held, self._backend)
        except (ProtocolError, ImportError) as error:
            if assembly.refuse(block.bid):
                self._troubles.append(f"{error}; asking server {message.server} for plain values")
            return False
        assembly.put(block.bid, values, now)
        return True

    def drop(self, group: int, grant: int) -> None:
        """The grant no longer counts."""
        self._close((group, grant))
        for assembly in self._open.values():
            assembly.lose(group, grant)

    def owing(self) -> set[int]:
        """Return the servers that have not sent everything that was granted."""
        opened = self._open.values()
        return {assembly.homes[bid] for assembly in opened for bid in assembly.missing}

    def overdue(self, incarnation: int, now: float) -> list[SendData]:
        """Return requests for blocks that have not come for too long, or not in a form of use."""
        asks = []
        for assembly in self._open.values():
            wanted, assembly.refused = assembly.refused, set()
            if now - assembly.touched >= self._ask_s:
                wanted, assembly.touched = assembly.missing, now
            asks += self.asked(assembly, incarnation, sorted(wanted & assembly.missing))
        return asks

    def asked(self, assembly: Assembly, incarnation: int, bids: Iterable[int]) -> list[SendData]:
        """Return requests for blocks of a grant, in this order, one for each server."""
        granted = assembly.granted
        by_server: dict[int, list[int]] = {}
        for bid in bids:
            by_server.setdefault(assembly.homes[bid], []).append(bid)
        index = max(assembly.index, granted.index if granted.on_demand else 0)
        asks = []
        for server, some in by_server.items():
            whole = tuple(bid for bid in some if bid in assembly.useless)
            ask = d.Ask(incarnation, granted.group, granted.grant, some, whole, index)
            asks.append(SendData(server, ask, None))
        return asks

    def clear(self) -> None:
        """Drop everything (the broker started anew)."""
        self._open.clear()
        self._early.clear()
        self._over.clear()
        self._held = self._before = None
        self._version = 0
