"""Schedules: bounds and text for any schedule, worked numbers, and agreement with PyTorch."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zkv.schedule import Constant, Cosine, Schedule, Steps, factor, schedule

counts = st.integers(1, 10**6)
bodies = st.one_of(
    st.builds(Constant),
    st.builds(Cosine, counts, st.floats(0, 1)),
    st.builds(
        Steps,
        st.sets(counts, min_size=1, max_size=5).map(lambda at: tuple(sorted(at))),
        st.floats(0, 1, exclude_min=True),
    ),
)
schedules = st.builds(Schedule, bodies, st.one_of(st.just(0), counts))


@given(schedules, st.integers(0, 3 * 10**6))
def test_factor_stays_within_its_bounds(shape: Schedule, version: int) -> None:
    number = factor(shape, version)
    assert 0.0 <= number <= 1.0
    if version < shape.warmup:
        assert number > 0.0
    elif isinstance(shape.body, Cosine):
        assert number >= shape.body.floor


@given(schedules, st.integers(0, 2 * 10**6))
def test_rises_in_the_warm_up_and_never_after(shape: Schedule, version: int) -> None:
    before, after = factor(shape, version), factor(shape, version + 1)
    assert before <= after if version + 1 < shape.warmup else before >= after


@given(schedules)
def test_full_rate_where_the_warm_up_ends(shape: Schedule) -> None:
    assert factor(shape, shape.warmup) == 1.0
    if shape.warmup:
        assert factor(shape, shape.warmup - 1) == 1.0


@given(bodies, counts, st.integers(0, 10**6))
def test_a_warm_up_puts_the_body_later(body: Any, warmup: int, version: int) -> None:
    assert factor(Schedule(body, warmup), warmup + version) == factor(Schedule(body), version)


@given(schedules)
def test_text_round_trips(shape: Schedule) -> None:
    assert schedule(str(shape)) == shape


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("constant", {0: 1.0, 10**9: 1.0}),
        ("warmup:4", {0: 0.25, 1: 0.5, 2: 0.75, 3: 1.0, 4: 1.0}),
        ("cosine:1000", {0: 1.0, 250: 0.5 + math.sqrt(0.125), 500: 0.5, 1000: 0.0, 1500: 0.0}),
        ("cosine:1000:0.1", {0: 1.0, 500: 0.55, 1000: 0.1, 10**6: 0.1}),
        ("steps:30,60:0.1", {0: 1.0, 29: 1.0, 30: 0.1, 59: 0.1, 60: 0.01, 10**6: 0.01}),
        ("steps:3", {2: 1.0, 3: 0.1}),
        ("warmup:5+cosine:1000", {0: 0.2, 4: 1.0, 5: 1.0, 505: 0.5, 1005: 0.0}),
        ("warmup:5+steps:30:0.5", {0: 0.2, 34: 1.0, 35: 0.5}),
    ],
)
def test_worked_examples(text: str, expected: dict[int, float]) -> None:
    shape = schedule(text)
    for version, number in expected.items():
        assert factor(shape, version) == pytest.approx(number, abs=1e-15)


def test_text_and_constructors_give_equal_values() -> None:
    assert schedule(" warmup:5 + steps:30,60:0.1 ") == Schedule(Steps((30, 60)), 5)
    assert schedule("cosine:10:0") == schedule("cosine:10") == Schedule(Cosine(10))
    assert schedule("warmup:5+constant") == schedule("warmup:5")
    assert len({schedule("constant"), Schedule()}) == 1


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "'' is not a schedule; valid: constant, cosine:1000"),
        ("cosin:10", "'cosin:10' is not a schedule"),
        ("constant:1", "is not a schedule"),
        ("cosine", "is not a schedule"),
        ("cosine:10:0.1:2", "is not a schedule"),
        ("cosine:0", "needed: a whole number >= 1"),
        ("cosine:1.5", "'1.5' is not a whole number"),
        ("cosine:10:2", "0 <= floor <= 1"),
        ("cosine:10:nan", "0 <= floor <= 1"),
        ("cosine:10:low", "'low' is not a number"),
        ("steps:", "is not a whole number"),
        ("steps:60,30", "must rise"),
        ("steps:30,30", "must rise"),
        ("steps:0", "needed: a whole number >= 1"),
        ("steps:3:0", "0 < gamma <= 1"),
        ("steps:3:1.5", "0 < gamma <= 1"),
        ("warmup:0", "needed: a whole number >= 1"),
        ("warmup:-3+constant", "needed: a whole number >= 1"),
        ("warmup", "is not a whole number"),
        ("warmup:5+", "'' is not a schedule"),
        ("warmup:5+warmup:5", "is not a schedule"),
        ("cosine:10+warmup:5", "one warm-up may stand before"),
        ("warmup:5+cosine:10+constant", "one warm-up may stand before"),
    ],
)
def test_bad_text_names_the_part(text: str, words: str) -> None:
    with pytest.raises(ValueError) as caught:
        schedule(text)
    assert words in str(caught.value)


def test_values_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="no version is given"):
        Steps(())
    with pytest.raises(ValueError, match="whole number"):
        Schedule(Constant(), -1)
    with pytest.raises(ValueError, match="version -1 is negative"):
        factor(Schedule(), -1)


def _torch_rates(make: Callable[[Any, Any], Any], versions: int) -> list[float]:
    """The rates of the first updates under the scheduler of `make`, for a base rate of 1."""
    torch = pytest.importorskip("torch")
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = make(torch.optim.lr_scheduler, optimizer)
    rates = []
    for _ in range(versions):
        rates.append(float(optimizer.param_groups[0]["lr"]))
        optimizer.step()
        scheduler.step()
    return rates


@pytest.mark.parametrize(
    ("text", "versions", "make"),
    [
        ("constant", 20, lambda s, o: s.LambdaLR(o, lambda version: 1.0)),
        # Theirs rises again after the end of the half cosine; ours stays at the floor.
        ("cosine:50", 51, lambda s, o: s.CosineAnnealingLR(o, T_max=50)),
        ("cosine:50:0.1", 51, lambda s, o: s.CosineAnnealingLR(o, T_max=50, eta_min=0.1)),
        ("steps:30,60:0.2", 100, lambda s, o: s.MultiStepLR(o, [30, 60], gamma=0.2)),
        ("warmup:5", 20, lambda s, o: s.LinearLR(o, start_factor=0.2, total_iters=4)),
        ("warmup:8", 20, lambda s, o: s.LambdaLR(o, lambda version: min(1.0, (version + 1) / 8))),
        (
            "warmup:5+cosine:50:0.1",
            56,
            lambda s, o: s.SequentialLR(
                o,
                [
                    s.LinearLR(o, start_factor=0.2, total_iters=4),
                    s.CosineAnnealingLR(o, T_max=50, eta_min=0.1),
                ],
                milestones=[5],
            ),
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:The epoch parameter:UserWarning")
def test_equal_to_torch(text: str, versions: int, make: Callable[[Any, Any], Any]) -> None:
    shape = schedule(text)
    ours = [factor(shape, version) for version in range(versions)]
    assert ours == pytest.approx(_torch_rates(make, versions), abs=1e-9)
