"""MXNet 1.9.1's KVStore dist_sync: a scheduler, servers and workers; each tensor is a key.

Without an optimizer a server's value is the sum of the last round's pushes. Runs on Python 3.8.
"""

from __future__ import annotations

import task


def serve(case: task.Case, index: int, at: str) -> None:
    """Be the scheduler or a server: importing MXNet does all of it, and ends with the job."""
    print(at, flush=True)
    import mxnet  # noqa: F401


def work(case: task.Case, rank: int, at: str) -> task.Told:
    """Push gradients that are there already."""
    import mxnet

    store = mxnet.kv.create("dist_sync")
    # Ranks are given in the order of arrival: gradients follow them.
    rank = store.rank
    given = [mxnet.nd.array(one) for one in task.gradients(task.sizes(case.tensors), rank)]
    results = [mxnet.nd.zeros(one.shape) for one in given]
    keys = [str(number) for number in range(len(given))]
    store.init(keys, [mxnet.nd.zeros(one.shape) for one in given])
    mxnet.nd.waitall()

    def once() -> None:
        for at, key in enumerate(keys):
            store.push(key, given[at], priority=-at)
            store.pull(key, out=results[at], priority=-at)
        mxnet.nd.waitall()

    told = task.timed(
        case, rank, once, lambda: task.check([one.asnumpy() for one in results], case)
    )
    store.barrier() if hasattr(store, "barrier") else store._barrier()
    return {"rank": rank, "version": mxnet.__version__, **told}


def drive(case: task.Case) -> list[task.Told]:
    """Run the scheduler, servers and workers."""
    port = str(task.free_port())
    common = {
        "DMLC_PS_ROOT_URI": "127.0.0.1",
        "DMLC_PS_ROOT_PORT": port,
        # It would look for a card that is not loopback.
        "DMLC_NODE_HOST": "127.0.0.1",
        "DMLC_NUM_SERVER": str(case.servers),
        "DMLC_NUM_WORKER": str(case.workers),
        "OMP_NUM_THREADS": "1",
    }
    others = [
        task.started(case, "server", index, role, {**common, "DMLC_ROLE": role})
        for index, role in enumerate(["scheduler", *["server"] * case.servers])
    ]
    told = task.crew(case, port, {**common, "DMLC_ROLE": "worker"})
    for one in others:
        # It may hang at its end; the sums are here.
        one.kill()
        one.wait()
    return sorted(told, key=lambda of: int(of["rank"]))


if __name__ == "__main__":
    task.main(drive, work, serve)
