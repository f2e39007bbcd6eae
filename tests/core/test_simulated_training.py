"""Training in virtual time: a plain loop's bits, and each gradient on the model of its grant."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zkv.compute_times import compute_times
from zkv.optim import clip_factor, init_slots, square_sum, update
from zkv.optimizer_spec import optimizer
from zkv.policy import policy
from zkv.simulated_training import Limits, Trained, Training, summary, train
from zkv.simulator import Simulation
from zkv.staleness import staleness
from zkv.sums import weighted_mean
from zkv.sync import Action, Commit

SEVEN = ["bsp", "asp", "ssp:1", "k-bsp:2", "k-batch-bsp:2", "k-asp:2", "k-batch-asp:2"]


class Noisy:
    """Gradients that depend on the model, the rank and the batch; batches of uneven sizes."""

    samples = 100

    def initial(self) -> dict[str, Any]:
        return {"w": np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4), "b": np.ones(2)}

    def gradients(self, model: Any, rank: int, batch: int) -> tuple[dict[str, Any], float]:
        rng = np.random.default_rng((rank, batch))
        made = {}
        for key, value in model.items():
            noise = rng.standard_normal(value.shape).astype(value.dtype)
            made[key] = value * value.dtype.type(0.5) + noise
        return made, float(1 + (3 * rank + batch) % 5)

    def accuracy(self, model: Any) -> float:
        return 0.0


class Counting:
    """Each update adds exactly 1, so the value is the version that a gradient was computed on."""

    samples = 1000

    def __init__(self) -> None:
        self.bases: list[tuple[int, int]] = []

    def initial(self) -> dict[str, Any]:
        return {"n": np.zeros(1, np.float32)}

    def gradients(self, model: Any, rank: int, batch: int) -> tuple[dict[str, Any], float]:
        self.bases.append((rank, int(model["n"][0])))
        return {"n": np.full(1, -1, np.float32)}, 1.0

    def accuracy(self, model: Any) -> float:
        return float(model["n"][0]) / 100


def plain_loop(learner: Any, text: str, workers: int, rounds: int) -> dict[str, Any]:
    """What BSP means, with no synchroniser: every worker's next batch, the weighted mean, again."""
    spec = optimizer(text)
    model = learner.initial()
    slots = {k: init_slots(spec.for_key(k)[0], v.reshape(-1)) for k, v in model.items()}
    for number in range(rounds):
        pushed = [learner.gradients(model, rank, number) for rank in range(workers)]
        weights = [weight for _, weight in pushed]
        means = {k: weighted_mean([g[k] for g, _ in pushed], weights).reshape(-1) for k in model}
        if spec.clip_global_norm is not None:
            norm = sum(square_sum(mean) for mean in means.values())
            factor = clip_factor(norm, spec.clip_global_norm)
            means = {k: m * m.dtype.type(factor) for k, m in means.items()}
        fresh = {}
        for key, mean in means.items():
            rule, lr_factor = spec.for_key(key)
            value, slots[key] = update(
                rule,
                model[key].reshape(-1),
                slots[key],
                mean,
                lr=spec.lr_at(number) * lr_factor,
                count=number + 1,
            )
            fresh[key] = value.reshape(model[key].shape)
        model = fresh
    return model


@given(
    workers=st.integers(1, 6),
    rounds=st.integers(1, 6),
    text=st.sampled_from(
        [
            "sgd:lr=0.1",
            "momentum:lr=0.1;b:lr=2x",
            "adam:lr=0.01,schedule=warmup:3",
            "sgd:lr=0.1,clip_global_norm=0.5",
        ]
    ),
)
def test_bsp_with_equal_workers_is_a_plain_loop_bit_for_bit(
    workers: int, rounds: int, text: str
) -> None:
    training = Training(Noisy(), optimizer(text), {n + 1: n for n in range(workers)})
    times = compute_times(f"{workers}*1")
    Simulation(policy("bsp"), times, listener=training.hear).run(updates=rounds)
    expected = plain_loop(Noisy(), text, workers, rounds)
    assert training.version == rounds
    for key, value in expected.items():
        assert training.model[key].tobytes() == value.tobytes(), key


@given(
    text=st.sampled_from(SEVEN),
    times=st.lists(st.integers(1, 9), min_size=2, max_size=5),
    updates=st.integers(1, 40),
)
def test_each_gradient_is_computed_on_the_version_of_its_grant(
    text: str, times: list[int], updates: int
) -> None:
    learner = Counting()
    training = Training(learner, optimizer("sgd:lr=1"), {n + 1: n for n in range(len(times))})
    written = compute_times(",".join(map(str, times)))
    simulation = Simulation(policy(text), written, listener=training.hear).run(updates=updates)
    contributions = simulation.report().contributions
    expected = sorted((one.before, one.worker - 1, one.base_version) for one in contributions)
    assert sorted(learner.bases) == sorted((rank, base) for _, rank, base in expected)
    assert (training.version, float(training.model["n"][0])) == (updates, updates)
    # One model for each worker that computes, those of what is pending, and the current one.
    pending = len(simulation.synchronizer.pending)
    assert training.models_kept <= len(times) + pending + 1


@pytest.mark.parametrize("text", SEVEN)
def test_the_time_to_the_target_is_that_of_the_update_that_reaches_it(text: str) -> None:
    times = compute_times("1,1,4")
    spec = optimizer("sgd:lr=1")
    run = train(policy(text), times, Counting(), spec, target=0.2, limits=Limits())
    untrained = Simulation(policy(text), times).run(updates=20).report()
    assert (run.updates, run.accuracy) == (20, 0.2)
    assert run.time == untrained.update_times[-1] == run.report.time
    assert run.report.update_times == untrained.update_times


def test_a_run_ends_at_each_of_its_limits_and_says_not_reached() -> None:
    times, spec = compute_times("2,2"), optimizer("sgd:lr=1")

    def run(limits: Limits) -> Trained:
        return train(policy("bsp"), times, Counting(), spec, target=1.0, limits=limits)

    for limits, updates, time in [
        (Limits(30, until=9), 4, 9),
        (Limits(30, updates=7), 7, 14),
        (Limits(30, until=100, updates=7), 7, 14),
    ]:
        found = run(limits)
        assert (found.time, found.updates) == (None, None)
        assert (len(found.report.update_times), found.report.time) == (updates, time)
    assert run(Limits(1)).updates == 100  # 1,000 samples would be 500 updates of two.


def test_what_is_stale_is_scaled_and_compensated_as_on_a_server() -> None:
    """ASP with 1 and 2: the second worker's first batch is one update old when it is applied."""
    rule = staleness("scale+dc:0.5")
    training = Training(Noisy(), optimizer("sgd:lr=0.25"), {1: 0, 2: 1}, rule)
    models = [training.model]

    def hear(action: Action) -> None:
        training.hear(action)
        if isinstance(action, Commit):
            models.append(training.model)

    report = Simulation(policy("asp"), compute_times("2,3"), listener=hear).run(updates=2).report()
    assert report.staleness == (0, 1)
    gradients, weight = Noisy().gradients(models[0], 1, 0)
    for key, then in models[0].items():
        now, gradient = models[1][key], gradients[key]
        one = gradient.dtype.type
        moved = (now - then) * gradient * gradient * one(0.5) + gradient
        mean = moved * one(weight * 0.5) / one(weight)
        np.testing.assert_allclose(models[2][key], now - one(0.25) * mean, rtol=1e-6)
    with pytest.raises(ValueError, match="drop is not simulated"):
        Training(Noisy(), optimizer("sgd"), {1: 0}, staleness("drop:2"))


def test_seeds_that_did_not_reach_it_count_in_no_mean() -> None:
    report = Simulation(policy("bsp"), compute_times("1")).run(updates=1).report()
    runs = [
        Trained(report, 10, 4, 0.98),
        Trained(report, None, None, 0.9),
        Trained(report, 14, 8, 0.97),
    ]
    plain = summary("bsp", 0.97, runs).to_plain()
    assert plain["std"] == pytest.approx(8**0.5)
    assert {name: plain[name] for name in plain if name != "std"} == {
        "target": 0.97,
        "seeds": 3,
        "reached": 2,
        "mean": 12,
        "min": 10,
        "max": 14,
        "updates_mean": 6,
        "times": [10, None, 14],
        "accuracy": [0.98, 0.9, 0.97],
    }
    nowhere = summary("bsp", 0.97, runs[1:2]).to_plain()
    assert (nowhere["reached"], nowhere["mean"], nowhere["updates_mean"]) == (0, None, None)


@pytest.mark.parametrize("target", [0.0, -0.5, 1.01, float("nan")])
def test_a_target_out_of_range_is_named(target: float) -> None:
    with pytest.raises(ValueError, match="target must be above 0 and at most 1"):
        train(
            *(policy("bsp"), compute_times("1"), Counting(), optimizer("sgd")),
            target=target,
            limits=Limits(),
        )
