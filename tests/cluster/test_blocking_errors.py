"""The blocking face: an error that arises on the I/O thread reaches the caller, at once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from harness import Cluster, cluster

import zkv
from zkv.errors import KeyMismatch, Refused, UnknownKey, WaitTimeout

CASES: list[tuple[type[Exception], str, Callable[[Any], Any]]] = [
    (TypeError, "'o': dtype object", lambda w: w.init({"o": np.array([object()])})),
    (TypeError, "state_dict", lambda w: w.init([1, 2])),
    (FileNotFoundError, "nowhere", lambda w: w.init("nowhere.safetensors")),
    (KeyMismatch, "shape is (2,), given (3,)", lambda w: w.init({"w": np.zeros(3)})),
    (UnknownKey, "'x'", lambda w: w.pull("x")),
    (UnknownKey, "'x'", lambda w: w.push("x", np.zeros(2))),
    (TypeError, "bool", lambda w: w.pull(True)),
    (Refused, "lr='-1'", lambda w: w.set(lr=-1)),
    (Refused, "no live setting 'depth'", lambda w: w.set(depth=3)),
    (Refused, "ssp:S", lambda w: w.set(policy="sspp")),
    (WaitTimeout, "1 of 2 workers", lambda w: w.batch().__enter__()),
    (ValueError, "weight", lambda w: w.batch(weight=-1)),
    (TypeError, "no option", lambda w: zkv.connect("tcp://127.0.0.1:1", colour="red")),
]


def call_them_all(made: Cluster) -> None:
    with zkv.connect(made.address, rank=0, world=2, wait_timeout_s=1.0) as worker:
        worker.init({"w": np.zeros(2)})
        for kind, words, call in CASES:
            with pytest.raises(kind) as caught:
                call(worker)
            assert words in str(caught.value), str(caught.value)
        assert worker.pull("w").tolist() == [0, 0]


async def test_every_error_reaches_the_caller_and_the_worker_goes_on() -> None:
    async with cluster(1) as made:
        await asyncio.wait_for(asyncio.to_thread(call_them_all, made), 30)
