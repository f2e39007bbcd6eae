"""What was cancelled leaves no trace in training: k-BSP on the digits, with slow workers.

Two workers of four are slow at first: what they have encoded and sent is cancelled, round after
round. All that while their labels are wrong, as a dye: whatever of it gets into the model later, by
way of what a codec remembers, shows in the loss. Then they are as quick as the others, with the
right labels. The whole model is one key, as sparse codecs are not for buckets of small ones.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import pytest
from simcluster import Options, Program, Pushed, Sim, SimWorker

from zkv.dtypes import Array
from zkv.wire import BlockSpec
from zkv_cli import digits_model
from zkv_workers import signals as s
from zkv_workers.encoding import Encoder
from zkv_workers.model import BatchState, specs_of

HIDDEN, BATCH = 64, 32
SHAPES = {"w1": (64, HIDDEN), "b1": (HIDDEN,), "w2": (HIDDEN, 10), "b2": (10,)}
UPDATES, SLOW_UNTIL = 100, 80
SLOW = (b"w2", b"w3")
SEEDS = range(4)


def parts(flat: Array) -> dict[str, Array]:
    ends = np.cumsum([np.prod(shape) for shape in SHAPES.values()])
    cut = np.split(flat, ends[:-1])
    return {
        key: piece.reshape(shape) for (key, shape), piece in zip(SHAPES.items(), cut, strict=True)
    }


class Training(Sim):
    """A simulated cluster that trains; gradients are noted as they were given and received."""

    def __init__(self, seed: int, options: Options, slow_until: int) -> None:
        self.x, _, self.y, _ = digits_model._split(0)
        self.slow_until, self.version = slow_until, 0
        self.loss = np.nan
        """Over all training images, at version `UPDATES`."""
        self.given: dict[tuple[int, int], Array] = {}
        super().__init__(seed, options)

    @property
    def early(self) -> bool:
        return self.version < self.slow_until

    def params(self) -> dict[str, Array]:
        chance = np.random.default_rng([self.seed, 5])
        first = [
            chance.normal(0, (2 / shape[0]) ** 0.5, shape) if len(shape) == 2 else np.zeros(shape)
            for shape in SHAPES.values()
        ]
        return {"w": np.concatenate([one.reshape(-1) for one in first]).astype(np.float32)}

    def carry(self, channel: Any, action: Any) -> None:
        """Data of slow workers takes much longer than a round."""
        slow = isinstance(channel[0], bytes) and channel[0][:2] in SLOW
        if self.early and slow and channel[1] != "router":
            at = self.fifo[channel] = max(self.now + 0.3, self.fifo.get(channel, 0.0))
            self.later(at - self.now, action)
        else:
            super().carry(channel, action)

    def _initialise(self) -> Program:
        specs, values = specs_of(self.params())
        yield lambda token: s.Initialise(token, tuple(specs), values, False)

    def _check_grant(self, grant: s.Grant, state: BatchState, worker: Any) -> None:
        self.version = max(self.version, grant.version)
        if grant.version == UPDATES:
            _, logits = digits_model.forward(parts(state.params()["w"]), self.x)
            logits = logits - logits.max(axis=1, keepdims=True)
            log_q = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
            self.loss = float(-log_q[np.arange(len(self.y)), self.y].mean())

    def _push(self, route: bytes, worker: SimWorker, rank: int, state: BatchState) -> Program:
        state.check()
        chance = np.random.default_rng([self.seed, rank, state.number])
        some = chance.integers(0, len(self.y), BATCH)
        labels = (self.y + 1) % 10 if self.early and route[:2] in SLOW else self.y
        found = digits_model.backward(parts(state.params()["w"]), self.x[some], labels[some])
        gradient = np.concatenate([found[key].reshape(-1) for key in SHAPES])
        assert worker.session.member is not None
        name = worker.session.member.incarnation, state.number
        sent = {"w": np.zeros_like(gradient)}
        pushed = self.contributions[name] = Pushed(rank, 0, state.weight, sent)
        self.given[name] = gradient
        blocks = [*state.packer.add("w", gradient), *state.packer.rest()]
        self._send_all(route, worker, state, blocks, sent, None)
        self.feed(route, worker, self._finish(worker, state, pushed))
        yield from ()

    def owed(self, worker: SimWorker, block: BlockSpec) -> Array:
        """Return what a worker's codec still keeps back: a codec that cuts nothing sends it."""
        worker.encoder.use("none")
        nothing = np.zeros(block.size, np.float32)
        sealed = worker.encoder.encode(worker.session.layout, block, nothing, 1 << 40)
        return sealed.payload.view(np.float32)

    def missing(self) -> float:
        """Return max |given − received − owed| over all elements: of what counted, by worker."""
        counted = {
            (one.contribution.incarnation, one.contribution.batch)
            for commit in self.commits()
            for one in commit.counted
        }
        worst = 0.0
        for worker in self.workers.values():
            assert worker.session.member is not None
            mine = [name for name in self.given if name[0] == worker.session.member.incarnation]
            for name in mine:
                if self.contributions[name].fate is None:
                    worker.encoder.settled(name[1], counted=name in counted)
            left = sum(
                self.given[name].astype(np.float64) - self.contributions[name].gradients["w"]
                for name in mine
                if name in counted
            )
            (block,) = worker.session.layout.blocks.values()
            worst = max(worst, float(np.abs(left - self.owed(worker, block)).max()))
        return worst


def trained(seed: int, policy: str, workers: int, slow_until: int) -> Training:
    options = Options(
        policy=policy,
        workers=workers,
        servers=1,
        batches=UPDATES + 2,
        codec="topk:0.01+ef;small=0",
        optimizer="sgd:lr=0.5",
        compute_s=(0.001,),
        delay_s=0.005,
    )
    run = Training(seed, options, slow_until)
    run.run()
    return run


@lru_cache
def without_cancellation() -> Array:
    """Return the final losses of two workers under BSP: as many contributions to an update."""
    return np.array([trained(seed, "bsp", 2, 0).loss for seed in SEEDS])


def with_slow_workers() -> tuple[Array, list[float]]:
    """Return the final losses under k-BSP, and what is missing from each run's sums."""
    runs = [trained(seed, "k-bsp:2", 4, SLOW_UNTIL) for seed in SEEDS]
    for run in runs:
        for rank in (2, 3):
            fates = [p.fate for p in run.contributions.values() if p.worker == rank]
            outcomes = [fate.outcome for fate in fates if fate is not None]
            assert outcomes.count("cancelled") > SLOW_UNTIL * 3 / 4
            assert outcomes.count("committed") > 2
    return np.array([run.loss for run in runs]), [run.missing() for run in runs]


def tolerance(one: Array, other: Array) -> float:
    """Three standard errors of the difference of two means."""
    variance = one.var(ddof=1) / one.size + other.var(ddof=1) / other.size
    return 3.0 * float(np.sqrt(variance))


def test_what_was_cancelled_leaves_no_trace_in_the_loss_nor_in_the_sums() -> None:
    pytest.importorskip("sklearn")
    reference = without_cancellation()
    losses, missing = with_slow_workers()
    assert abs(losses.mean() - reference.mean()) <= tolerance(losses, reference)
    assert max(missing) < 1e-4


def test_a_residual_that_is_not_rolled_back_shows_in_both(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("sklearn")
    settled = Encoder.settled
    monkeypatch.setattr(
        Encoder, "settled", lambda self, batch, *, counted: settled(self, batch, counted=True)
    )
    reference = without_cancellation()
    losses, missing = with_slow_workers()
    assert losses.mean() > reference.mean() + tolerance(losses, reference)
    assert min(missing) > 1e-2
