"""A byte-level language model on slow links: DistributedDataParallel over gloo, or zkv with codecs.

The peer's name is a way of `WAYS`. A worker tells the losses of unseen data over time; they are
computed when the training is over.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from typing import Any

import task
import torch
import torch.distributed as dist
import with_zkv

# The model and the text are those of scripts/bench_quality.
sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import zkv
from training_tasks import CONTEXT, Text
from zkv.schedule import factor, schedule
from zkv.torch import attach

STEPS = "ZKV_BENCH_STEPS"
"""Names how many updates there are; they are those of the schedule."""
LOOKS = 30
"""At the loss in one run."""
ALONE = 8
"""Steps that time computing, and all-reduces that time the link."""
LR, WARMUP = 0.25, 20
WAYS = {
    "ddp": ("", ""),
    "dense": ("none", "none"),
    "int8": ("int8", "int8"),
    "topk": ("topk:0.01+ef;small=1024", "topk:0.02;small=1024"),
}
"""Codecs up and down. Two workers' hundredths are up to two hundredths of the sum."""


class Language(torch.nn.Module):
    """The model of `Text` whose forward pass is its loss."""

    def __init__(self, text: Text) -> None:
        super().__init__()
        self.parts = text._model
        self.mask = text._mask

    def forward(self, windows: torch.Tensor) -> torch.Tensor:
        """Return the mean loss in nats; `windows`: (samples, CONTEXT + 1), bytes."""
        x, y = windows[:, :-1], windows[:, 1:]
        hidden = self.parts["byte"](x) + self.parts["place"](torch.arange(CONTEXT))
        logits = self.parts["head"](self.parts["body"](hidden, mask=self.mask, is_causal=True))
        return torch.nn.functional.cross_entropy(logits.reshape(-1, 256), y.reshape(-1))


class Lesson:
    """One worker's samples, and what is written down while it learns."""

    def __init__(self, rank: int, steps: int) -> None:
        self.text = Text(0)
        self.model = Language(self.text)
        self.rank, self.steps = rank, steps
        self.every = max(1, steps // LOOKS)
        self.seen: list[tuple[int, float, dict[str, Any]]] = []
        self.began = 0.0

    def windows(self, step: int) -> torch.Tensor:
        """Return a step's samples, which differ from worker to worker."""
        return self.text.windows(self.rank, step)

    def begin(self) -> None:
        """Let time run."""
        self.began = time.perf_counter()

    def look(self, step: int, *, last: bool = False) -> None:
        """Write down the values after so many updates, now and then."""
        if self.rank == 0 and (last or step % self.every == 0):
            now = time.perf_counter() - self.began
            values = {k: v.detach().numpy().copy() for k, v in self.text._model.named_parameters()}
            self.seen.append((step, now, values))

    def told(self) -> dict[str, Any]:
        """Return the losses over time."""
        curve = [(step, seconds, self.text.loss(values)) for step, seconds, values in self.seen]
        return {"curve": curve}

    def compute_ms(self) -> float:
        """Return the milliseconds of a forward and a backward pass, both workers at it at once."""
        took = []
        for step in range(ALONE):
            began = time.perf_counter()
            self.model(self.windows(step)).backward()
            took.append(1e3 * (time.perf_counter() - began))
        self.model.zero_grad()
        return statistics.median(took)


def ddp(case: task.Case, rank: int, at: str) -> task.Told:
    """Train with DistributedDataParallel."""
    lesson = Lesson(rank, int(os.environ[STEPS]))
    dist.init_process_group("gloo", init_method=at, rank=rank, world_size=case.workers)
    whole = torch.zeros(sum(one.numel() for one in lesson.model.parameters()))
    took = []
    for _ in range(ALONE):
        dist.barrier()
        began = time.perf_counter()
        dist.all_reduce(whole)
        took.append(1e3 * (time.perf_counter() - began))
    compute_ms = lesson.compute_ms()
    model = torch.nn.parallel.DistributedDataParallel(lesson.model)
    rule = torch.optim.SGD(model.parameters(), lr=LR)
    given = schedule(f"warmup:{WARMUP}+cosine:{lesson.steps}")
    pace = torch.optim.lr_scheduler.LambdaLR(rule, lambda step: factor(given, step))
    dist.barrier()
    lesson.begin()
    for step in range(lesson.steps):
        lesson.look(step)
        rule.zero_grad()
        model(lesson.windows(step)).backward()
        rule.step()
        pace.step()
    lesson.look(lesson.steps, last=True)
    dist.barrier()
    dist.destroy_process_group()
    return {"compute_ms": compute_ms, "comm_ms": statistics.median(took), **lesson.told()}


def servers(case: task.Case, rank: int, at: str) -> task.Told:
    """Train with zkv's servers, which hold the rule."""
    lesson = Lesson(rank, int(os.environ[STEPS]))
    with zkv.connect(at, rank=rank, world=case.workers, insecure=True) as worker:
        optimizer = attach(lesson.model, worker)
        worker.barrier()
        lesson.begin()
        for step in range(lesson.steps):
            optimizer.zero_grad()
            # The forward pass waits for the values after so many updates.
            lesson.model(lesson.windows(step)).backward()
            lesson.look(step)
            optimizer.step()
        optimizer.last.wait()
        optimizer.pull()
        lesson.look(lesson.steps, last=True)
        worker.barrier()
        stats = worker.stats()
    counted = stats["outcomes"].get("committed", 0)
    if counted != lesson.steps:
        raise SystemExit(f"worker {rank}: {counted} of {lesson.steps} batches count")
    return lesson.told()


def work(case: task.Case, rank: int, at: str) -> task.Told:
    """Be one worker."""
    torch.set_num_threads(1)
    told = ddp(case, rank, at) if case.peer == "ddp" else servers(case, rank, at)
    return {"ms": [], "cpu_s": 0.0, **told}


def drive(case: task.Case) -> list[task.Told]:
    """Run the workers, and servers beside them."""
    if case.peer == "ddp":
        os.environ["GLOO_SOCKET_IFNAME"] = "card" if case.worker_hosts else "lo"
        host, _ = case.host("worker", 0)
        return task.crew(case, f"tcp://{host}:{29_500 if case.worker_hosts else task.free_port()}")
    up, down = WAYS[case.peer]
    steps = os.environ[STEPS]
    rule = f"sgd:lr={LR},schedule=warmup:{WARMUP}+cosine:{steps}"
    with with_zkv.spread(case, "--optimizer", rule, "--codec", up, "--codec-down", down) as broker:
        return task.crew(case, broker)


if __name__ == "__main__":
    task.main(drive, work)
