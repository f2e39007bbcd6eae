"""What the blocking and the asyncio worker have in common: answers turned into what users see."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from threading import Lock
from typing import Any

import numpy as np

from zkv import control as c
from zkv import span_split
from zkv.dtypes import Array, dtype_of, stored_view
from zkv.errors import KeyMismatch, PushRefused
from zkv.layout import Layout, check_key
from zkv.reasons import gist
from zkv.spans import TRAINING, Spans
from zkv.tables import Table
from zkv.time_split import PARTS, Meter, Part
from zkv.wire import MODEL
from zkv_workers import signals as s
from zkv_workers.buffers import Buffers
from zkv_workers.config import SessionConfig
from zkv_workers.devices import to_host
from zkv_workers.driver import Driver
from zkv_workers.encoding import Encoder
from zkv_workers.footprint import footprint, peak_mib
from zkv_workers.model import as_arrays, check_weight, specs_of
from zkv_workers.packing import check_gradient
from zkv_workers.pipeline import Pipeline
from zkv_workers.session import Session
from zkv_workers.unpacking import unpack

Key = str | int


LEAVE_LOOK_S = 0.1
LEAVE_SILENT_S = 1.5
"""A broker that was not heard for so long, and for three beats, will not say goodbye."""
TELL_EVERY_S = 1.0
"""How often the broker is told where the time goes."""
LEAVE_TIMEOUT_S = 60.0
"""How long what was finished may take to reach the servers when a worker leaves."""


@dataclass(slots=True)
class Ledger:
    """Where a worker's time has gone, in seconds, and which pushes came to nothing, and why.

    `useful_s` is the computing whose batch was committed, `cancelled_s` that of batches that the
    update happened without. `updates` is kept only if `keeps` says so, as it grows with the run.
    """

    wait_s: float = 0.0
    compute_s: float = 0.0
    useful_s: float = 0.0
    cancelled_s: float = 0.0
    refused: list[Exception] = field(default_factory=list)
    keeps: bool = False
    updates: list[tuple[int, int, float]] = field(default_factory=list)
    """(version, staleness, when it was heard of) of each committed batch; seconds of the clock that
    all processes of a machine share."""
    meter: Meter = field(default_factory=lambda: Meter(time.monotonic, lock=Lock()))
    told_at: float = 0.0
    began: float = field(default_factory=time.time)
    spans: Spans | None = None
    """Where it is also written down when each thing was done, if that is wanted."""

    def settled(self, fate: s.Fate, base: int, spent_s: float) -> None:
        """Note what became of a batch that was computed on version `base` for `spent_s`."""
        if fate.version is not None:
            self.useful_s += spent_s
            if self.keeps:
                self.updates.append((fate.version, fate.version - 1 - base, time.time()))
        elif fate.outcome == "cancelled":
            self.cancelled_s += spent_s

    def report(self, accounts: list[c.Account]) -> s.Report | None:
        """Return what the broker is to be told now of codecs and time, if anything."""
        now, spent = time.monotonic(), None
        if now - self.told_at >= TELL_EVERY_S:
            self.told_at, spent = now, self.meter.spent(peak_mib())
        return s.Report(accounts, spent) if accounts or spent else None

    def raise_refused(self) -> None:
        """Raise the first refusal that nobody has been told of."""
        if self.refused:
            raise self.refused.pop(0)


def keys_of(keys: Any) -> tuple[Key, ...]:
    """Return the keys of a pull: one key, a sequence of keys, or None for the whole model."""
    if keys is None:
        return ()
    if isinstance(keys, str | int):
        return (check_key(keys),)
    if isinstance(keys, Sequence | Mapping | set | frozenset):
        return tuple(check_key(key) for key in keys)
    raise TypeError(f"pull takes a key or a list of keys, not {type(keys).__name__}")


def pulled(values: s.Values, keys: tuple[Key, ...]) -> dict[Key, Array]:
    """Return fresh arrays by key: those asked for, or all names of the model."""
    arrays = unpack(values.layout, values.kids, values.blocks, values.parts)
    return {key: arrays[key] for key in keys} if keys else arrays


@dataclass(frozen=True, slots=True)
class Model:
    """One consistent version of the whole model: fresh arrays by key, yours to change."""

    version: int
    params: dict[Key, Array]


def evaluated(values: s.Values) -> Model:
    """Return what `evaluate` gives for the answer to a pull of the whole model."""
    return Model(values.version, pulled(values, ()))


def initialise(
    params: Any,
    *,
    rule: str,
    reduce: str,
    allow_nan: bool,
    absent: str,
    plain: bool,
    tables: Mapping[Key, Table] | None = None,
) -> Callable[[int], s.Initialise]:
    """Take a copy of what `init` is given; return what makes the session's input of it.

    Raises:
        TypeError: not arrays, or a dtype that does not travel; the key is named.
    """
    specs, values = specs_of(
        as_arrays(params), rule=rule, reduce=reduce, allow_nan=allow_nan, absent=absent
    )
    offered = []
    for key, table in (tables or {}).items():
        if not isinstance(table, Table):
            raise TypeError(f"table {key!r}: a zkv.Table is needed, not {type(table).__name__}")
        offered.append(table.spec(key))
    return lambda token: s.Initialise(token, tuple(specs), values, plain, tables=tuple(offered))


def check_trained(driver: Driver, keys: Iterable[Key]) -> None:
    """Check that keys that were initialised to be trained are part of the model.

    Raises:
        KeyMismatch: they came after its first batch, with which its keys are fixed.
    """
    layout = driver.session.layout
    for key in keys:
        if layout.group_of[layout.kid(key)] != MODEL:
            names = [repr(layout.entries[kid].spec.key) for kid in layout.kids_in(MODEL)]
            raise KeyMismatch(
                f"key {key!r} is no part of the model that this cluster trains: its keys "
                f"({', '.join(names[:5])}{', ...' if names[5:] else ''}) are fixed since its first "
                "batch; attach a model with these, or start another cluster"
            )


def plain_push(driver: Driver, key: Key, value: Any, weight: float) -> tuple[Key, Array, float]:
    """Check a plain push and take a copy of its value, so that the caller's array is free at once.

    Raises:
        UnknownKey, KeyMismatch: the key was never initialised, or shape or dtype differ.
    """
    key = check_key(key)
    array = to_host(value)
    layout = driver.session.layout
    check_gradient(layout, key, layout.kid(key), array)
    return key, stored_view(array, dtype_of(array)).copy(), check_weight(weight)


LOOK_S = 0.0002
"""How long to wait before it is looked again whether a reader has let go: there is nothing to wait
for in shared memory."""


def looks(patience_s: float) -> Iterator[None]:
    """Yield as long as there is patience."""
    until = time.monotonic() + patience_s
    while time.monotonic() < until:
        yield


def still_lent(batch: int, patience_s: float) -> str:
    """Say that servers do not let go of a batch's arrays."""
    return (
        f"a server still reads gradients of batch {batch} in `worker.buffers` {patience_s:g} s "
        "after it was settled: does that server still run?"
    )


def _shared_blocks(layout: Layout, arrays: Mapping[Key, Array]) -> list[list[Key]]:
    """Return the keys of each block that several share, if all of them are here."""
    kids = {layout.kid_of[key]: key for key in arrays if key in layout.kid_of}
    bids = {bid for kid in kids for bid in layout.blocks_of_key[kid]}
    shared = [layout.blocks[bid].kids for bid in sorted(bids) if len(layout.blocks[bid].kids) > 1]
    return [[kids[kid] for kid in own] for own in shared if all(kid in kids for kid in own)]


def buffers(
    encoder: Encoder, driver: Driver, member: s.Membership, params: Any
) -> dict[Key, Array]:
    """Return what `Worker.buffers` does."""
    arrays = as_arrays(params)
    if member.policy.startswith("k-batch-"):
        # A contribution may wait there for later ones of its own worker.
        return {key: np.zeros_like(array) for key, array in arrays.items()}
    return encoder.buffers.make(arrays, _shared_blocks(driver.session.layout, arrays))


def prepare(encoder: Encoder, driver: Driver, member: s.Membership) -> None:
    """Tell a worker's encoder who it encodes for."""
    encoder.spares = driver.nearby.memory
    encoder.buffers = Buffers(driver.nearby.memory.empty, driver.nearby.is_lent)
    encoder.seed = member.number
    welcome = driver.session.member
    encoder.decoders = max(1, member.world) / max(1, len(welcome.servers) if welcome else 1)
    encoder.traffic = driver.traffic


def use_codecs(encoder: Encoder, ledger: Ledger, grant: s.Grant) -> None:
    """Encode as a grant says from now on; compiling what that needs takes seconds at times."""
    codecs = (grant.codec, grant.codec_down, grant.chosen)
    if ledger.spans is None or encoder.uses(*codecs):
        encoder.use(*codecs)
        return
    with ledger.spans.timed(TRAINING, span_split.PREPARE, codec=grant.codec):
        encoder.use(*codecs)


def last_accounts(encoder: Encoder, driver: Driver) -> s.Report | None:
    """Return what the broker is still to be told of codecs when a worker leaves."""
    accounts = encoder.to_tell(driver.session.layout, now=True)
    return s.Report(accounts) if accounts else None


def stats(driver: Driver, ledger: Ledger, encoder: Encoder) -> dict[str, Any]:
    """Return a worker's figures as plain data: counts, seconds, bytes.

    `communication_s` is from each grant until the model's last block was here: a part of `wait_s`
    where nothing else was done meanwhile. `transport` is how payloads go to and from servers, as
    in `zkv status`. `topology` is what went between workers: updates that were added up among them,
    or came apart, bytes of payloads, and how these go. `time` is a `zkv.time_split.Spent`, and
    `time_by_batch` has the latest batches, a list of seconds for each of its `parts`.
    """
    session = driver.session
    counts = session.made.counts
    return {
        "name": session.config.name,
        "batches": counts["batches"],
        "outcomes": {name: counts[name] for name in ("committed", "discarded", "cancelled")}
        | ({"undone": counts["undone"]} if counts["undone"] else {}),
        "staleness": {str(age): n for age, n in sorted(session.made.staleness.items())},
        "pulls": session.pulls.answered,
        "plain_pushes": counts["plain"],
        "samples": counts["samples"],
        "wait_s": round(ledger.wait_s, 6),
        "communication_s": round(session.downloads.model_s, 6),
        "compute_s": round(ledger.compute_s, 6),
        "useful_s": round(ledger.useful_s, 6),
        "cancelled_s": round(ledger.cancelled_s, 6),
        "transport": driver.nearby.transport,
        "bytes_up": session.uploads.bytes_sent,
        "bytes_down": session.downloads.bytes_received
        + session.incoming.rows.bytes_received
        - session.together.delivered_bytes,
        "topology": session.together.plain() | {"transport": driver.others.nearby.transport},
        "bytes_unacknowledged": session.uploads.unacknowledged(),
        "sent": session.uploads.flights.plain(),
        "time": ledger.meter.spent(peak_mib()).to_plain(),
        "time_by_batch": {
            "parts": list(PARTS),
            "rows": [[round(spent_s, 6) for spent_s in row] for row in ledger.meter.rows],
        },
        "memory": footprint(session, encoder),
        "codecs": encoder.report(session.layout),
    }


def outcome(fate: Any) -> str:
    """Return the outcome that a future of a `Fate` holds; "pending" if it has none.

    A worker that leaves before its last batch is settled is never told: the batch still counts.
    """
    return str(fate.result().outcome) if _is_known(fate) else "pending"


def update(fate: Any) -> int | None:
    """Return the version of the update that counts what a future of a `Fate` is of; None: none."""
    version: int | None = fate.result().version if fate is not None and _is_known(fate) else None
    return version


def _is_known(fate: Any) -> bool:
    return fate.done() and not fate.cancelled() and fate.exception() is None


def pauses(config: SessionConfig, patience_s: float) -> Iterator[float]:
    """Yield how long to wait until each word about a wait is due; the last one is its end."""
    left_s, next_s = patience_s, config.narrate_after_s
    while left_s > next_s:
        yield next_s
        left_s -= next_s
        next_s = config.narrate_every_s
    yield max(0.0, left_s)


def explained(text: str, reason: str) -> str:
    """Return what to say of a wait, with the broker's reason if there is one."""
    return f"{text}: {reason}" if reason else text


def refusal(fate: s.Fate) -> PushRefused | None:
    """Return the error for a contribution that a guard refused."""
    return PushRefused(fate.why) if fate.outcome == "discarded" else None


def named(keys: Sequence[Key] | None) -> str:
    """Return keys as words for a trace; None: all of them."""
    return "all" if keys is None else ", ".join(map(str, keys))


def calling(ledger: Ledger) -> AbstractContextManager[None]:
    """Book a call of zkv; it has a span unless it is a part of something that has one."""
    on = ledger.meter.on(Part.CALLS)
    if ledger.spans is None or ledger.meter.part > Part.CALLS:
        return on
    return _spanned(on, ledger.spans, span_split.CALL)


def draining(ledger: Ledger, pipeline: Pipeline) -> AbstractContextManager[None]:
    """Book the wait for what is encoded beside the caller."""
    on = ledger.meter.on(Part.ENCODE)
    if ledger.spans is None or pipeline.idle:
        return on
    return _spanned(on, ledger.spans, span_split.DRAIN)


@contextmanager
def _spanned(on: AbstractContextManager[None], spans: Spans, name: str) -> Iterator[None]:
    with on, spans.timed(TRAINING, name):
        yield


@contextmanager
def awaiting_fate(ledger: Ledger) -> Iterator[None]:
    """Book the wait for what becomes of a batch."""
    with ledger.meter.awaiting_fate():
        if ledger.spans is None:
            yield
            return
        with ledger.spans.timed(TRAINING, span_split.FATE):
            yield


@contextmanager
def awaiting_grant(ledger: Ledger, session: Session) -> Iterator[None]:
    """Book the wait for a grant, and why it was one."""
    began, waiting = time.monotonic(), Clock(ledger, "wait_s", span_split.GRANT)
    try:
        yield
    finally:
        now, why, sent = time.monotonic(), session.requests.last_reason, session.uploads
        waiting.stop(why=why)
        own_s = now - began if any(sent.unacknowledged().values()) else sent.idle_since - began
        ledger.meter.explain(gist(why), own_s)


class Clock:
    """Adds the time from its making to `stop` to a ledger's field, and to its spans as `what`."""

    def __init__(self, ledger: Ledger, name: str, what: str, **about: Any) -> None:
        self._ledger, self._name, self._what, self._about = ledger, name, what, about
        ledger.meter.enter(span_split.NAMES[what])
        self._since = ledger.meter.clock()

    def stop(self, but_for_s: float = 0.0, **about: Any) -> float:
        """Add the seconds since this clock was made, without those, and return them."""
        now = self._ledger.meter.clock()
        self._ledger.meter.leave(span_split.NAMES[self._what])
        spent = now - self._since - but_for_s
        setattr(self._ledger, self._name, getattr(self._ledger, self._name) + spent)
        if self._ledger.spans is not None:
            about |= self._about | ({"without_waits_s": round(spent, 6)} if but_for_s else {})
            told = {name: value for name, value in about.items() if value != ""}
            self._ledger.spans.span(TRAINING, self._what, self._since, now, **told)
        return spent
