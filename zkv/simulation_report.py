"""What a simulated run came to, as values, and as plain data for JSON.

Everything here is computed from what is given; this module must not know how a run is simulated,
how a policy decides, or where anything is printed.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Any, NamedTuple

from zkv.compute_times import Time


class Applied(NamedTuple):
    """One applied contribution; its staleness is `before` less `base_version`."""

    arrived_at: Time
    applied_at: Time
    worker: int
    base_version: int
    before: int
    """The version just before the update."""


class Cancelled(NamedTuple):
    """One cancelled batch, and how long had been computed on it."""

    at: Time
    worker: int
    lost: Time


class Span(NamedTuple):
    """A stretch of one worker's time: "compute", "cancelled", "transfer" or "waiting"."""

    worker: int
    kind: str
    begin: Time
    end: Time


@dataclass(frozen=True, slots=True)
class Account:
    """One worker's share of a run; busy + transfer + waiting is the run's time.

    `busy` is all computing, cancelled and unfinished included; `useful` is computing whose
    contribution was applied. `transfer` counts what computing does not hide. Bytes are of
    transfers that were completed.
    """

    worker: int
    arrived: int
    applied: int
    pending: int
    cancelled: int
    busy: Time
    transfer: Time
    waiting: Time
    useful: Time
    cancelled_time: Time
    bytes_up: int
    bytes_down: int


@dataclass(frozen=True, slots=True)
class SimulationReport:
    """A whole run, through `time`; accounts in the order of worker numbers.

    `staleness` has one entry for each applied contribution, in the order of updates and, within
    one, of arrival. `pending` holds (arrival time, worker). `contributions`, `cancels` and `spans`
    are empty where no trace was kept.
    """

    policy: str
    time: Time
    accounts: tuple[Account, ...]
    update_times: tuple[Time, ...]
    staleness: tuple[int, ...]
    pending: tuple[tuple[Time, int], ...]
    contributions: tuple[Applied, ...]
    cancels: tuple[Cancelled, ...]
    spans: tuple[Span, ...]
    warnings: tuple[str, ...] = ()

    def total(self, name: str) -> Any:
        """The sum of one field of the accounts over the workers."""
        return sum(getattr(account, name) for account in self.accounts)

    def share(self, name: str) -> Time:
        """The sum of one field of the accounts, as a share of all workers' time; 0 at time 0."""
        return ratio(self.total(name), self.time * len(self.accounts))

    @property
    def busy_share(self) -> Time:
        """Computing as a share of all workers' time, whatever became of it."""
        return self.share("busy")

    @property
    def useful_share(self) -> Time:
        """Computing whose contribution was applied, as a share of all workers' time."""
        return self.share("useful")

    @property
    def staleness_mean(self) -> Time:
        """Of the applied contributions; 0 if there are none."""
        return ratio(sum(self.staleness), len(self.staleness))

    @property
    def staleness_max(self) -> int:
        """Of the applied contributions; 0 if there are none."""
        return max(self.staleness, default=0)


def ratio(part: Time, whole: Time) -> Time:
    """Divide, exactly if both are exact; 0 where the whole is 0."""
    if not whole:
        return 0
    if isinstance(part, float) or isinstance(whole, float):
        return float(part / whole)
    return Fraction(part) / whole


def to_plain(report: SimulationReport) -> dict[str, Any]:
    """Return a dict that `json.dumps` takes.

    Lists have one entry for each worker, in the order of `workers`, apart from `updates` (times),
    `staleness` and `pending_contributions`. Times that are whole are integers; other exact ones
    are rounded to floats. `exact` repeats the shares as fractions, where they are exact.
    """
    accounts = report.accounts
    shares = {
        "busy_share": report.busy_share,
        "useful_share": report.useful_share,
        "transfer_share": report.share("transfer"),
        "waiting_share": report.share("waiting"),
        "staleness_mean": report.staleness_mean,
    }
    return {
        "policy": report.policy,
        "time": number(report.time),
        "workers": [account.worker for account in accounts],
        "updates": [number(time) for time in report.update_times],
        "arrived": [account.arrived for account in accounts],
        "applied": [account.applied for account in accounts],
        "applied_share": [
            float(ratio(account.applied, report.total("applied"))) for account in accounts
        ],
        "pending": len(report.pending),
        "pending_contributions": [
            {"time": number(time), "worker": worker} for time, worker in report.pending
        ],
        "waiting": [number(account.waiting) for account in accounts],
        "busy": [number(account.busy) for account in accounts],
        "transfer": [number(account.transfer) for account in accounts],
        "useful": [number(account.useful) for account in accounts],
        **{name: float(share) for name, share in shares.items()},
        "exact": {
            name: str(share) for name, share in shares.items() if not isinstance(share, float)
        },
        "cancelled": {
            "count": report.total("cancelled"),
            "time": number(report.total("cancelled_time")),
            "count_per_worker": [account.cancelled for account in accounts],
            "time_per_worker": [number(account.cancelled_time) for account in accounts],
        },
        "staleness": list(report.staleness),
        "staleness_max": report.staleness_max,
        "bytes_up": [account.bytes_up for account in accounts],
        "bytes_down": [account.bytes_down for account in accounts],
        "warnings": list(report.warnings),
    }


def number(time: Time) -> int | float:
    """A time as JSON has it: an integer if it is exact and whole, else a float."""
    return int(time) if not isinstance(time, float) and time == int(time) else float(time)
