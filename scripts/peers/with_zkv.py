"""zkv under BSP: a round is a batch, with the update on the servers, up to its commit.

The peer's name says how payloads travel: `memory`, `tcp`, `broker` (through the broker), `arena`
(gradients that are made in shared memory, and values that are looked at there).
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import task

import zkv

OPTIONS: dict[str, dict[str, Any]] = {
    "memory": {},
    "arena": {},
    "tcp": {"shared_bytes": 0},
    "broker": {"route": "broker"},
}
STARTS = {"memory": "memory", "arena": "memory", "tcp": "tcp", "broker": "tcp: they go through the"}
"""How the transport begins that a worker of each variant has to tell."""
RULE = "sgd:lr=1"
"""From zeros the first update leads to the gradients' mean, negative."""


def work(case: task.Case, rank: int, at: str) -> task.Told:
    """Train with gradients that are there already."""
    given = task.gradients(task.sizes(case.tensors), rank)
    gradients = {f"w{number}": one for number, one in enumerate(given)}
    options = OPTIONS[case.peer] | {"insecure": bool(case.worker_hosts)}
    with zkv.connect(at, rank=rank, world=case.workers, **options) as worker:
        worker.init({key: np.zeros_like(one) for key, one in gradients.items()})
        if case.peer == "arena":
            shared = worker.buffers(gradients)
            for key, gradient in gradients.items():
                shared[key][...] = gradient
            gradients = shared

        def once() -> None:
            with worker.batch() as batch:
                _ = batch.views if case.peer == "arena" else batch.params
                batch.push_all(gradients.items())
            if batch.wait() != "committed":
                raise SystemExit(f"worker {rank}: a batch was {batch.outcome}")

        def checked() -> None:
            found = worker.pull(list(gradients))
            task.check([found[key] for key in gradients], case, mean=True, sign=-1)

        told = task.timed(case, rank, once, checked)
        told["version"] = zkv.__version__
        told["transport"] = worker.stats()["transport"]
        if not case.worker_hosts and not told["transport"].startswith(STARTS[case.peer]):
            raise SystemExit(f"payloads went through {told['transport']}, not through {case.peer}")
    return told


@contextmanager
def role(host: Sequence[Any], *arguments: str) -> Iterator[str]:
    """Run a command of `zkv` on a machine; yield the address that it announces."""
    address, enter = host
    own = ("--bind", f"tcp://{address}:0", "--insecure", "--log-level", "warning")
    process = subprocess.Popen(
        [*enter, sys.executable, "-m", "zkv_cli", *arguments, *own],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "ZKV_LIFELINE": "stdin", "PYTHONUNBUFFERED": "1"},
    )
    said = []
    try:
        assert process.stdout is not None
        for line in process.stdout:
            said.append(line)
            found = re.search(r"(?:broker|server) at (tcp://\S+)", line)
            if found:
                yield found[1]
                break
        else:
            raise SystemExit(f"zkv {arguments[0]} did not start: {''.join(said)}")
    finally:
        process.terminate()
        process.communicate(timeout=30)


@contextmanager
def spread(case: task.Case, *options: str) -> Iterator[str]:
    """Run a broker and servers on the case's machines; yield the broker's address.

    The broker is on the first server's machine.
    """
    with ExitStack() as stack:
        count = ("--servers", str(case.servers), "--workers", str(case.workers))
        broker = stack.enter_context(role(case.server_hosts[0], "broker", *count, *options))
        for at in range(case.servers):
            stack.enter_context(role(case.server_hosts[at], "server", "--broker", broker))
        yield broker


def drive(case: task.Case) -> list[task.Told]:
    """Run a cluster and its workers."""
    if case.server_hosts:
        with spread(case, "--optimizer", RULE) as broker:
            return task.crew(case, broker)
    with zkv.local(servers=case.servers, policy="bsp", optimizer=RULE) as cluster:
        return task.crew(case, cluster.address)


if __name__ == "__main__":
    task.main(drive, work)
