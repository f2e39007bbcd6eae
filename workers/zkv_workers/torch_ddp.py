"""DistributedDataParallel inside a machine, zkv between machines.

The processes of one DDP group are one worker of the cluster: their gradients are averaged inside
the group, bucket by bucket, and its leader (rank 0 of the group) pushes the average as soon as a
bucket is reduced, while the backward pass goes on. When a batch begins, the leader's values are
broadcast to the group. An exception in one process of a group ends the group's run, as it does with
DDP alone.

Annotations here are no strings, since DDP looks at those of a hook.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from zkv.errors import Lost
from zkv_workers import torch_tensors as tensors
from zkv_workers.blocking import Batch, Worker
from zkv_workers.faces import check_trained
from zkv_workers.torch_buffers import Buffers
from zkv_workers.torch_step import Step
from zkv_workers.torch_survey import survey

LEADER = 0


class State:
    """What `comm_hook` needs: a DDP model, and in its group's leader a worker.

    Every process of the group makes one, at the same time: the first worker's values are broadcast.
    Then ``ddp.register_comm_hook(state, comm_hook)``, and ``with state.batch():`` around each
    forward and backward pass. There is no other optimizer: rule and state are on the servers.

    Args:
        model: a DistributedDataParallel.
        worker: of the leader, rank 0 of the model's group; None in the other processes.
        buffers, buffers_every: how buffers are kept alike between groups (see `AttachOptions`);
            inside a group DDP does that.

    Raises:
        TypeError: no DistributedDataParallel, or no blocking worker.
        ValueError: the leader has no worker, or another process has one.
        Lost: the leader has failed.
    """

    def __init__(
        self,
        model: Any,
        worker: Worker | None = None,
        *,
        buffers: str = "mean",
        buffers_every: int = 100,
    ) -> None:
        if not isinstance(model, DistributedDataParallel):
            kind = type(model).__name__
            raise TypeError(f"State takes a DistributedDataParallel model, not {kind}")
        if worker is not None and not isinstance(worker, Worker):
            raise TypeError(f"State takes a worker of zkv.connect, not {type(worker).__name__}")
        self._group = model.process_group
        rank = dist.get_rank(self._group)
        if (worker is not None) != (rank == LEADER):
            what = "needs a worker" if rank == LEADER else "must have no worker: its leader has one"
            raise ValueError(f"rank {rank} of the group {what}; the leader is rank {LEADER}")
        self.size = dist.get_world_size(self._group)
        self.last: Batch | None = None
        """The leader's newest batch; None in the other processes."""
        self._worker, self._model = worker, survey(model.module)
        self._key_of = {id(one): key for key, one in self._model.trained.items()}
        self._step: Step | None = None
        self._lock = threading.Lock()
        self._buffers: Buffers | None = None
        with self._told("initialise its keys"):
            if worker is not None:
                self._buffers = Buffers(worker, self._model.buffers, buffers, buffers_every)
                worker.init({key: one.detach() for key, one in self._model.trained.items()})
                check_trained(worker._driver, self._model.trained)
                self._buffers.init()
                self.pull(broadcast=False)
        self._broadcast()

    @contextmanager
    def batch(self, weight: float = 1.0) -> Iterator[Batch | None]:
        """Compute one batch of `weight` samples in the whole group (the leader's counts).

        The leader gets its `Batch`, the others None. A cancelled batch is computed in vain, as the
        others of the group cannot be told; the leader's `last.outcome` tells it.

        Raises:
            Lost: the leader could not begin its batch.
        """
        with self._told("begin a batch"):
            if self._worker is not None:
                self.last = self._worker.batch(weight)
                self._step = Step(self.last.__enter__(), self._model.trained)
                self._step.receive()
        self._broadcast()
        step = self._step
        try:
            yield self.last
        except BaseException:
            if step is not None:
                step.withdraw()
            raise
        else:
            if step is not None:
                step.finish(None, None)
                assert self._buffers is not None
                self._buffers.finished()
        finally:
            self._step = None

    def pull(self, *, broadcast: bool = True) -> None:
        """Write the newest version of the model into the leader's parameters, and all others'."""
        if self._worker is not None:
            params = self._worker.evaluate().params
            for key, parameter in self._model.trained.items():
                tensors.write(key, params[key], parameter)
        if broadcast:
            self._broadcast()

    @contextmanager
    def _told(self, what: str) -> Iterator[None]:
        """Let the group know whether the leader has done its part, or all would wait for it."""
        done = torch.zeros(1, dtype=torch.int64)
        try:
            yield
            done += 1
        finally:
            dist.broadcast(done, group=self._group, group_src=LEADER)
        if not int(done):
            raise Lost(f"rank {LEADER} of this group could not {what}; its own error says why")

    def _broadcast(self) -> None:
        everything = [*self._model.trained.values(), *self._model.buffers.values()]
        works = [
            dist.broadcast(one.detach(), group=self._group, group_src=LEADER, async_op=True)
            for one in everything
        ]
        for work in works:
            work.wait()

    def reduced(self, bucket: Any) -> Any:
        """Push the gradients of a bucket that is the group's average now, if this is the leader."""
        if self._worker is not None:
            if self._step is None:
                raise RuntimeError("gradients came outside of `with state.batch():`")
            # Futures may be done on several threads at once.
            with self._lock:
                for parameter, grad in zip(bucket.parameters(), bucket.gradients(), strict=True):
                    self._step.send_given(self._key_of[id(parameter)], grad)
        return bucket.buffer()


def comm_hook(state: State, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket's gradients inside the group and push them; for `register_comm_hook`.

    Args:
        state: this process's `State`.
        bucket: the `torch.distributed.GradBucket` that is ready.

    Returns:
        A `torch.futures.Future` of the averaged bucket.
    """
    buffer = bucket.buffer().div_(state.size)
    work = dist.all_reduce(buffer, group=state._group, async_op=True)
    return work.get_future().then(lambda _: state.reduced(bucket))
