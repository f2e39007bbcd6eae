"""Compute times of a live run, out of its broker's recording (`zkv run --record`).

The broker lives again, so both ends of a batch are known by its own clock: when it sent the grant
(`Granted`) and when it heard that the batch was finished (`Finish`). What lies between is the
worker's whole round, and all of it counts as computing: the way of the grant, the transfer of the
model where servers send it, the worker's own computing, whatever else it does before its next
batch begins (its grant waits for it), its pushes as far as the finish waits for them, and the way
of the finish. So a simulation of these times needs no network beside them. Not included are the
policy's waiting, which ends with the grant, and the arrival at the servers after the finish.
Batches that were cancelled or withdrawn before they were finished, and plain keys, are left out; a
batch that was finished and came too late has taken its time all the same. This module must not know
what is made of the times, or which policy is in force.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from zkv import control as c
from zkv.compute_times import ComputeTimes, InTurn
from zkv.errors import ProtocolError
from zkv.heartbeat import link_resend_s
from zkv.policy import policy
from zkv.wire import MODEL
from zkv_brokers.config import RouterConfig
from zkv_brokers.hub import Hub
from zkv_brokers.members import Worker
from zkv_brokers.recording import FORMAT, records
from zkv_brokers.replay import event_of
from zkv_brokers.router import Router

_SHORTEST_S = 1e-9
"""What a batch takes if the clock did not move."""


class _Listener(Hub):
    """The hub of a broker that lives again: notes when grants go out and finishes come in."""

    def __init__(self, router: Router, instance: int) -> None:
        super().__init__(instance, resend_s=link_resend_s(router.config.beat_s))
        self.times_s: dict[int, list[float]] = {}
        """By worker number, in the order in which the batches were finished."""
        self._members = router.members
        self._granted: dict[tuple[int, int], float] = {}

    def send(self, peer: int, message: c.Message) -> None:
        """Send, and remember the time of a grant of the model."""
        match message, self._members.by_peer.get(peer):
            case c.Granted(group=group, grant=grant), Worker(incarnation=name) if group == MODEL:
                self._granted[name, grant] = self.now
            case c.Cancel(group=group, grant=grant), Worker(incarnation=name) if group == MODEL:
                self._granted.pop((name, grant), None)
        super().send(peer, message)

    def receive(self, route: bytes, frame: bytes, key: str = "") -> tuple[int, list[c.Message]]:
        """Receive, and book the time of a batch that is finished."""
        peer, messages = super().receive(route, frame, key)
        worker = self._members.by_peer.get(peer)
        for message in messages if isinstance(worker, Worker) else []:
            match message:
                case c.Finish(contribution=name, grant=grant) if name.group == MODEL:
                    assert isinstance(worker, Worker)
                    begun = self._granted.pop((worker.incarnation, grant), None)
                    if begun is not None:
                        spent_s = max(self.now - begun, _SHORTEST_S)
                        self.times_s.setdefault(worker.number, []).append(spent_s)
        return peer, messages


def recorded_times(path: Path) -> tuple[ComputeTimes, tuple[str, ...]]:
    """Return the compute times in seconds of a broker's recording, by worker, and warnings.

    `path` is a recording, or a folder with one of a broker (broker-*.rec). The numbers of the
    workers are their ranks. Of a recording that breaks off the whole part is used, and a warning
    says so.

    Raises:
        ProtocolError: no recording of a broker of this version, a damaged one, or one without a
            finished batch; the file is named.
        ValueError: a folder without a broker's recording, or with several.
        OSError: the file cannot be read.
    """
    file = of_a_broker(path)
    found = records(file)
    _, first = next(found, (0, [None]))
    if first[0] != FORMAT or first[1] != "broker":
        raise ProtocolError(f"{file} is no recording of a broker of this version ({FORMAT!r})")
    try:
        times_s, whole = _live_again(first, [record for _, record in found])
    except (TypeError, ValueError, KeyError, IndexError) as error:
        raise ProtocolError(f"{file} is damaged: {error}") from error
    if not times_s:
        raise ProtocolError(f"{file}: no batch of the model was finished in it")
    workers = tuple(sorted(times_s))
    rules = tuple(InTurn(tuple(times_s[worker])) for worker in workers)
    warnings = () if whole else (f"{file}: the recording breaks off; its whole part is used",)
    return ComputeTimes(rules, workers), warnings


def of_a_broker(path: Path) -> Path:
    """Return the file of the one broker that was recorded here.

    Raises:
        ValueError: a folder without a broker's recording, or with several.
    """
    if not path.is_dir():
        return path
    files = sorted(path.glob("broker-*.rec"))
    if not files:
        raise ValueError(f"{path}: no broker's recording (broker-*.rec) is in this folder")
    if len(files) > 1:
        names = ", ".join(file.name for file in files)
        raise ValueError(f"{path} has recordings of several brokers ({names}); name one of them")
    return files[0]


def _live_again(first: list[Any], rest: list[list[Any]]) -> tuple[dict[int, list[float]], bool]:
    """Return the times in seconds by worker, and whether the recording has its end."""
    _, _, plain, term, instance, *state = first
    if state:
        raise ValueError("it is of a broker that went on from a journal, and begins in mid-run")
    config = RouterConfig(**{**plain, "policy": policy(plain["policy"])})
    router = Router(config, term=term, instance=instance)
    router.hub = listener = _Listener(router, instance)
    for kind, *what in rest:
        if kind == "end":
            return listener.times_s, True
        now, events = what
        router.turn([event_of(event) for event in events], now)
    return listener.times_s, False
