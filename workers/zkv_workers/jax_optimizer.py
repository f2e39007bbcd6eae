"""The optimizer of an attached JAX model: its steps are batches of a worker.

Three faces of one thing: blocks, `begin` with `step`, and a transformation of optax.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from types import TracebackType
from typing import Any, TypeVar

import numpy as np

from zkv.dtypes import Array
from zkv.errors import Cancelled, StaleValues
from zkv.pool import Shard
from zkv_workers.blocking import Batch, Worker
from zkv_workers.jax_step import Step
from zkv_workers.jax_taps import tap
from zkv_workers.jax_transformation import transformation
from zkv_workers.jax_tree import Tree, on_host
from zkv_workers.jax_updates import difference, strays

log = logging.getLogger("zkv.worker")

_T = TypeVar("_T")


class Block:
    """One batch as a context manager (made by `Optimizer.batch` and `Optimizer.batches`).

    Entering waits until the policy lets it begin; leaving finishes it. A cancelled batch raises
    `Cancelled`, which the block swallows; any other exception withdraws it, and goes on. What is
    not here is that of the worker's `Batch`: `version`, `samples`, `cancelled`, `outcome`, `wait`.
    """

    def __init__(self, optimizer: Optimizer, batch: Batch) -> None:
        self._optimizer, self._batch = optimizer, batch
        self._step: Step | None = None
        self._params: Any = None
        self._weight: float | None = None
        self._loss: float | None = None

    @property
    def params(self) -> Any:
        """The parameters to compute on: the model at `version`, as the attached pytree.

        Raises:
            Cancelled: the batch no longer counts.
        """
        if self._params is None:
            self._params = self._optimizer._params_of(self._open.batch)
        return self._params

    def push(self, gradients: Any) -> None:
        """Hand over all gradients (means over the batch's samples), once.

        What taps have sent is not sent again. None in a leaf's place: it has no gradient on this
        worker, which counts as zero.

        Raises:
            Cancelled: the batch no longer counts.
            KeyMismatch: they have another structure, a shape or a dtype; the key is named.
            PushRefused: one has NaN or Inf, which its codec cannot send.
        """
        self._optimizer._hand_over(self._open, gradients)

    def set_weight(self, weight: float) -> None:
        """Say of how many samples the batch is, before the block is left."""
        self._weight = weight

    def set_loss(self, loss: Any) -> None:
        """Say the loss of the batch (see `Batch.set_loss`), before the block is left."""
        self._loss = float(loss)

    @property
    def _open(self) -> Step:
        if self._step is None:
            raise RuntimeError("use the batch inside its block: `with optimizer.batch() as batch:`")
        return self._step

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._batch if self._step is None else self._step.batch, name)

    def __enter__(self) -> Block:
        self._step = self._optimizer._begin(self._batch, explicit=True)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        step = self._open
        self._optimizer._step = None
        if error is not None and not isinstance(error, Cancelled):
            step.withdraw()
            return False
        if error is None and not step.handed and not step.vain:
            step.withdraw()
            raise RuntimeError(
                "the block was left without its gradients, so the batch is withdrawn: hand them "
                "over with batch.push(gradients), also where taps have sent them"
            )
        step.finish(self._weight, self._loss)
        return error is not None


class Optimizer:
    """The optimizer of an attached model: rule and state are on the servers (made by `attach`).

    Calls may come from any one thread at a time; taps and updates inside of jitted functions come
    from JAX's threads while the caller waits, and are none in this sense.
    """

    def __init__(self, tree: Tree, worker: Worker, weight: float) -> None:
        self._tree, self._worker, self._weight = tree, worker, weight
        self._fixed = False
        """Whether the last step() has left the weight as it is."""
        self._step: Step | None = None
        self._busy = threading.Lock()
        # JAX's own threads take denormal numbers for zero, which must not get into codes.
        self._hand = ThreadPoolExecutor(1, thread_name_prefix="zkv-jax")
        self._taps = {key: tap(partial(self._tapped, key)) for key in tree.keys}
        self._told = False
        self._errors: dict[str, float] = {}
        """By how much parameters may differ from the batch's, as no update leads there."""
        self.last: Batch | None = None
        """The batch of the newest step; its `outcome` tells what became of it, `wait()` waits."""
        self.closed = False
        self.resent = 0
        """How many batches were sent again whole, as taps had sent something else."""

    # --- faces -------------------------------------------------------------------------------

    def tap(self, params: Any) -> Any:
        """Return the parameters, tapped: the backward pass sends each gradient as it is computed.

        To be called once inside the function that is differentiated, on all parameters:
        ``params = optimizer.tap(params)``. A tap sends while a batch is open, and does nothing
        otherwise. What counts are the gradients that are handed over at last: if one is not what
        was sent (clipped since, accumulated over several passes, computed per sample), the batch
        is sent again whole; a log line says so once.

        Raises:
            KeyMismatch: not the attached parameters, as whole leaves; the key is named.
        """
        leaves = self._tree.named("what is tapped", params)
        return self._tree.tree_of(
            {key: None if leaf is None else self._taps[key](leaf) for key, leaf in leaves.items()}
        )

    def batch(self, weight: float | None = None) -> Block:
        """Return the next batch, of `weight` samples (None: attach's), as a context manager."""
        return Block(self, self._worker.batch(self._weight if weight is None else weight))

    def batches(self, data: Shard) -> Iterator[Block]:
        """Return all batches that the run deals to this worker (see `Worker.batches`):
        ``for block in …: with block as batch:``, where `batch.samples` are its samples."""
        for batch in self._worker.batches(data):
            yield Block(self, batch)

    def begin(self) -> Any:
        """Begin a batch and return the parameters to compute it on.

        If one is open, as its computation has failed, it is withdrawn first.

        Raises:
            RuntimeError: inside of a block, or another thread is at it.
        """
        with self._alone():
            return self._tree.placed(self._begin_values())

    def step(self, gradients: Any, *, weight: float | None = None, loss: Any = None) -> Any:
        """Finish the open batch and begin the next; return its parameters.

        `last.outcome` tells if the batch was cancelled meanwhile. An exception withdraws it, and
        `begin` begins another.

        Args:
            gradients: means over the batch's samples, of the parameters' structure.
            weight: how many samples that were; None: attach's `weight`.
            loss: see `Batch.set_loss`.

        Raises:
            RuntimeError: no batch is open, or another thread is at it.
            KeyMismatch, PushRefused: see `Block.push`.
        """
        given = on_host(self._tree.named("gradients", gradients))
        with self._alone():
            return self._tree.placed(self._next_values(given, weight, loss))

    def transformation(self) -> Any:
        """Return an `optax.GradientTransformationExtraArgs` whose update is `step`.

        ``tx.update(gradients, state, params, weight=…, value=loss)`` returns the updates that lead
        from `params` to the servers' new values: `optax.apply_updates` gives these, bit for bit
        but for what `zkv_workers.jax_updates.difference` says, and errors do not add up, as each
        difference is taken anew; `step` returns the values themselves. Updates of float16 and
        bfloat16 are float32. It may be jitted, and comes last in a chain: what follows would change
        values that are the servers'. Call `begin` for the first parameters.

        `update` raises ValueError without `params`, and what `step` raises; in a jitted function
        that is a `jax.errors.JaxRuntimeError` whose text has it all.
        """

        return transformation(self._tree, self._change, self._change_beside)

    def pull(self) -> Any:
        """Return the newest whole version of the model; no batch begins or ends."""
        return self._tree.placed(self._worker.evaluate().params)

    def withdraw(self) -> None:
        """Give up the batch that `begin` or `step` has begun, if there is one: nobody waits for it.

        Raises:
            RuntimeError: inside of a block, which only an exception withdraws.
        """
        if self._step is not None and self._step.explicit:
            raise RuntimeError("the batch of a block is withdrawn by an exception that leaves it")
        self._withdraw()

    def close(self) -> None:
        """Withdraw the open batch, if there is one, and let the worker be attached again."""
        self.closed = True
        self._withdraw()

    # --- inside ------------------------------------------------------------------------------

    @contextmanager
    def _alone(self) -> Iterator[None]:
        if not self._busy.acquire(blocking=False):
            raise RuntimeError("another thread is using this optimizer at this moment")
        try:
            yield
        finally:
            self._busy.release()

    def _begin(self, batch: Batch, *, explicit: bool) -> Step:
        if self.closed:
            raise RuntimeError("the optimizer is closed; attach the parameters again")
        if self._step is not None:
            raise RuntimeError(
                "a batch is open already: leave its block, or call optimizer.withdraw()"
            )
        batch.__enter__()
        self._step, self.last = Step(self._worker, batch, explicit=explicit), batch
        return self._step

    def _params_of(self, batch: Batch) -> Any:
        return self._tree.placed(batch.params)

    def _withdraw(self) -> None:
        step, self._step = self._step, None
        if step is not None:
            step.withdraw()

    def _begin_values(self) -> Mapping[Any, Array]:
        """Begin a batch; return its values."""
        if self._step is not None and self._step.explicit:
            raise RuntimeError("begin() inside of a block, which has begun a batch already")
        self._withdraw()
        self._errors.clear()
        while True:
            # What step() says may be another weight; servers need not guess twice.
            weight = self._weight if self._fixed else None
            step = self._begin(self._worker.batch(weight), explicit=False)
            try:
                return step.batch.params
            except Cancelled:
                self._step = None
                step.finish()
            except BaseException:
                self._withdraw()
                raise

    def _next_values(
        self, gradients: Mapping[str, Array | None], weight: Any, loss: Any
    ) -> Mapping[Any, Array]:
        """Finish the open batch and begin the next; return its values."""
        step = self._step
        if step is None or step.explicit:
            raise RuntimeError("no batch of begin() is open: params = optimizer.begin() begins one")
        try:
            weight, loss = (None if one is None else float(one) for one in (weight, loss))
            self._send(step, gradients)
        except Cancelled:
            pass
        except BaseException:
            self._withdraw()
            raise
        self._step = None
        self._fixed = weight is None
        if weight is None and not step.explicit:
            weight = self._weight
        step.finish(weight, loss)
        last = step.batch
        values = self._begin_values()
        self.last = last
        return values

    def _hand_over(self, step: Step, gradients: Any) -> None:
        self._send(step, on_host(self._tree.named("gradients", gradients)))

    def _send(self, step: Step, gradients: Mapping[str, Array | None]) -> None:
        try:
            step.hand_over(gradients)
        finally:
            self.last = step.batch
            if step.resent:
                self.resent += 1
                if not self._told:
                    self._told = True
                    log.warning(
                        "batch %d is sent again whole: %s; taps are for gradients that are handed "
                        "over as they were computed, once for each batch",
                        step.batch.number,
                        step.resent,
                    )

    # --- inside of callbacks: NumPy alone ------------------------------------------------------

    def _on_hand(self, work: Callable[[], _T]) -> _T:
        return self._hand.submit(work).result()

    def _tapped(self, key: str, gradient: Array) -> None:
        step = self._step
        if step is not None:
            self._on_hand(partial(step.tapped, key, gradient))

    def _change(
        self, gradients: Any, params: Any, weight: Any, loss: Any
    ) -> tuple[Array, dict[str, Array]]:
        given, held = on_host(gradients), on_host(params)
        with self._alone():
            return self._update(given, held, weight, loss)

    def _change_beside(
        self, gradients: Any, params: Any, weight: Any, loss: Any
    ) -> tuple[Array, dict[str, Array]]:
        given, held = on_host(gradients), on_host(params)
        with self._alone():
            return self._on_hand(partial(self._update, given, held, weight, loss))

    def _update(
        self,
        gradients: Mapping[str, Array | None],
        params: Mapping[str, Array | None],
        weight: Any,
        loss: Any,
    ) -> tuple[Array, dict[str, Array]]:
        self._check_fresh(params)
        values = self._next_values(gradients, weight, loss)
        assert self._step is not None
        changes = {}
        for key in self._tree.keys:
            held = params[key]
            assert held is not None
            changes[key], self._errors[key] = difference(held, values[key])
        return np.asarray(self._step.batch.version, np.int32), changes

    def _check_fresh(self, params: Mapping[str, Array | None]) -> None:
        """Check that these are the open batch's parameters; if not, withdraw it.

        Raises:
            StaleValues: they are not; the key is named.
        """
        step = self._step
        if step is None or step.explicit or step.vain:
            return
        values = step.batch.params
        for key, held in params.items():
            if held is None or strays(held, values[key], self._errors.get(key, 0.0)):
                self._withdraw()
                raise StaleValues(
                    f"key {key!r}: the parameters are not those of the batch that is open: apply "
                    "the updates of each step before the next, take the first ones from begin(), "
                    "and put nothing around or behind the transformation (optax.MultiSteps runs "
                    "it at each of its steps: add gradients up yourself)"
                )
