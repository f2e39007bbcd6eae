"""A run's times as `zkv run --json` leaves them, read for advice: who, how long, and for what.

Pure: plain data comes in. What is measured together is taken apart here by two rules, both for the
shortest wait before a batch: nobody else can be its cause, so it is the way of contributions, the
update and the grant, and counts as communication; what is longer is waiting for others.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from zkv.time_split import OWN, PARTS

WANTED = "give what `zkv run --json -- ... > run.json` prints"
SHARES = ("data", "compute", "encode", "communication", "calls", "wait")


@dataclass(frozen=True, slots=True)
class Batch:
    """One batch of one worker, in seconds: what it does itself, and `wait` for other workers.

    `values` is waiting for those of its grant, `up` for its own contribution, the update and the
    grant.
    """

    data: float
    compute: float
    encode: float
    values: float
    calls: float
    up: float
    wait: float

    @property
    def own_s(self) -> float:
        """Without waiting for other workers."""
        return self.data + self.compute + self.encode + self.values + self.calls + self.up


@dataclass(frozen=True, slots=True)
class Worker:
    """One worker: its latest batches, and by batch: bytes both ways, and seconds by server in
    which something was on its way there; `codec_s` is encoding by a codec."""

    number: int
    batches: tuple[Batch, ...]
    bytes_up: float
    bytes_down: float
    busy_s: Mapping[int, float]

    @property
    def up_s(self) -> float:
        """Seconds in which something of a batch is on its way to the server that takes longest."""
        return max(self.busy_s.values(), default=0.0)

    @property
    def own_s(self) -> float:
        """Mean seconds of a batch, without waiting for other workers."""
        return statistics.fmean(batch.own_s for batch in self.batches)


@dataclass(frozen=True, slots=True)
class Server:
    """One server: bytes of values, and seconds that an update takes it."""

    index: int
    nbytes: int
    update_s: float


@dataclass(frozen=True, slots=True)
class Codec:
    """The codec of the gradients in a run: its text, bytes before and after, seconds to encode."""

    text: str
    before: int
    after: int
    encode_s: float


@dataclass(frozen=True, slots=True)
class RunTimes:
    """All of it; `codec_down` is the codec of the values."""

    policy: str
    workers: tuple[Worker, ...]
    servers: tuple[Server, ...]
    codec: Codec
    codec_down: str

    @property
    def shares(self) -> dict[str, float]:
        """Each part's share of all workers' time; they sum to one."""
        batches = [batch for worker in self.workers for batch in worker.batches]
        sums = {
            "data": sum(one.data for one in batches),
            "compute": sum(one.compute for one in batches),
            "encode": sum(one.encode for one in batches),
            "communication": sum(one.values + one.up for one in batches),
            "calls": sum(one.calls for one in batches),
            "wait": sum(one.wait for one in batches),
        }
        whole = sum(sums.values())
        return {name: spent_s / whole for name, spent_s in sums.items()}

    @property
    def batches_per_s(self) -> float:
        """Batches of all workers together in a second, as measured."""
        return sum(
            1 / statistics.fmean(batch.own_s + batch.wait for batch in worker.batches)
            for worker in self.workers
        )


def run_times(plain: Any) -> RunTimes:
    """Read the JSON of a run.

    Raises:
        ValueError: it is something else, or has no times; the text says what to give instead.
    """
    _check_kind(plain)
    told = [
        (number, at)
        for at, (number, split) in enumerate(zip(plain["workers"], plain["time"], strict=False))
        if split is not None and plain["time_by_batch"][at]["rows"]
    ]
    if not told:
        raise ValueError(f"no worker has told of any batch in this run; {WANTED}")
    try:
        return _read(plain, told)
    except (KeyError, TypeError, IndexError, AttributeError, ZeroDivisionError) as error:
        raise ValueError(f"it is not whole: {type(error).__name__}: {error}; {WANTED}") from error


def _check_kind(plain: Any) -> None:
    if not isinstance(plain, dict):
        raise ValueError(f"it is no JSON object; {WANTED}")
    if "traceEvents" in plain:
        raise ValueError(
            "this is a trace, which has no bytes and no link: "
            "`zkv trace run --json -o trace.json -- ... > run.json` leaves both"
        )
    if "reports" in plain:
        raise ValueError(f"this is what scripts/demo --json prints, which has no batches; {WANTED}")
    if "policies" in plain:
        raise ValueError(f"this is what zkv simulate --json prints, not a run; {WANTED}")
    if any(name not in plain for name in ("workers", "time", "time_by_batch")):
        raise ValueError(f"it does not say where the time went; {WANTED}")


def _read(plain: Mapping[str, Any], told: Sequence[tuple[int, int]]) -> RunTimes:
    rows = {at: _rows(plain["time_by_batch"][at], plain["time"][at]) for _, at in told}
    least = _least_waits(str(plain["policy"]), [rows[at] for _, at in told])
    workers = []
    for number, at in told:
        split, flights = plain["time"][at], plain["sent"][at] or {}
        count = int(split["batches"])
        own_share = split["waits"].get(OWN, 0.0) / split["wait_s"] if split["wait_s"] else 0.0
        workers.append(
            Worker(
                number=int(number),
                batches=tuple(
                    _batch(row, own_share, low) for row, low in zip(rows[at], least, strict=False)
                ),
                bytes_up=float(plain["bytes_up"][at]) / count,
                bytes_down=float(plain["bytes_down"][at]) / count,
                busy_s={int(k): float(one["busy_s"]) / count for k, one in flights.items()},
            )
        )
    servers = tuple(
        Server(int(one["index"]), int(one["value_bytes"]), _ratio(one["update_s"], one["updates"]))
        for one in plain.get("servers", ())
    )
    books = plain.get("codecs", ())
    codec = Codec(
        str(plain.get("codec") or "none"),
        sum(int(one["bytes_before"]) for one in books),
        sum(int(one["bytes_after"]) for one in books),
        sum(float(one["encode_s"]) for one in books),
    )
    down = str(plain.get("codec_down") or "none")
    return RunTimes(str(plain["policy"]), tuple(workers), servers, codec, down)


def _rows(by_batch: Mapping[str, Any], split: Mapping[str, Any]) -> list[dict[str, float]]:
    """Return the latest batches by part, but for the first of all, in which kernels compile and
    workers join, unless it is the only one."""
    names = by_batch["parts"]
    if set(names) != set(PARTS):
        raise KeyError(f"parts {names}")
    rows = [
        {name: max(0.0, float(spent_s)) for name, spent_s in zip(names, row, strict=True)}
        for row in by_batch["rows"]
    ]
    return rows[1:] if 1 < len(rows) == int(split["batches"]) else rows


def _least_waits(policy: str, rows: Sequence[Sequence[Mapping[str, float]]]) -> list[float]:
    """Return the shortest wait of any worker: of each round under bsp, whose batches belong
    together, else in the mean."""
    count = max(map(len, rows))
    if policy == "bsp" and len({len(one) for one in rows}) == 1:
        return [min(one[at]["wait"] for one in rows) for at in range(count)]
    return [min(statistics.fmean(row["wait"] for row in one) for one in rows)] * count


def _batch(row: Mapping[str, float], own_share: float, least_s: float) -> Batch:
    up = min(row["wait"], max(own_share * row["wait"], least_s))
    return Batch(
        data=row["data"],
        compute=row["compute"],
        encode=row["encode"],
        values=row["communication"],
        calls=row["calls"],
        up=up,
        wait=row["wait"] - up,
    )


def _ratio(part: float, whole: float) -> float:
    return float(part) / float(whole) if whole else 0.0
