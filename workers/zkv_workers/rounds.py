"""A round of local batches: when it is over, what it contributes, and which samples are its own.

Both faces decide this alike; they only await. Samples are drawn for a whole round at once, as a
draw of the pool is settled with its contribution: a round that has not computed all that it has
drawn is withdrawn. It must not know workers' calls.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace

from zkv.dtypes import Array
from zkv.errors import Cancelled
from zkv.pool import INT_MAX, Shard
from zkv_workers.batch import AnyBatch
from zkv_workers.copies import Copy, copy_for
from zkv_workers.faces import Key
from zkv_workers.fragments import Fragments, check_h, check_policy, count_of
from zkv_workers.model import check_weight
from zkv_workers.samples import check_shard


class Round:
    """One round: `parts` local batches on the worker's own copy, and their weight so far."""

    def __init__(self, batch: AnyBatch, copy: Copy, parts: int, *, dealt: bool) -> None:
        self.batch = batch
        self.copy = copy
        self.parts = parts
        self.dealt = dealt
        """Whether it has drawn samples: then it counts with all of its local batches or not."""
        self.done = 0
        self.weight = 0.0
        self.losses: list[tuple[float, float]] = []
        """Of the local batches that have told one, with their weights."""
        # A round that is cancelled before it has begun says so inside a block, which swallows it.
        with contextlib.suppress(Cancelled):
            copy.begin(batch)

    @property
    def params(self) -> dict[Key, Array]:
        """The worker's own copy."""
        return self.copy.params(self.batch)

    @property
    def lacks(self) -> bool:
        """Whether samples that it has drawn would count without having been computed."""
        return self.dealt and self.done < self.parts and not self.batch.cancelled

    def contribute(self) -> None:
        """Push what has changed; the weight is all that the round has seen."""
        if self.losses:
            weight = sum(weight for weight, _ in self.losses) or 1.0
            self.batch.set_loss(sum(part * loss for part, loss in self.losses) / weight)
        self.copy.contribute(self.batch, self.weight)


Part = tuple[Round, Array]
"""A round and the samples of one of its local batches."""


class AnyLocalBatch:
    """One local batch: the round's parameters, to be changed in place."""

    def __init__(self, weight: float, part: Part | None = None) -> None:
        self._weight = check_weight(weight)
        self._samples = None if part is None else part[1]
        self._round = None if part is None else part[0]
        self._entered = False
        self._left = False

    @property
    def _open(self) -> Round:
        if self._round is None or not self._entered:
            raise RuntimeError("use the local batch inside its block")
        return self._round

    @property
    def params(self) -> dict[Key, Array]:
        """The worker's own copy of the model: change it in place.

        Raises:
            Cancelled: the round no longer counts; the block swallows it.
        """
        return self._open.params

    def __getitem__(self, key: Key) -> Array:
        return self.params[key]

    @property
    def samples(self) -> Array:
        """The numbers of this local batch's samples: int64, from `local.batches(data)`."""
        return self._dealt[1]

    @property
    def pass_number(self) -> int:
        """The pass over the data that these samples belong to, from 1."""
        return self._dealt[0].batch.pass_number

    def set_loss(self, loss: float) -> None:
        """Say the loss of this local batch (see `Batch.set_loss`); the round's is their mean."""
        self._open.losses.append((self._weight, float(loss)))

    @property
    def _dealt(self) -> Part:
        if self._round is None or self._samples is None:
            raise RuntimeError("this batch has no samples: take it from local.batches(data)")
        return self._round, self._samples

    @property
    def version(self) -> int:
        """The model version that the round began with."""
        return self._open.batch.version

    @property
    def cancelled(self) -> bool:
        """Whether the policy has cancelled the round."""
        return self._open.batch.cancelled


Left = tuple[bool, BaseException | None]
"""Whether the round's batch is to be left, and with which error."""


class Rounds:
    """What both faces decide alike: when a round is over, and how its batch is left."""

    def __init__(
        self, h: int, fragments: Fragments, mixing: float, policy: Callable[[], str]
    ) -> None:
        self._h = check_h(h, fragments)
        """The local batches of a round."""
        self._copy = copy_for(fragments, mixing)
        if count_of(fragments) > 1:
            check_policy(policy())
        self._round: Round | None = None
        self._dealt: bool | None = None
        """Whether the rounds draw samples; None before the first one."""

    def _check_kind(self, *, dealt: bool) -> None:
        if self._dealt not in (None, dealt):
            raise RuntimeError(
                "local.batch(weight) and local.batches(data) do not mix: take all local batches of "
                "one `worker.local(h)` from one of the two"
            )

    def _start(self, batch: AnyBatch, parts: int, *, dealt: bool) -> Round:
        """Begin a round on a batch whose block was entered."""
        self._dealt = dealt
        try:
            self._round = Round(batch, self._copy, parts, dealt=dealt)
        except BaseException:
            # Nobody would leave its block.
            batch.abandon()
            raise
        batch.pause(True)
        return self._round

    def _needs_round(self, batch: AnyLocalBatch) -> bool:
        """Check that a local batch may be entered; return whether a round is to begin with it.

        Raises:
            RuntimeError: it was entered before, its round is over, or it is of the other kind.
        """
        if batch._entered:
            raise RuntimeError("a local batch is used once; take the next one")
        if batch._round is None:
            self._check_kind(dealt=False)
        elif batch._round is not self._round:
            raise _over()
        return self._round is None

    def _enter(self, batch: AnyLocalBatch) -> None:
        batch._round, batch._entered = self._round, True
        batch._open.batch.pause(False)

    def _leave(self, batch: AnyLocalBatch, error: BaseException | None) -> Left:
        """Leave a local batch, the round too if it is over or fails.

        Raises:
            RuntimeError: the round was given up inside the block.
        """
        batch._left = True
        current = self._round
        if current is None or current is not batch._round:
            if error is None:
                raise _over()
            return False, error
        if error is not None:
            self._round = None
            return True, error
        current.batch.pause(True)
        current.done += 1
        current.weight += batch._weight
        if current.done < current.parts and not current.batch.cancelled:
            return False, None
        return self._close(None)

    def _close(self, error: BaseException | None) -> Left:
        """End the round, early or not: what it has changed is its contribution, unless samples
        would count that nobody has computed."""
        current = self._round
        if current is None:
            return False, None
        if error is None and current.lacks:
            self._give_up()
            return False, None
        self._round = None
        if error is None:
            try:
                current.contribute()
            except Cancelled as cancelled:
                return True, cancelled
        return True, error

    def _give_up(self) -> None:
        current, self._round = self._round, None
        if current is not None:
            current.batch.abandon()

    # --- samples -----------------------------------------------------------------------------

    def _draws(self, data: Shard) -> Shard:
        """Return what a loop over `data` asks the pool for: the samples of whole rounds.

        Raises:
            TypeError: it is no shard.
            RuntimeError: rounds without samples were begun here.
        """
        check_shard(data)
        self._check_kind(dealt=True)
        return replace(data, size=min(data.size * self._h, INT_MAX))

    def _deal(self, batch: AnyBatch, size: int) -> Iterator[Part]:
        """Begin a round on a draw, and cut it into local batches for as long as the round goes
        on."""
        samples = batch.samples
        starts = range(0, len(samples), size)
        begun = self._start(batch, len(starts), dealt=True)
        for start in starts:
            if self._round is not begun:
                return
            yield begun, samples[start : start + size]

    def _go_on(self, batch: AnyLocalBatch) -> Left:
        """A loop asks for what comes after this batch: leave its round if it was cancelled.

        Raises:
            RuntimeError: the batch was not used, so its samples would count without it.
        """
        mine = self._round is not None and self._round is batch._round
        if not batch._left:
            if mine:
                self._give_up()
            raise RuntimeError(
                "the local batch before this one is not finished: enter and leave each in its turn,"
                " `for batch in local.batches(data):` and in it `with batch:`"
            )
        if mine and batch.cancelled:
            return self._close(None)
        return False, None


def _over() -> RuntimeError:
    return RuntimeError(
        "the round of this local batch is over: enter and leave each local batch before the next "
        "one is taken, and before `worker.local(h)` is left"
    )
