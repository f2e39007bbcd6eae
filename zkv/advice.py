"""What would make a run quicker: its largest cost by name, and what each remedy gains.

Each remedy changes what a batch takes a worker by itself, or the policy; the simulator then says
how many batches all workers together finish. A gain is the ratio of that to the simulated run as
it was, less one: 0.5 is half as many again, and none is below -1. Two remedies together gain less
than their gains multiplied, as one takes from what the other could save.

Pure: times come in (`zkv.run_times`). It must not know files, nor how a run is started.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from zkv import costs
from zkv.compute_times import ComputeTimes, InTurn
from zkv.policy import policy
from zkv.run_times import Batch, RunTimes, Worker
from zkv.server_load import Load, mb, ms, values_s
from zkv.simulator import Simulation

WORTH, WORTH_POLICY = 0.05, 0.10
"""A remedy is worth it from this gain on. A policy's has to be larger, as staleness and cancelled
work cost progress that a rate does not show."""
SMALL = 0.05
"""A share below it is no cost that stands out."""
FEW_BYTES = 1e6
"""Of a batch: fewer take less than 10 ms at 1 Gbit/s, which is how long a process may be kept
waiting where more of them compute than there are cores."""
ROUNDS, BATCHES_MAX = 60, 4000
"""Simulated batches of each worker, and of all together."""
SHORTEST_S = 1e-9
COPY_BYTES_PER_S = 7.7e9
"""How fast an array is copied, where a run has not shown it: docs/codecs.md, "What it costs"."""


@dataclass(frozen=True, slots=True)
class Known:
    """A codec as docs/codecs.md has measured it: bits of an element of a large float32 block, and
    the time to encode as a multiple of copying the same array."""

    text: str
    bits: float
    copies: float


CODECS = (
    Known("fp16", 16, 0.94),
    Known("int8+ef", 8.125, 1.57),
    Known("onebit+ef", 1.125, 1.74),
    Known("topk:0.01+fp16+ef", 0.2457, 3.14),
)
DOWN = Known("int8", 8.125, 0.48)
"""For values; here it counts what decoding takes."""


@dataclass(frozen=True, slots=True)
class Remedy:
    """Something to try: its kind (data, policy, codec, overlap or servers), what it is, and why.

    `gain` is what the simulator says (see above), `worth` whether that is enough.
    """

    kind: str
    name: str
    gain: float
    worth: bool
    why: str


@dataclass(frozen=True, slots=True)
class Cost:
    """The largest cost beside computing.

    `name` is data, encode, link, server, straggler, calls or none; `share` is of all workers' time,
    and `gain_if_gone` what the simulator says of a run that has none of it, a bound for every
    remedy of this cost alone.
    """

    name: str
    share: float
    text: str
    gain_if_gone: float


@dataclass(frozen=True, slots=True)
class Advice:
    """A run's shares, its largest cost, and remedies by their gain.

    Rates are batches of all workers together in a second.
    """

    policy: str
    codec: str
    workers: int
    servers: int
    measured_per_s: float
    simulated_per_s: float
    shares: dict[str, float]
    largest: Cost
    remedies: tuple[Remedy, ...]

    def to_plain(self) -> dict[str, Any]:
        """Return a dict for JSON."""
        return asdict(self)


Change = Callable[[Worker, Batch], float]
"""From a worker and one batch of it to the seconds that it takes by itself."""


@dataclass(frozen=True, slots=True)
class _Rate:
    per_s: float
    staleness: float
    cancelled: float
    """Share of computing that was in vain."""


def advise(run: RunTimes) -> Advice:
    """Return what a run's time goes into, and what would change that."""
    now = _rate(run, _as_it_was)
    servers = Load(run)
    found = [_data(run, now), _overlap(run, now), *_codecs(run, now), *_servers(run, now, servers)]
    found += _policies(run, now)
    return Advice(
        policy=run.policy,
        codec=run.codec.text,
        workers=len(run.workers),
        servers=len(run.servers),
        measured_per_s=run.batches_per_s,
        simulated_per_s=now.per_s,
        shares=run.shares,
        largest=_largest(run, now, servers),
        remedies=tuple(sorted(found, key=lambda one: -one.gain)),
    )


def _as_it_was(worker: Worker, batch: Batch) -> float:
    return batch.own_s


def _rate(run: RunTimes, change: Change, rule: str = "") -> _Rate:
    """Simulate the run's workers with changed batches, or another policy."""
    chosen, count = policy(rule or run.policy), len(run.workers)
    times = ComputeTimes(
        tuple(
            InTurn(tuple(max(SHORTEST_S, change(worker, one)) for one in worker.batches))
            for worker in run.workers
        ),
        tuple(range(count)),
    )
    batches = max(count, min(ROUNDS * count, BATCHES_MAX))
    each = min(count, chosen.threshold or count)
    report = Simulation(chosen, times, trace=False).run(updates=math.ceil(batches / each)).report()
    busy = float(report.total("busy"))
    return _Rate(
        float(report.total("applied") / report.time),
        float(report.staleness_mean),
        float(report.total("cancelled_time")) / busy if busy else 0.0,
    )


def _remedy(kind: str, name: str, now: _Rate, then: _Rate, why: str, least: float) -> Remedy:
    gain = then.per_s / now.per_s - 1
    return Remedy(kind, name, gain, gain >= least, why)


# --- the largest cost --------------------------------------------------------------------------


def _largest(run: RunTimes, now: _Rate, load: Load) -> Cost:
    shares = run.shares
    name = max((one for one in shares if one != "compute"), key=lambda one: shares[one])
    share = shares[name]
    if share < SMALL:
        text = f"computing is {shares['compute']:.0%} of the time, and nothing else stands out"
        return Cost("none", share, text, 0.0)
    gone: dict[str, Change] = {
        "data": lambda _, one: one.own_s - one.data,
        "encode": lambda _, one: one.own_s - one.encode,
        "calls": lambda _, one: one.own_s - one.calls,
        "communication": lambda _, one: one.own_s - one.values - one.up,
    }
    if name == "wait":
        # Nobody waits for others under asp.
        without = _rate(run, _as_it_was, "asp")
        cost, text = "straggler", _slowest(run)
    else:
        without = _rate(run, gone[name])
        cost, text = _named(run, name, load)
    # A policy that cancels may by chance be luckier with a slower worker.
    return Cost(cost, share, text, max(0.0, without.per_s / now.per_s - 1))


def _named(run: RunTimes, name: str, load: Load) -> tuple[str, str]:
    batches = [batch for worker in run.workers for batch in worker.batches]
    if name == "data":
        mean_s = statistics.fmean(one.data for one in batches)
        text = f"the program is outside of blocks for {ms(mean_s)} a batch: it loads data, say"
        return "data", text
    if name == "encode":
        mean_s = statistics.fmean(one.encode for one in batches)
        how = "copying and handing over" if run.codec.text == "none" else f"by {run.codec.text}"
        return "encode", f"gradients are encoded for {ms(mean_s)} a batch, {how}"
    if name == "calls":
        mean_s = statistics.fmean(one.calls for one in batches)
        text = f"other calls take {ms(mean_s)} a batch: pull, evaluate or barrier, say"
        return "calls", text
    mean_s = statistics.fmean(one.values + one.up for one in batches)
    text = f"values and contributions are waited for, {ms(mean_s)} a batch"
    if load.is_cause:
        return "server", f"{text}; {load.text}"
    speed = [8 * one.bytes_up / one.up_s for one in run.workers if one.up_s]
    if speed:
        text += f"; what was sent has travelled at {statistics.fmean(speed) / 1e6:.3g} Mbit/s"
    if max(one.bytes_up for one in run.workers) < FEW_BYTES:
        text += (
            "; so few bytes may wait for a turn of a busy core instead, which no codec shortens, "
            "so take a codec's gain for a bound"
        )
    return "link", text


def _slowest(run: RunTimes) -> str:
    slowest = max(run.workers, key=lambda one: one.own_s)
    median_s = statistics.median(one.own_s for one in run.workers)
    return (
        f"others are waited for; worker {slowest.number} is the slowest, {ms(slowest.own_s)} a "
        f"batch without waits (the median worker: {ms(median_s)})"
    )


# --- data, overlap, policy ---------------------------------------------------------------------


def _data(run: RunTimes, now: _Rate) -> Remedy:
    then = _rate(run, lambda _, one: max(one.data, one.own_s - one.data))
    why = (
        "the next batch's data are loaded while this one is computed (num_workers of a DataLoader, "
        "or one thread with a queue)"
    )
    return _remedy("data", "data ahead", now, then, why, WORTH)


def _overlap(run: RunTimes, now: _Rate) -> Remedy:
    def change(_: Worker, one: Batch) -> float:
        beside = costs.overlapped_s(one.compute + one.encode, one.values + one.up)
        return one.data + one.calls + beside

    why = (
        "push each layer as backprop finishes it and read keys one by one (batch['w1']), or use "
        "zkv.torch.attach: computing and communication take the longer of the two, not their sum"
    )
    return _remedy("overlap", "overlap", now, _rate(run, change), why, WORTH)


def _policies(run: RunTimes, now: _Rate) -> list[Remedy]:
    count = len(run.workers)
    if count < 2:
        return []
    found = []
    for text in ("ssp:2", f"k-bsp:{max(1, 3 * count // 4)}", "asp"):
        if text == run.policy:
            continue
        then = _rate(run, _as_it_was, text)
        why = (
            f"staleness {then.staleness:.2g} in the mean, {then.cancelled:.0%} of computing in "
            "vain, which cost progress that is not in this figure"
        )
        found.append(_remedy("policy", f"policy {text}", now, then, why, WORTH_POLICY))
    return found


# --- codecs ------------------------------------------------------------------------------------


def _copy_bytes_per_s(run: RunTimes) -> float:
    """Return how fast arrays are copied: as the run's own codec shows, if it is a known one."""
    for known in CODECS:
        if known.text == run.codec.text and run.codec.encode_s > 0:
            return known.copies * run.codec.before / run.codec.encode_s
    return COPY_BYTES_PER_S


def _codecs(run: RunTimes, now: _Rate) -> list[Remedy]:
    copy, used = _copy_bytes_per_s(run), run.codec
    grown = used.before / used.after if used.after else 1.0
    """Gradients before the run's codec, over what travelled."""
    found = []
    for known in (Known("none", costs.FLOAT32_BITS, 0.0), *CODECS):
        if known.text == used.text:
            continue

        def change(worker: Worker, one: Batch, known: Known = known) -> float:
            dense = worker.bytes_up * grown
            ratio = grown * known.bits / costs.FLOAT32_BITS
            without = one.encode if used.text == "none" else min(one.encode, dense / copy)
            encode = without + known.copies * dense / copy
            # What is not of bytes, such as a way to the broker, stays.
            link = min(one.up, worker.up_s) if ratio < 1 else worker.up_s
            return one.own_s - one.encode + encode - link * (1 - ratio)

        why = _codec_why(run, known, grown, copy)
        remedy = _remedy("codec", f"codec {known.text}", now, _rate(run, change), why, WORTH)
        found.append(remedy)
    if run.codec_down == "none":
        found.append(_down(run, now, copy))
    return found


def _codec_why(run: RunTimes, known: Known, grown: float, copy: float) -> str:
    worker = max(run.workers, key=lambda one: one.bytes_up)
    dense = worker.bytes_up * grown
    sent = dense * known.bits / costs.FLOAT32_BITS
    if known.text == "none":
        used_s = run.codec.encode_s / run.codec.before * dense if run.codec.before else 0.0
        return (
            f"{mb(sent)} a batch instead of {mb(worker.bytes_up)}, and {ms(used_s)} of encoding "
            "less"
        )
    return (
        f"{mb(sent)} a batch instead of {mb(worker.bytes_up)}, for "
        f"{ms(known.copies * dense / copy)} of encoding, as if nothing hid it"
    )


def _down(run: RunTimes, now: _Rate, copy: float) -> Remedy:
    update_s = max((one.update_s for one in run.servers), default=0.0)
    ratio = DOWN.bits / costs.FLOAT32_BITS

    def change(worker: Worker, one: Batch) -> float:
        saved = values_s(worker, one, update_s) * (1 - ratio)
        return one.own_s - saved + DOWN.copies * worker.bytes_down / copy

    worker = max(run.workers, key=lambda one: one.bytes_down)
    why = f"{mb(worker.bytes_down * ratio)} of values a batch instead of {mb(worker.bytes_down)}"
    name = f"codec_down {DOWN.text}"
    return _remedy("codec", name, now, _rate(run, change), why, WORTH)


# --- servers -----------------------------------------------------------------------------------


def _servers(run: RunTimes, now: _Rate, load: Load) -> list[Remedy]:
    if not run.servers:
        return []
    found = []
    count = len(run.servers)
    if count > 1:
        then = _rate(run, lambda worker, one: one.own_s - load.even(worker, one))
        found.append(_remedy("servers", "even servers", now, then, load.text, WORTH))
    then = _rate(run, lambda worker, one: one.own_s - load.doubled(worker, one, len(run.workers)))
    why = (
        f"{2 * count} instead of {count} share the updates ({ms(load.update_s)} each) and the "
        "links, if each has a machine or cores of its own"
    )
    return [*found, _remedy("servers", "more servers", now, then, why, WORTH)]


def lines(advice: Advice) -> Sequence[str]:
    """Say it to a person, a remedy a line."""
    shares = ", ".join(f"{name} {share:.0%}" for name, share in advice.shares.items())
    cost = advice.largest
    servers = f"{advice.servers} server{'' if advice.servers == 1 else 's'}"
    told = [
        f"{advice.workers} worker{'' if advice.workers == 1 else 's'}, {servers}, policy "
        f"{advice.policy}, codec {advice.codec}: {advice.measured_per_s:.3g} batches a second "
        f"together (simulated: {advice.simulated_per_s:.3g})",
        f"time: {shares}",
        f"the largest cost: {cost.name}, {cost.share:.0%}: {cost.text}",
    ]
    if cost.name != "none":
        told.append(f"without it the run would be {1 + cost.gain_if_gone:.2f} times as fast")
    told += ["", "remedies, by how many times as fast each makes the run:"]
    for one in advice.remedies:
        verdict = "" if one.worth else "not worth it: "
        told.append(f"{1 + one.gain:.2f}  {verdict}{one.name}: {one.why}")
    return told
