"""The shard: all that one server is, without its sockets.

Control messages, data messages and the time come in; `handle` is the one method that changes
anything; what has to be sent comes out. A shard decides nothing: it applies the broker's log in
order, keeps contributions until the log settles them, and sends what grants say.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np

from zkv import control as c
from zkv import data_messages as d
from zkv.dtypes import Array, all_finite
from zkv.errors import ProtocolError
from zkv.layout import Layout
from zkv.optim import clip_factor
from zkv.optimizer_spec import OptimizerSpec
from zkv.wire import MODEL, SEEDS, BlockSpec, ContributionId
from zkv_brokers.contributions import Contributions, Open
from zkv_brokers.grants import Grants, ToWorker
from zkv_brokers.store import Settings, Share, Store, spans

PARKED_BYTES_MAX = 256 * 1024 * 1024
"""How much data that is ahead of the log is kept; beyond it the worker's resend brings it again."""


@dataclass(frozen=True, slots=True)
class FromBroker:
    """A control message, in order and exactly once."""

    message: c.Message


@dataclass(frozen=True, slots=True)
class FromWorker:
    """A data message, with the payload's bytes as a flat uint8 array if there is one."""

    message: d.Data
    payload: Array | None


@dataclass(frozen=True, slots=True)
class Reset:
    """The broker is a new instance, and nothing was granted yet: start from nothing."""


Event = FromBroker | FromWorker | Reset


@dataclass(frozen=True, slots=True)
class ToBroker:
    """Send this control message to the broker."""

    message: c.Message


Action = ToBroker | ToWorker


@dataclass(slots=True)
class _Parked:
    bytes_held: int = 0
    waiting: deque[FromWorker] = field(default_factory=deque)


class Shard:
    """One server's part of the model. `number` is set by the broker's welcome."""

    def __init__(self, *, window_bytes: int) -> None:
        self.number = 0
        self.term = 0
        self.index = 0
        """Entries applied: the next one has this index."""
        self.started = False
        self.layout = Layout()
        self.store = Store(self.layout)
        self.contributions = Contributions()
        self.grants = Grants(self.store, window_bytes=window_bytes)
        self.versions: dict[int, int] = {}
        self.members: set[int] = set()
        self._inits: dict[int, c.Init] = {}
        self._held: list[tuple[ContributionId, int]] = []
        self._parked = _Parked()

    def handle(self, event: Event, now: float) -> list[Action]:
        """Take one event in and return what to send, in order."""
        out: list[Action] = []
        match event:
            case FromBroker(message):
                self._from_broker(message, out)
            case FromWorker(message, payload):
                self._from_worker(message, payload, out, now)
            case Reset():
                self.__init__(window_bytes=self.grants.window_bytes)  # type: ignore[misc]
        if self._held:
            out.append(ToBroker(c.Held(self._held)))
            self._held = []
        out.extend(self.grants.outgoing(self.number, now))
        return out

    # --- the log -----------------------------------------------------------------------------

    def _from_broker(self, message: c.Message, out: list[Action]) -> None:
        match message:
            case c.ServerWelcome(index=index, term=term):
                self.number, self.term = index, term
            case c.Log(term=term, index=index, entries=entries):
                if term < self.term or index != self.index:
                    raise ProtocolError(
                        f"log entry ({term}, {index}) where ({self.term}, {self.index}) was expected"
                    )
                for entry in entries:
                    self._apply(entry, out)
                    self.index += 1
                self._unpark(out)
            case _:
                pass

    def _apply(self, entry: c.Entry, out: list[Action]) -> None:
        match entry:
            case c.Init():
                self._inits[entry.init] = entry
                self.layout.add(entry.keys, entry.blocks)
            case c.Drop(init=init):
                self._drop(init)
            case c.Regroup(kid=kid, group=group, bid=bid):
                self._regroup(kid, group, bid)
            case c.Grant():
                self.started = True
                self.grants.add(entry, [b for b in self._granted(entry) if b.server == self.number])
            case c.Sum(group=group, version=version, counted=counted):
                out.append(
                    ToBroker(
                        c.SquareSums(group, version, self._square_sums(group, version, counted))
                    )
                )
            case c.Commit():
                self.started = True
                self._commit(entry)
            case c.Discard(incarnation=incarnation, group=group, grant=grant, batch=batch):
                self.contributions.discard(incarnation, group, grant, batch)
            case c.Configure(optimizer=plain):
                self.store.configure(
                    Settings(
                        OptimizerSpec.from_plain(plain["model"]),
                        OptimizerSpec.from_plain(plain["plain"]),
                    )
                )
            case c.Epoch(members=members, kept=kept):
                self.members = set(members)
                self.contributions.keep_only(self.members, set(kept))
                self.grants.keep_only(self.members)

    def _drop(self, init: int) -> None:
        entry = self._inits.pop(init)
        kids = [key.kid for key in entry.keys if key.spec.same_as is None]
        for block in self.layout.blocks_for(kids):
            self.store.blocks.pop(block.bid, None)
        self.layout.remove(kids)
        self.contributions.discard(entry.incarnation, SEEDS, init, -1)

    def _regroup(self, kid: int, group: int, bid: int) -> None:
        (before, *rest) = self.layout.blocks_for([kid])
        self.layout.regroup(kid, group, bid)
        if not rest and bid in self.layout.blocks and before.server == self.number:
            self.store.split_out(kid, before, bid)

    def _granted(self, entry: c.Grant) -> list[BlockSpec]:
        if entry.kids:
            return self.layout.blocks_for(entry.kids)
        return self.layout.blocks_in(entry.group)

    def _mine(self, group: int) -> list[BlockSpec]:
        return [
            block
            for block in self.layout.blocks_in(group)
            if block.server == self.number and block.segments
        ]

    def _shares(self, block: BlockSpec, counted: list[c.Counted]) -> list[Share]:
        shares = []
        for one in counted:
            held = self.contributions.open[one.contribution]
            shares.append(Share(one.weight, held.payloads.get(block.bid), held.skipped))
        return shares

    def _square_sums(
        self, group: int, version: int, counted: list[c.Counted]
    ) -> list[tuple[int, float]]:
        return [
            (block.bid, self.store.square_sums(block, self._shares(block, counted), version - 1))
            for block in self._mine(group)
        ]

    def _commit(self, entry: c.Commit) -> None:
        def scale(spec: OptimizerSpec) -> float:
            if entry.square_sum is None or spec.clip_global_norm is None:
                return 1.0
            return clip_factor(entry.square_sum, spec.clip_global_norm)

        for block in self._mine(entry.group):
            shares = self._shares(block, entry.counted)
            if self.store.commit(block, shares, entry.version - 1, scale):
                self.store.count(block, shares)
        for one in entry.counted:
            self.contributions.settle(one.contribution)
        self.versions[entry.group] = entry.version

    # --- data --------------------------------------------------------------------------------

    def _from_worker(
        self, message: d.Data, payload: Array | None, out: list[Action], now: float
    ) -> None:
        match message:
            case d.Greet(incarnation=incarnation):
                self.grants.greet(incarnation)
            case d.Push(index=index) | d.Done(index=index) if index > self.index:
                self._park(FromWorker(message, payload))
            case d.Push(contribution=name) | d.Done(contribution=name) if (
                name.incarnation not in self.members
            ):
                reason = (
                    f"server {self.number}: incarnation {name.incarnation} is no member (any more)"
                )
                out.append(
                    ToWorker(
                        name.incarnation, d.Fenced(self.number, name.incarnation, reason), None
                    )
                )
            case d.Push() if payload is not None:
                self._push(message, payload, out)
            case d.Done():
                self._done(message, out)
            case d.Got(incarnation=incarnation, group=group, grant=grant, bids=bids):
                self.grants.got(incarnation, group, grant, bids, now)
            case d.Ask(incarnation=incarnation, group=group, grant=grant, bids=bids):
                self.grants.ask(incarnation, group, grant, bids)
            case _:
                raise ProtocolError(f"{type(message).__name__} is not for servers")

    def _park(self, event: FromWorker) -> None:
        size = 0 if event.payload is None else event.payload.nbytes
        if self._parked.bytes_held + size <= PARKED_BYTES_MAX:
            self._parked.bytes_held += size
            self._parked.waiting.append(event)

    def _unpark(self, out: list[Action]) -> None:
        waiting, self._parked = self._parked.waiting, _Parked()
        for event in waiting:
            self._from_worker(event.message, event.payload, out, 0.0)

    def _ack(self, contribution: ContributionId, bid: int, out: list[Action]) -> None:
        incarnation = contribution.incarnation
        out.append(
            ToWorker(incarnation, d.Ack(self.number, incarnation, [(contribution, bid)]), None)
        )

    def _push(self, message: d.Push, payload: Array, out: list[Action]) -> None:
        name = message.contribution
        if self.contributions.is_settled(name, message.grant):
            self._ack(name, message.bid, out)
            return
        held = self.contributions.at(name, message.grant)
        if message.bid not in held.payloads and not held.void:
            problem = self._check(message, payload)
            if problem is None:
                block = self.layout.blocks[message.bid]
                held.payloads[message.bid] = aligned(payload).view(self.layout.dtype(block).stored)
            else:
                key, reason = problem
                held.void = True
                held.payloads.clear()
                out.append(ToBroker(c.Void(name, message.grant, key, reason)))
        self._ack(name, message.bid, out)
        self._report_if_held(name, held)

    def _done(self, message: d.Done, out: list[Action]) -> None:
        name = message.contribution
        self._ack(name, -1, out)
        if self.contributions.is_settled(name, message.grant):
            return
        held = self.contributions.at(name, message.grant)
        held.weight = message.weight
        held.bids = frozenset(message.bids)
        held.skipped = frozenset(message.skipped)
        self._report_if_held(name, held)

    def _report_if_held(self, name: ContributionId, held: Open) -> None:
        if held.void or held.reported or not held.complete:
            return
        held.reported = True
        if name.group == SEEDS:
            for bid, payload in held.payloads.items():
                self.store.put(self.layout.blocks[bid], payload.copy())
            self.contributions.settle(name)
        self._held.append((name, held.grant))

    def _check(self, message: d.Push, payload: Array) -> tuple[str | int, str] | None:
        """Return (key, reason) if a guard refuses the block, None if it may count."""
        block = self.layout.blocks.get(message.bid)
        if block is None or block.server != self.number or not block.segments:
            return "?", f"server {self.number} holds no block {message.bid}"
        first = self.layout.entries[block.segments[0].kid].spec
        if message.codec != "none":
            return first.key, f"codec {message.codec!r} is not known to server {self.number}"
        bytes_expected = self.layout.block_bytes(block)
        if payload.nbytes != bytes_expected:
            return (
                first.key,
                f"{payload.nbytes} bytes where block {message.bid} has {bytes_expected}",
            )
        if message.contribution.group == SEEDS:
            return None
        return self._check_values(block, aligned(payload))

    def _check_values(self, block: BlockSpec, payload: Array) -> tuple[str | int, str] | None:
        dtype = self.layout.dtype(block)
        kid = block.segments[0].kid
        if not dtype.floating and self.store.spec_for(kid).rule.name != "assign":
            key, rule = self.layout.entries[kid].spec.key, self.store.spec_for(kid).rule.name
            return (
                key,
                f"rule {rule} cannot update {dtype.name}; initialise the key with rule='assign'",
            )
        stored = payload.view(dtype.stored)
        for segment, start, stop in spans(block):
            spec = self.layout.entries[segment.kid].spec
            if not spec.allow_nan and not all_finite(stored[start:stop], dtype):
                return spec.key, "the gradient has NaN or Inf; allow it with allow_nan=True at init"
        return None

    def status(self) -> dict[str, object]:
        """Return figures for a status report."""
        return {
            "server": self.number,
            "log_index": self.index,
            "blocks": len(self.store.blocks),
            "value_bytes": sum(s.current.values.nbytes for s in self.store.blocks.values()),
            "open_contributions": len(self.contributions.open),
            "contribution_bytes": self.contributions.bytes_held,
            "model_version": self.versions.get(MODEL, 0),
        }


def aligned(payload: Array) -> Array:
    """Return the bytes at an address that any dtype can be viewed at.

    Received frames below about 8 KiB start at any address (libzmq packs them into one buffer).
    """
    if payload.ctypes.data % 8 == 0:
        return payload
    return np.array(payload, copy=True)
