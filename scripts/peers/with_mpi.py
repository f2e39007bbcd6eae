"""Open MPI's Allreduce by mpi4py: `mpi` of each tensor by itself into a result of its own,
`mpi-flat` of one tensor that all lie in."""

from __future__ import annotations

import os
import sys

import numpy as np
import task


def work(case: task.Case, rank: int, at: str) -> task.Told:
    """Reduce gradients that are there already."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    assert (world.Get_rank(), world.Get_size()) == (rank, case.workers), at
    given = task.gradients(task.sizes(case.tensors), rank)
    if case.peer == "mpi-flat":
        whole = np.concatenate(given)
        cuts = np.cumsum([len(one) for one in given])[:-1]
        result = np.empty_like(whole)
        pairs, results = [(whole, result)], np.split(result, cuts)
    else:
        results = [np.empty_like(one) for one in given]
        pairs = list(zip(given, results, strict=True))

    def once() -> None:
        for mine, summed in pairs:
            world.Allreduce(mine, summed, op=MPI.SUM)

    told = task.timed(case, rank, once, lambda: task.check(results, case))
    return {"version": MPI.Get_library_version().split(",")[0], **told}


def drive(case: task.Case) -> list[task.Told]:
    """Run all ranks by one mpirun."""
    mpirun = ["mpirun", "--oversubscribe", "--bind-to", "none", "--quiet", "-np", str(case.workers)]
    if os.geteuid() == 0:
        mpirun.append("--allow-run-as-root")
    # The ranks' own output would come mixed: each writes a line, told apart by its rank.
    one = task.started(case, "ranks", 0, "mpirun", before=mpirun)
    said = one.communicate(timeout=task.PATIENCE_S)[0]
    if one.returncode:
        raise SystemExit(f"{case.peer}: mpirun ended with exit code {one.returncode}")
    told = [task.json.loads(line) for line in said.splitlines() if line.startswith("{")]
    return sorted(told, key=lambda of: int(of["rank"]))


if __name__ == "__main__":
    if sys.argv[1] == "--ranks":
        asked = task.Case(**task.json.loads(sys.argv[2]))
        number = int(os.environ["OMPI_COMM_WORLD_RANK"])
        print(task.json.dumps({"rank": number, **work(asked, number, "mpirun")}), flush=True)
    else:
        task.main(drive)
