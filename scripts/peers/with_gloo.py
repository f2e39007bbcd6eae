"""torch.distributed's all_reduce over gloo, without servers: `gloo` of one flat tensor, in place;
`gloo-buckets` as DistributedDataParallel does it, by buckets that gradients are copied to and from.
"""

from __future__ import annotations

import os

import task
import torch
import torch.distributed as dist


def work(case: task.Case, rank: int, at: str) -> task.Told:
    """Reduce gradients that are there already."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=at, rank=rank, world_size=case.workers)
    given = [torch.from_numpy(one) for one in task.gradients(task.sizes(case.tensors), rank)]
    told = flat(case, rank, given) if case.peer == "gloo" else bucketed(case, rank, given)
    dist.barrier()
    dist.destroy_process_group()
    return {"version": torch.__version__, **told}


def flat(case: task.Case, rank: int, given: list[torch.Tensor]) -> task.Told:
    """Reduce one tensor that all gradients lie in."""
    whole = torch.cat(given)
    parts = whole.split([len(one) for one in given])

    def once() -> None:
        dist.all_reduce(whole)

    def checked() -> None:
        task.check([one.numpy() for one in parts], case)
        # Zeros stay zeros: sums of sums would soon be infinite.
        whole.zero_()

    return task.timed(case, rank, once, checked)


def bucketed(case: task.Case, rank: int, given: list[torch.Tensor]) -> task.Told:
    """Reduce bucket by bucket, with copies in and out."""
    results = [torch.empty_like(one) for one in given]
    groups = task.buckets([len(one) for one in given])
    wholes = [torch.empty(sum(len(given[number]) for number in group)) for group in groups]
    parts = [
        whole.split([len(given[number]) for number in group])
        for whole, group in zip(wholes, groups, strict=True)
    ]

    def once() -> None:
        pending = []
        for whole, group, views in zip(wholes, groups, parts, strict=True):
            for number, view in zip(group, views, strict=True):
                view.copy_(given[number])
            pending.append(dist.all_reduce(whole, async_op=True))
        for one, group, views in zip(pending, groups, parts, strict=True):
            one.wait()
            for number, view in zip(group, views, strict=True):
                results[number].copy_(view)

    return task.timed(case, rank, once, lambda: task.check([r.numpy() for r in results], case))


def drive(case: task.Case) -> list[task.Told]:
    """Run the workers, which meet at rank 0's machine."""
    host, _ = case.host("worker", 0)
    # Outside, another namespace's ports cannot be looked at; they are all free there.
    port = 29_500 if case.worker_hosts else task.free_port()
    card = "card" if case.worker_hosts else "lo"
    os.environ["GLOO_SOCKET_IFNAME"] = card
    return task.crew(case, f"tcp://{host}:{port}")


if __name__ == "__main__":
    task.main(drive, work)
