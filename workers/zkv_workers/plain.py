"""Plain pushes of one worker: for each key in order, each under its own grant.

A key that is pushed by itself is a group of its own; the broker grants one push at a time, so that
the same policies hold for it as for batches. Knows no frames.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from zkv.wire import MODEL
from zkv_workers.signals import PushPlain


@dataclass(slots=True)
class _Key:
    group: int = MODEL
    queue: deque[PushPlain] = field(default_factory=deque)
    grant: int | None = None
    batch: int = 0
    open: int = 0


class PlainPushes:
    """What is queued, granted and on its way, by key."""

    def __init__(self) -> None:
        self._keys: dict[int, _Key] = {}
        self._kid_of: dict[int, int] = {}

    def add(self, kid: int, push: PushPlain, group: int) -> bool:
        """Queue a push; return whether the broker has to be asked for a group of its own first."""
        key = self._keys.setdefault(kid, _Key())
        first = group == MODEL and not key.queue
        key.queue.append(push)
        if group != MODEL:
            self.regrouped(kid, group)
        return first

    def regrouped(self, kid: int, group: int) -> None:
        """The key has a group of its own now."""
        key = self._keys.setdefault(kid, _Key())
        key.group = group
        self._kid_of[group] = kid

    def refused(self, token: int) -> None:
        """The broker refused this push: the key cannot be pushed by itself."""
        for key in self._keys.values():
            key.queue = deque(push for push in key.queue if push.token != token)

    def granted(self, group: int, grant: int) -> None:
        """The next push of this group may go."""
        kid = self._kid_of.get(group)
        if kid is not None:
            self._keys[kid].grant = grant

    def cancelled(self, group: int, grant: int) -> None:
        """The grant no longer counts (an update happened without it); another follows."""
        kid = self._kid_of.get(group)
        if kid is not None and self._keys[kid].grant == grant:
            self._keys[kid].grant = None

    def take(self, group: int) -> tuple[PushPlain, int, int, int] | None:
        """Return (push, grant, batch, kid) if one can go now."""
        kid = self._kid_of.get(group)
        key = self._keys.get(kid) if kid is not None else None
        if kid is None or key is None or key.grant is None or not key.queue:
            return None
        grant, key.grant = key.grant, None
        key.batch += 1
        key.open += 1
        return key.queue.popleft(), grant, key.batch, kid

    def settled(self, group: int) -> None:
        """One push of this group is settled."""
        self._keys[self._kid_of[group]].open -= 1

    def busy(self, kid: int) -> bool:
        """Return whether a push of this key is queued or on its way."""
        key = self._keys.get(kid)
        return key is not None and (bool(key.queue) or key.open > 0)

    def clear(self) -> list[int]:
        """Forget all (the broker started anew, before anything was pushed); return what was
        queued."""
        queued = [push.token for key in self._keys.values() for push in key.queue]
        self._keys.clear()
        self._kid_of.clear()
        return queued
