"""Redis: each worker sets its gradients, and gets and adds all others'. Redis cannot add arrays."""

from __future__ import annotations

import subprocess
import tempfile
import time

import numpy as np
import redis
import task

PATIENCE_S = 60
AT_ONCE = 64
"""Commands in a pipeline."""


def work(case: task.Case, rank: int, at: str) -> task.Told:
    """Exchange gradients that are there already."""
    host, port = at.split(":")
    store = redis.Redis(host=host, port=int(port))
    given = task.gradients(task.sizes(case.tensors), rank)
    results = [np.empty_like(one) for one in given]
    others = [other for other in range(case.workers) if other != rank]
    rounds = [0]

    def once() -> None:
        # Nobody is two rounds ahead of who is behind, so two sets of keys in turn are enough.
        turn = rounds[0] % 2
        for begin in range(0, len(given), AT_ONCE):
            pipe = store.pipeline(transaction=False)
            for number in range(begin, min(begin + AT_ONCE, len(given))):
                pipe.set(f"{turn}/{rank}/{number}", memoryview(given[number]).cast("B"))
            pipe.execute()
        if store.incr(f"there/{rounds[0]}") == case.workers:
            for other in range(case.workers):
                store.rpush(f"go/{rounds[0]}/{other}", 1)
        if store.blpop([f"go/{rounds[0]}/{rank}"], timeout=PATIENCE_S) is None:
            raise SystemExit(f"worker {rank} has waited {PATIENCE_S} s for the others")
        for result, mine in zip(results, given, strict=True):
            np.copyto(result, mine)
        for other in others:
            for begin in range(0, len(given), AT_ONCE):
                names = range(begin, min(begin + AT_ONCE, len(given)))
                found = store.mget([f"{turn}/{other}/{number}" for number in names])
                for number, one in zip(names, found, strict=True):
                    results[number] += np.frombuffer(one, np.float32)
        rounds[0] += 1

    told = task.timed(case, rank, once, lambda: task.check(results, case))
    return {"version": store.info()["redis_version"], **told}


def drive(case: task.Case) -> list[task.Told]:
    """Run a server, with nothing on disk, and the workers."""
    port = task.free_port()
    with tempfile.TemporaryDirectory() as folder:
        options = {"port": port, "bind": "127.0.0.1", "save": "", "appendonly": "no", "dir": folder}
        words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        server = subprocess.Popen(["redis-server", *words], stdout=subprocess.DEVNULL)
        try:
            store = redis.Redis(port=port)
            deadline = time.monotonic() + PATIENCE_S
            while True:
                try:
                    store.ping()
                    break
                except redis.ConnectionError:
                    if server.poll() is not None or time.monotonic() > deadline:
                        raise SystemExit("redis-server does not answer") from None
                    time.sleep(0.05)
            return task.crew(case, f"127.0.0.1:{port}")
        finally:
            server.kill()
            server.wait()


if __name__ == "__main__":
    task.main(drive, work)
