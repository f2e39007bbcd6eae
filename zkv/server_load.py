"""What each server costs a run, and what workers wait for because of it. Pure."""

from __future__ import annotations

import statistics

from zkv import costs
from zkv.run_times import Batch, RunTimes, Worker


def ms(seconds: float) -> str:
    """Return seconds as text, in ms."""
    return f"{seconds * 1e3:.3g} ms"


def mb(nbytes: float) -> str:
    """Return bytes as text, in MB."""
    return f"{nbytes / 1e6:.3g} MB"


def values_s(worker: Worker, one: Batch, update_s: float) -> float:
    """Return how much of the waiting for values is the link's: without the update, and at most
    what their bytes take at the speed of the way up."""
    left = max(0.0, one.values - update_s)
    if not worker.up_s or not worker.bytes_up:
        return left
    return min(left, worker.bytes_down * worker.up_s / worker.bytes_up)


class Load:
    """What each server costs a batch: seconds of its update and of what is on its way there."""

    def __init__(self, run: RunTimes) -> None:
        self.update_s = max((one.update_s for one in run.servers), default=0.0)
        self.by_server = {
            one.index: one.update_s
            + statistics.fmean(worker.busy_s.get(one.index, 0.0) for worker in run.workers)
            for one in run.servers
        }
        mean_s = statistics.fmean(self.by_server.values()) if self.by_server else 0.0
        self.busiest = max(self.by_server, key=lambda at: self.by_server[at], default=0)
        self.imbalance = self.by_server[self.busiest] / mean_s if mean_s else 1.0
        held = {one.index: one.nbytes for one in run.servers}
        whole = sum(held.values())
        self.held_share = held.get(self.busiest, 0) / whole if whole else 0.0
        self._fair = 1 / max(1, len(held))
        pairs = [(worker, batch) for worker in run.workers for batch in worker.batches]
        waited_s = sum(one.values + one.up for _, one in pairs)
        servers_s = sum(min(one.values + one.up, self.update_s) for _, one in pairs)
        uneven_s = sum(self.even(worker, one) for worker, one in pairs)
        self.is_cause = servers_s + uneven_s > waited_s / 2

    def even(self, worker: Worker, one: Batch) -> float:
        """Return what a batch saves if all servers cost the same."""
        return self._of_servers(worker, one) * (1 - 1 / self.imbalance)

    def _of_servers(self, worker: Worker, one: Batch) -> float:
        """Return the part of a batch's communication that is longest at the busiest server."""
        return min(one.up, worker.up_s) + min(one.values, self.update_s) + self._values(worker, one)

    def _values(self, worker: Worker, one: Batch) -> float:
        return values_s(worker, one, self.update_s)

    def doubled(self, worker: Worker, one: Batch, workers: int) -> float:
        """Return what a batch saves with twice the servers, if all links are alike.

        A server's link carries the gradients of all workers, N · M / S, a worker's only its own M
        (`zkv.costs.server_bytes`): more servers help until the workers' links are the limit.
        """
        servers = max(1, len(self.by_server))
        before, after = (
            max(1.0, costs.server_bytes(1.0, workers, count) * self.imbalance)
            for count in (servers, 2 * servers)
        )
        link = min(one.up, worker.up_s) + self._values(worker, one)
        return link * (1 - after / before) + min(one.values, self.update_s) / 2

    @property
    def text(self) -> str:
        """Which server costs most, and why."""
        took = f"server {self.busiest} takes {ms(self.by_server[self.busiest])} a batch"
        if self.imbalance < 1.2:
            return f"{took} for what is sent and updated, as the others do"
        bytes_ = f"with {self.held_share:.0%} of the bytes"
        more = self.held_share > 1.2 * self._fair
        why = "" if more else ", so its machine or its link is slower"
        return f"{took}, {self.imbalance:.2g} times the mean, {bytes_}{why}"
