"""The buffers of a PyTorch model (BatchNorm's running statistics, say), kept alike over workers.

They are no part of a batch: each is a plain key of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zkv_workers import torch_tensors as tensors

WAYS = ("mean", "rank0", "local")


class Buffers:
    """What `attach(buffers=...)` says: how buffers are kept alike, and after how many batches."""

    def __init__(self, worker: Any, buffers: Mapping[str, Any], way: str, every: int) -> None:
        if way not in WAYS:
            raise ValueError(f"buffers={way!r} is none of {', '.join(WAYS)}")
        if every < 1:
            raise ValueError(f"buffers_every={every}: it counts batches, so it is at least 1")
        self._worker, self._buffers, self._way, self._every = worker, buffers, way, every
        self._batches = 0

    def init(self) -> None:
        """Initialise the keys, and take the first worker's values."""
        if not self._buffers:
            return
        arrays = {key: tensors.buffer_array(key, one) for key, one in self._buffers.items()}
        self._worker.init(arrays, rule="assign", reduce="mean", plain=True)
        self._pull()

    def finished(self) -> None:
        """A batch was finished: it may be time to synchronise."""
        self._batches += 1
        if self._way != "local" and self._batches % self._every == 0:
            self.sync()

    def sync(self) -> None:
        """Take part in a mean over the workers, or of rank 0 alone, and take its result.

        Raises:
            PushRefused: a buffer of this worker is not finite; it is named.
            WaitTimeout: the others did not come to it in time; the text says who is missing.
        """
        if not self._buffers or self._way == "local":
            return
        pushed = []
        for key, buffer in self._buffers.items():
            averaged = self._way == "mean" and buffer.is_floating_point()
            weight = 1.0 if averaged or self._worker.rank == 0 else 0.0
            array = tensors.buffer_array(key, buffer)
            pushed.append(self._worker.push(key, array, weight=weight))
        self._pull()
        for one in pushed:
            one.result()

    def _pull(self) -> None:
        for key, array in self._worker.pull(list(self._buffers)).items():
            tensors.write(key, array, self._buffers[key])
