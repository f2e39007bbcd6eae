"""What a batch computes on: one version's values, key by key as they come."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from zkv.dtypes import Array
from zkv.span_split import VALUES
from zkv_workers import signals as s
from zkv_workers.faces import Clock, Key, Ledger, named
from zkv_workers.model import BatchState
from zkv_workers.outgoing import Feed

STRIDE_BYTES = 8 * 2**20
"""What is waited for at a time: a wait costs as much as copying some hundred KiB."""


class BatchValues(ABC):
    """The values of one batch, once it is granted and entered."""

    def __init__(self, ledger: Ledger, feed: Feed) -> None:
        self._ledger = ledger
        self._feed = feed
        self._state: BatchState | None = None
        self._entered = False
        self._samples: tuple[Array, int] | None = None
        self._touched = False
        """Whether any value was handed out, or any gradient taken."""
        self._waited_s = 0.0
        """In the block, for values: no computing."""

    @property
    def _open(self) -> BatchState:
        if self._state is None or not self._entered:
            raise RuntimeError("use the batch inside its block: `with worker.batch() as batch:`")
        return self._state

    @property
    def params(self) -> dict[Key, Array]:
        """The model at `version`: fresh arrays by key, yours to change.

        Raises:
            Cancelled: the batch no longer counts; the `with` block swallows it.
        """
        return self.settle().params()

    @property
    def views(self) -> dict[Key, Array]:
        """The model at `version` as read-only arrays: those that a server of this machine has are
        looked at where they lie, which costs nothing, and others are copies.

        They stay as they are as long as you have them, and so much of the server's memory with
        them.

        Raises:
            Cancelled: the batch no longer counts; the `with` block swallows it.
        """
        self._need(None)
        self._touched = True
        return self._open.views()

    def settle(self) -> BatchState:
        """Wait for all values, and return them; from here on this batch does not begin again."""
        self._need(None, copies=True)
        self._touched = True
        self._open.check()
        return self._open

    def __getitem__(self, key: Key) -> Array:
        """One key's array of `params`: only its values are waited for."""
        self._need((key,), copies=True)
        self._touched = True
        return self._open.value(key)

    def read_into(self, key: Key, out: Any) -> None:
        """Write one key's values straight into an array of yours, once they are here.

        `out`: NumPy's, or one on a GPU; writable, C-contiguous, of the key's shape and dtype; or
        several of them on different GPUs, in a list or `zkv.OnDevices`.

        Raises:
            Cancelled: the batch no longer counts; the `with` block swallows it.
            UnknownKey, KeyMismatch: no key of the model, or not an array for it.
        """
        self._need((key,))
        self._touched = True
        self._open.read_into(key, out)

    def fetch(self, outs: Mapping[Key, Any]) -> None:
        """Write the values of several keys into arrays of yours, as `read_into` does each.

        Of a batch on demand they are forgotten here with that: fetched again, they are sent again.

        Raises:
            Cancelled: the batch no longer counts; the `with` block swallows it.
            UnknownKey, KeyMismatch: no key of the model, or not an array for it.
        """
        self._need(tuple(outs))
        self._touched = True
        try:
            for key, out in outs.items():
                self._open.read_into(key, out)
        finally:
            self.forget(outs)

    def want(self, keys: Iterable[Key]) -> None:
        """Say which keys are needed soon; of a batch on demand they are asked for now."""
        if self._open.on_demand:
            self._feed(s.Want(self.number, self._open.kids_of(keys)))

    def forget(self, keys: Iterable[Key]) -> None:
        """Say which keys are not needed at present; a batch on demand keeps no values of them."""
        if self._open.on_demand:
            self._feed(s.Forget(self.number, self._open.kids_of(keys)))

    def _need(self, keys: Sequence[Key] | None, *, copies: bool = False) -> None:
        """Wait until the values of these keys (None: of all) are here, or the batch is
        cancelled; one of which nothing was seen yet begins again instead. `copies`: they are copied
        for `params` as they come, while caches hold them, and others are under way."""
        if self._open.on_demand:
            # Whether they are here is not looked at: the session may be about to forget them.
            if not self._open.cancelled:
                self._wait(keys, self._open.kids_of(keys))
            return
        while kids := self._lacking(keys):
            self._wait(keys, kids, self._open.first_missing(kids, STRIDE_BYTES) if copies else ())

    def _wait(
        self, keys: Sequence[Key] | None, kids: tuple[int, ...], bids: tuple[int, ...] = ()
    ) -> None:
        waiting = Clock(self._ledger, "wait_s", VALUES, keys=named(keys))
        try:
            self._wait_for(kids, bids)
        finally:
            self._waited_s += waiting.stop()

    def _lacking(self, keys: Sequence[Key] | None) -> tuple[int, ...]:
        """Return what has to be waited for if these keys (None: all) are wanted."""
        if self._is_to_begin_again:
            self._begin_again()
        state = self._open
        return () if state.cancelled else state.missing(keys)

    @property
    def _is_to_begin_again(self) -> bool:
        """Whether the version of this batch never came to be, and nothing was made of it."""
        state, fresh = self._open, not self._touched and self._samples is None
        return fresh and state.cancelled and state.ahead

    @abstractmethod
    def _begin_again(self) -> None:
        """Take the next grant, if it can be waited for here."""

    @abstractmethod
    def _wait_for(self, kids: tuple[int, ...], bids: tuple[int, ...]) -> None:
        """Block until the values of these keys are here (or just these blocks of them), or the
        batch is cancelled."""

    @property
    def version(self) -> int:
        """The model version that this batch computes on."""
        return self._open.version

    @property
    def number(self) -> int:
        """This worker's own count of begun batches, from 1."""
        return self._open.number

    @property
    def clock(self) -> int:
        """How many batches this worker had finished when this one was granted."""
        return self._open.clock

    @property
    def lag_clocks(self) -> int:
        """How many finished batches this worker was behind the fastest (0: it is the fastest)."""
        return self._open.fastest - self._open.clock

    @property
    def spread_clocks(self) -> int:
        """Finished batches of the fastest less those of the slowest worker, at the grant."""
        return self._open.fastest - self._open.slowest

    @property
    def cancelled(self) -> bool:
        """Whether the policy has cancelled this batch: going on is wasted work."""
        return self._open.cancelled
