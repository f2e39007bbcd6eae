"""A worker process that comes to grief on purpose: `python victim.py KIND WHAT BROKER`.

KIND is how it trains: torch, jit (just in time) or jax; or it is aio, which only forks. WHAT is
"dies" (SIGKILL inside its third backward pass, after a gradient has left) or "forks" (a child calls
what it must not; prints what it was told, as JSON). `train` is what the others of its cluster do,
too.
"""

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
import sys
import threading
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np

import zkv
from zkv_workers import signals as s

SIZE = 20_000
"""Elements of each of the two keys: a block of its own, which leaves as soon as it is there."""
TOGETHER = 2
"""How many batches the victim finishes."""
PATIENCE_S = 20.0


class Between:
    """What happens in a backward pass when a gradient has left."""

    def __init__(self, worker: Any, what: Callable[[], Any]) -> None:
        self.wanted = False
        self._what, self._sent, self._feed = what, threading.Event(), worker._driver.feed
        worker._driver.feed = self._fed

    def _fed(self, event: Any) -> None:
        self._feed(event)
        if isinstance(event, s.SendBlock):
            self._sent.set()

    def begin(self, *, wanted: bool) -> None:
        """A batch begins, in which it is to happen or not."""
        self.wanted = wanted
        self._sent.clear()

    def __call__(self) -> None:
        if self.wanted:
            assert self._sent.wait(PATIENCE_S), "no gradient has left before"
            self._what()


def train(kind: str, worker: Any, batches: int, scale: float, what: Any = None) -> Any:
    """Train with gradients of `scale`; in one more batch, `what()` is called inside the backward
    pass. Return the newest batch."""
    between = Between(worker, what)
    one = (_jax if kind == "jax" else _torch)(kind, worker, scale, between)
    for number in range(batches + (what is not None)):
        between.begin(wanted=number == batches)
        newest = one()
    return newest


def _torch(kind: str, worker: Any, scale: float, between: Between) -> Callable[[], Any]:
    import torch
    from torch import nn

    from zkv.torch import attach

    class Bias(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.bias = nn.Parameter(torch.zeros(SIZE))

        def forward(self, x: Any) -> Any:
            return x + self.bias

    class Through(torch.autograd.Function):  # type: ignore[misc]
        @staticmethod
        def forward(context: Any, x: Any) -> Any:
            return x.clone()

        @staticmethod
        def backward(context: Any, grad: Any) -> Any:
            between()
            return grad

    first, second = Bias(), Bias()
    optimizer = attach(nn.ModuleList([first, second]), worker, just_in_time=kind == "jit")

    def one() -> Any:
        optimizer.zero_grad()
        with optimizer.batch() as batch:
            (scale * second(Through.apply(first(torch.zeros(SIZE))))).sum().backward()
        return batch

    return one


def _jax(kind: str, worker: Any, scale: float, between: Between) -> Callable[[], Any]:
    import jax
    import jax.numpy as jnp

    from zkv.jax import attach

    def call(_: Any) -> Any:
        between()
        return np.True_

    def back(_: None, cotangent: Any) -> Any:
        done = jax.experimental.io_callback(call, jax.ShapeDtypeStruct((), np.bool_), cotangent)
        return (jnp.where(done, cotangent, 0),)

    through = jax.custom_vjp(lambda x: x)
    through.defvjp(lambda x: (x, None), back)
    optimizer = attach([jnp.zeros(SIZE), jnp.zeros(SIZE)], worker)

    def loss(params: Any) -> Any:
        # XLA orders what depends on nothing as it likes; behind its tap, a gradient has left.
        first, second = optimizer.tap([through(params[0]), params[1]])
        return scale * jnp.sum(first + second)

    computed = jax.jit(jax.grad(loss))

    def one() -> Any:
        with optimizer.batch() as batch:
            batch.push(jax.block_until_ready(computed(batch.params)))
        return batch

    return one


def dies() -> None:
    """End as a machine does whose power is cut."""
    os.kill(os.getpid(), signal.SIGKILL)


def told(call: Callable[[], Any]) -> str:
    """What a child process is told that makes this call; "nothing" if that does not end."""
    reads, writes = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            text = f"returned {call()!r}"
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
        os.write(writes, text.encode()[:4000])
        os._exit(0)
    os.close(writes)
    heard = bool(select.select([reads], [], [], PATIENCE_S)[0])
    text = os.read(reads, 4000).decode() if heard else "nothing"
    if not heard:
        os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    os.close(reads)
    return text


def forks(kind: str, worker: Any) -> dict[str, str]:
    """What a child is told that uses its parent's worker."""
    warnings.simplefilter("ignore")  # JAX and Python warn of forks.
    found: dict[str, str] = {}

    def inside() -> None:
        found["inside a backward pass"] = told(worker.status)

    newest = train(kind, worker, 1, 1.0, inside)
    found["fate"] = told(newest.wait)
    found["the parent's fate"] = newest.wait()
    calls: dict[str, Callable[[], Any]] = {
        "the next batch": lambda: worker.batch().__enter__(),
        "pull": worker.pull,
        "push": lambda: worker.push("more", np.ones(1)),
        "barrier": worker.barrier,
        "stats": worker.stats,
        "close": worker.close,
    }
    worker.init({"more": np.zeros(1)}, plain=True)
    found |= {name: told(call) for name, call in calls.items()}
    pushed = worker.push("more", np.ones(1))
    found["a push"] = told(pushed.result)
    found["the parent's push"] = pushed.result()
    return found


def driven(made: Any) -> Any:
    """Return the result of a coroutine that does not wait for a loop."""
    try:
        for _ in range(100):
            made.send(None)
    except StopIteration as done:
        return done.value
    return "waits"


async def forks_aio(broker: str) -> dict[str, str]:
    """What a child is told that uses its parent's worker of asyncio."""
    async with zkv.aio.connect(broker, rank=0) as worker:
        await worker.init({"w": np.zeros(SIZE, np.float32)})
        await worker.init({"more": np.zeros(1)}, plain=True)
        batch = worker.batch()
        async with batch:
            found = {"inside": told(lambda: batch.push("w", np.ones(SIZE, np.float32)))}
            batch.push("w", np.ones(SIZE, np.float32))
        calls: dict[str, Callable[[], Any]] = {
            "the next batch": lambda: driven(worker.batch().__aenter__()),
            "pull": lambda: driven(worker.pull()),
            "push": lambda: worker.push("more", np.ones(1)),
            "status": lambda: driven(worker.status()),
            "barrier": lambda: driven(worker.barrier()),
        }
        found |= {name: told(call) for name, call in calls.items()}
        return found | {"the parent's fate": await batch.wait()}


def main(kind: str, what: str, broker: str) -> None:
    """Be the victim."""
    if kind == "aio":
        print(json.dumps(asyncio.run(forks_aio(broker))))
        return
    with zkv.connect(broker, rank=1 if what == "dies" else 0) as worker:
        if what == "dies":
            train(kind, worker, TOGETHER, 3.0, dies)
        else:
            print(json.dumps(forks(kind, worker)))


if __name__ == "__main__":
    main(*sys.argv[1:])
