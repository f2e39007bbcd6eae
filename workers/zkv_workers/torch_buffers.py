"""The buffers of a PyTorch model (BatchNorm's running statistics, say), kept alike over workers.

They are no part of a batch: each is a plain key of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from zkv.dtypes import Array
from zkv_workers import torch_tensors as tensors
from zkv_workers.waiting import Pushed

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
        self._under_way: dict[str, tuple[Array, Pushed]] = {}
        """Own values that wait for the other workers'."""

    def init(self) -> None:
        """Initialise the keys, and take the first worker's values."""
        if not self._buffers:
            return
        arrays = {key: tensors.buffer_array(key, one) for key, one in self._buffers.items()}
        self._worker.init(arrays, rule="assign", reduce="mean", plain=True)
        self._pull({})

    def finished(self) -> None:
        """A batch was finished: take what has come, and send what is due.

        It waits for nobody: workers may do different numbers of batches, and under bsp one that is
        in a barrier would be waited for by the one that it waits for.

        Raises:
            PushRefused: a buffer of this worker is not finite; it is named.
        """
        self._batches += 1
        if self._under_way and all(pushed.done() for _, pushed in self._under_way.values()):
            self._take()
        if self._batches % self._every == 0 and not self._under_way:
            self._send()

    def sync(self) -> None:
        """Take part in a mean over the workers, or of rank 0 alone, and wait for its result.

        If a push is under way already it serves: so all have pushed equally often.

        Raises:
            PushRefused: a buffer of this worker is not finite; it is named.
            WaitTimeout: the others did not come to it in time; the text says who is missing.
        """
        if not self._under_way:
            self._send()
        if self._under_way:
            self._take()

    def _send(self) -> None:
        if self._way == "local":
            return
        for key, buffer in self._buffers.items():
            averaged = self._way == "mean" and buffer.is_floating_point()
            weight = 1.0 if averaged or self._worker.rank == 0 else 0.0
            array = tensors.buffer_array(key, buffer)
            self._under_way[key] = (array, self._worker.push(key, array, weight=weight))

    def _take(self) -> None:
        sent, self._under_way = self._under_way, {}
        self._pull({key: array for key, (array, _) in sent.items()})
        for _, pushed in sent.values():
            pushed.result()

    def _pull(self, sent: Mapping[str, Array]) -> None:
        """Take the values of all buffers, when own pushes of them are settled.

        What a counter has counted since it was sent is kept.
        """
        for key, array in self._worker.pull(list(self._buffers)).items():
            buffer = self._buffers[key]
            if key in sent and not buffer.is_floating_point() and buffer.dtype is not torch.bool:
                array = np.asarray(array + (tensors.buffer_array(key, buffer) - sent[key]))
            tensors.write(key, array, buffer)
