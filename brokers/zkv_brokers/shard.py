"""The shard: all that one server is, without its sockets.

Control messages, data messages and the time come in; `handle` is the one method that changes
anything; what has to be sent comes out. A shard decides nothing: it applies the broker's log in
order, keeps contributions until the log settles them, and sends what grants say.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

import numpy as np

from zkv import control as c
from zkv import data_messages as d
from zkv.dtypes import Array
from zkv.errors import ProtocolError
from zkv.layout import Layout
from zkv.spans import Spans
from zkv.table_layout import bid_of
from zkv.wire import MODEL, SEEDS, BlockSpec, ContributionId
from zkv_brokers.commits import Commits
from zkv_brokers.configured import down_of, settings_of, up_of
from zkv_brokers.contributions import Contributions, Open
from zkv_brokers.copies import Copies
from zkv_brokers.grants import Grants, ToWorker
from zkv_brokers.guards import Problem, admit, check_values, may_wait
from zkv_brokers.joints import Joints
from zkv_brokers.keeping import Keeping
from zkv_brokers.memory import Memory
from zkv_brokers.parked import Parked
from zkv_brokers.shard_events import Action as Action
from zkv_brokers.shard_events import Event as Event
from zkv_brokers.shard_events import FromBroker as FromBroker
from zkv_brokers.shard_events import FromWorker as FromWorker
from zkv_brokers.shard_events import Prepare as Prepare
from zkv_brokers.shard_events import Reset as Reset
from zkv_brokers.shard_events import ToBroker as ToBroker
from zkv_brokers.shard_events import ToServer as ToServer
from zkv_brokers.shard_keys import (
    discard,
    drop,
    keep_only,
    no_block,
    opened,
    regroup,
    status_of,
)
from zkv_brokers.shortage import spared
from zkv_brokers.store import Store
from zkv_brokers.traffic import Traffic


class Shard:
    """One server's part of the model. `number` is set by the broker's welcome.

    `clock` is the store's, `spans` that of the commits.
    """

    def __init__(
        self,
        *,
        window_bytes: int,
        priority: bool = True,
        clock: Callable[[], float] = lambda: 0.0,
        spans: Spans | None = None,
        memory: Memory | None = None,
    ) -> None:
        self.number = self.term = 0
        self.index = 0
        """Entries applied: the next one has this index."""
        self.started = False
        self.layout = Layout()
        self.store = Store(self.layout, clock, memory)
        self.contributions = Contributions()
        self.commits = Commits(self.store, self.contributions, spans)
        self.tables = self.commits.tables
        self.joints = Joints(self.layout, self.contributions)
        self.grants = Grants(self.store, window_bytes=window_bytes, priority=priority)
        self.grants.is_handed_on = self.joints.is_handed_on
        self.copies, self.keeping = Copies(self), Keeping(self)
        self.traffic = Traffic()
        self.versions: dict[int, int] = {}
        self.members: set[int] = set()
        self.inits: dict[int, c.Init] = {}
        self.seed_bids: dict[int, frozenset[int]] = {}
        self.groups: set[int] = set()
        self._acks: dict[int, list[tuple[ContributionId, int]]] = {}
        self._held: list[tuple[ContributionId, int]] = []
        self._voids: list[Action] = []
        self._parked = Parked()
        self._hear = partial(spared, self._from_worker, self._void, self.contributions)

    def handle(self, event: Event, now: float) -> list[Action]:
        """Take one event in and return what to send, in order.

        Raises:
            ProtocolError: it is not for servers, or not the next entry of the log.
        """
        return self.take(event, now) + self.turn_over(now)

    def take(self, event: Event, now: float) -> list[Action]:
        """Take one event in, and keep receipts and reports back for `turn_over`."""
        out: list[Action] = []
        match event:
            case FromBroker(message):
                self._from_broker(message, out)
            case FromWorker():
                self._hear(event, out, now)
            case Reset():
                grants, spans = self.grants, self.commits.spans
                self.__init__(  # type: ignore[misc]
                    window_bytes=grants.window_bytes,
                    priority=grants.priority,
                    clock=self.store.clock,
                    spans=spans,
                    memory=self.store.memory,
                )
            case _:
                self.keeping.hear(event, out)
        return out

    def turn_over(self, now: float) -> list[Action]:
        """Return what goes out once for all events of a turn of the loop."""
        out: list[Action] = []
        for incarnation, items in self._acks.items():
            out.append(ToWorker(incarnation, d.Ack(self.number, incarnation, items), None))
        self._acks.clear()
        out += self._voids
        self._voids.clear()
        if self._held:
            out.append(ToBroker(self.copies.held(self._held)))
            self._held = []
        out.extend(self.tables.outgoing(self.number))
        out.extend(self.traffic.sent(self.grants.outgoing(self.number, now)))
        return [*out, *self.copies.requests(now)]

    # --- the log -----------------------------------------------------------------------------

    def _from_broker(self, message: c.Message, out: list[Action]) -> None:
        match message:
            case c.ServerWelcome(index=index, term=term):
                self.number, self.term = index, term
            case c.Log(term=term, index=index, entries=entries):
                if term < self.term or index != self.index:
                    wanted = (self.term, self.index)
                    raise ProtocolError(f"log entry ({term}, {index}), expected {wanted}")
                self.term = term
                for entry in entries:
                    self._apply(entry, out)
                    self.index += 1
            case c.Catchup():
                for entry in message.entries:
                    self._apply(entry, out)
                if message.last:
                    self.term, self.index = message.term, message.index
                    self.versions = dict(message.versions)
        self._unpark(out)

    def _apply(self, entry: c.Entry, out: list[Action]) -> None:
        out.extend(self.copies.note(entry))
        match entry:
            case c.Mirror() | c.Copy() | c.Move() | c.Unmirror() | c.Retire():
                out.extend(self.copies.apply(entry))
                self._make()
            case c.Snapshot() | c.Restore():
                self.keeping.apply(entry, out)
            case c.Init():
                self.inits[entry.init] = entry
                mine = (b.bid for b in entry.blocks if b.server == self.number and b.segments)
                self.seed_bids[entry.init] = frozenset(mine)
                self.groups.add(MODEL)
                group = SEEDS if entry.plain else MODEL
                self.layout.add(entry.keys, entry.blocks, group, entry.tables)
                self.tables.add(entry.tables, self.number)
            case c.Drop(init=init):
                del self.seed_bids[init]
                drop(self, self.inits.pop(init))
            case c.Regroup(kid=kid, group=group, bid=bid):
                self.groups.add(group)
                regroup(self, kid, group, bid)
            case c.Grant():
                self.started = True
                self._grant(entry)
            case c.Expect():
                self.commits.streaming.expect(entry)
                self._make()
            case c.Sum(group=group, version=version):
                sums = self.commits.square_sums(entry, self.mine(group))
                out.append(ToBroker(c.SquareSums(group, version, sums)))
            case c.Commit(group=group, version=version):
                self.started = True
                self.commits.commit(entry, self.mine(group))
                self.versions[group] = version
                if group == MODEL:
                    for block in self.mine(group):
                        self.grants.fill(block, version, self.store.blocks[block.bid].current)
            case c.Apart():
                self._held = self.joints.take_apart(entry, self._held)
            case c.Discard():
                discard(self, entry)
            case c.Configure():
                settings, down = settings_of(entry), down_of(entry)
                if settings != self.store.settings:
                    self.commits.streaming.check_settings()
                self.store.configure(settings)
                if self.store.views.use(down):
                    self.grants.forget_sent()
                out.append(Prepare((up_of(entry), down)))
            case c.Epoch():
                keep_only(self, entry)

    def _grant(self, entry: c.Grant) -> None:
        self.tables.granted(entry)
        layout, kids = self.layout, entry.kids
        of = layout.blocks_for(kids) if kids else layout.blocks_in(entry.group)
        blocks = [block for block in of if block.server == self.number]
        if entry.group != MODEL or entry.version <= self.versions.get(MODEL, 0):
            self.grants.add(entry, blocks)
            self.commits.granted(entry, blocks)
            return
        self.grants.foresee(entry, blocks)
        for block in blocks:
            made = self.commits.streaming.by_block.get(block.bid)
            if made is not None:
                self.grants.fill(block, entry.version, made[1].current)

    def _make(self, blocks: Sequence[BlockSpec] | None = None) -> None:
        """Make the next version of blocks (None: of all), where all for it is here, and send it as
        granted."""
        streaming, began = self.commits.streaming, self.store.clock()
        blocks = self.layout.blocks_in(MODEL) if blocks is None else blocks
        for block in filter(self.copies.is_made_here, blocks if streaming.version else ()):
            if (state := streaming.make(block, self._is_sound)) is not None:
                self.grants.fill(block, streaming.version, state.current)
        self.commits.update_s += self.store.clock() - began

    def mine(self, group: int) -> list[BlockSpec]:
        """Return the blocks of a group that this server owns."""
        return [b for b in self.layout.blocks_in(group) if b.server == self.number and b.segments]

    # --- data --------------------------------------------------------------------------------

    def _from_worker(
        self, message: d.Data, payload: Array | None, out: list[Action], now: float
    ) -> None:
        match message:
            case d.Greet(incarnation=incarnation, near=near):
                self.grants.greet(incarnation, near)
            case d.Push() | d.Done() | d.Ask() | d.AskRows() | d.Fetch() if (
                message.index > self.index
            ):
                self._parked.add(FromWorker(message, payload))
            case d.Push(contribution=name) | d.Done(contribution=name) if (
                name.incarnation not in self.members
            ):
                why = f"incarnation {name.incarnation} is no member (any more)"
                fenced = d.Fenced(self.number, name.incarnation, f"server {self.number}: {why}")
                out.append(ToWorker(name.incarnation, fenced, None))
            case d.Push(of=of) if payload is not None and of is not None:
                ways = (self.commits.streaming, self._make, self._report_if_held, self._ack)
                out += self.joints.take(message, payload, self.members, *ways)
            case d.Push() if payload is not None:
                self._push(message, payload)
            case d.Done():
                self._done(message)
            case d.Got(incarnation=incarnation, group=group, grant=grant, bids=bids):
                self.grants.got(incarnation, group, grant, bids, now)
                self.copies.got(message)
            case d.Ask():
                self.grants.ask(message)
            case d.AskRows() if payload is not None:
                self.tables.ask(message, payload)
            case d.Fetch() | d.Part():
                self.copies.take(message, payload, out)
            case _:
                raise ProtocolError(f"{type(message).__name__} is not for servers")

    def _unpark(self, out: list[Action]) -> None:
        waiting, self._parked = self._parked.waiting, Parked()
        for event in waiting:
            # What is wrong with one worker's message is no reason to drop the others'.
            with suppress(ProtocolError):
                self._hear(event, out, 0.0)

    def _ack(self, contribution: ContributionId, bid: int) -> None:
        self._acks.setdefault(contribution.incarnation, []).append((contribution, bid))

    def _push(self, message: d.Push, payload: Array) -> None:
        name = message.contribution
        elsewhere = name.group != SEEDS and self.copies.elsewhere(message.bid, message.placement)
        if elsewhere or self.contributions.is_settled(name, message.grant):
            self._ack(name, message.bid)
            return
        held = opened(self, name, message.grant)
        done = held.bids is not None and message.bid not in held.bids
        if message.bid not in held.payloads and not held.void and not done:
            block = self.layout.blocks.get(bid_of(message.bid))
            if block is None or not self._is_part(name, message.bid):
                self._void(name, held, no_block(self.number, name, message.bid))
            else:
                rows = self.tables.admit(message, payload)
                begun = self.commits.streaming.begun(name, held)
                streams = begun and self.copies.is_made_here(block)
                waits = rows is None and streams and may_wait(self.store, block, message)
                kept = rows or admit(self.store, block, message, payload, looks=not waits)
                if isinstance(kept, tuple):
                    self._void(name, held, kept)
                else:
                    held.payloads[message.bid] = kept
                    if waits:
                        held.unseen.add(message.bid)
                    self.traffic.carried(message.bid, payload.nbytes)
                    if message.weight is not None:
                        held.declared[message.bid] = message.weight
                    if streams:
                        self._make([block])
        self._ack(name, message.bid)
        self._report_if_held(name, held)

    def _done(self, message: d.Done) -> None:
        name = message.contribution
        if not self.contributions.is_settled(name, message.grant):
            held = opened(self, name, message.grant)
            seeds, at = name.group == SEEDS, message.placement
            here = [bid for bid in message.bids if seeds or not self.copies.elsewhere(bid, at)]
            strange = [bid for bid in here if not self._is_part(name, bid)]
            if strange:
                self._void(name, held, no_block(self.number, name, strange[0]))
            elif held.bids is None:
                # Said once: what was reported as held does not change any more.
                held.weight = message.weight
                held.bids = self.seed_bids[name.batch] if seeds else frozenset(here)
                held.skipped = frozenset(message.skipped)
                if self.commits.streaming.begun(name, held):
                    self._make()
            self._report_if_held(name, held)
        self.grants.done(name.incarnation, name.group, message.grant)
        self.copies.done(name, message.grant)
        self.tables.done(message)
        self._ack(name, -1)

    def _is_part(self, name: ContributionId, bid: int) -> bool:
        """Return whether this block is here and belongs to what is contributed to."""
        if name.group == SEEDS:
            return bid in self.seed_bids[name.batch]
        if bid_of(bid) in self.tables.parts:
            return name.group == MODEL
        block = self.layout.blocks.get(bid)
        here = block is not None and (block.server == self.number or bid in self.copies.mirrored)
        if block is None or not here or not block.segments:
            return False
        return self.layout.group_of[block.segments[0].kid] == name.group

    def _void(self, name: ContributionId, held: Open, problem: Problem) -> None:
        if held.void or held.reported:
            return
        key, reason = problem
        held.void = True
        held.payloads.clear()
        held.unseen.clear()
        self._voids.append(ToBroker(c.Void(name, held.grant, key, reason)))

    def _is_sound(self, name: ContributionId, block: BlockSpec) -> bool:
        """Look at what has come of a block, and refuse the contribution if it must not count."""
        held = self.contributions.open[name]
        values = held.dense(block.bid)
        assert isinstance(values, np.ndarray), "only what comes as it is waits to be looked at"
        problem = check_values(self.store, block, values)
        if problem is not None:
            self._void(name, held, problem)
        return problem is None

    def _report_if_held(self, name: ContributionId, held: Open) -> None:
        if held.void or held.reported or not held.complete or held.bids is None:
            return
        if not all(self._is_sound(name, self.layout.blocks[bid]) for bid in sorted(held.unseen)):
            return
        held.unseen.clear()
        held.payloads = {bid: held.payloads[bid] for bid in sorted(held.bids)}
        if name.group == SEEDS:
            for bid, payload in held.payloads.items():
                assert isinstance(payload, np.ndarray)
                self.store.put(self.layout.blocks[bid], payload)
            self.contributions.settle(name)
        held.reported = True
        self._held.append((name, held.grant))

    def held_elsewhere(self, names: Sequence[ContributionId]) -> None:
        """Some blocks of these contributions count elsewhere now: look what is complete."""
        for name in names:
            self._report_if_held(name, self.contributions.open[name])

    status = status_of
