"""`auto`: its laws, and how near its choices come to the best fixed codec of each link."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from typing import Any

import adaptive_problem as problem
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zkv_codecs.auto import (
    CANDIDATES,
    DENSE,
    Auto,
    Choice,
    Conditions,
    Key,
    Measured,
    auto,
    feeds_back,
    is_auto,
)
from zkv_codecs.late import steps_for_one

NS = 1e-9 / 25
"""Milliseconds for 25 million elements, as seconds for one: 1e-3 / 25e6."""
KERNELS = {
    "none": Measured(0.0, 4.8 * NS, 4.0, 0.0),
    "fp16": Measured(3.62 * NS, 3.78 * NS, 2.0),
    "int8+ef": Measured(6.23 * NS, 3.33 * NS, 8.125 / 8),
    "onebit+ef": Measured(7.23 * NS, 3.12 * NS, 1.125 / 8),
    "topk:0.01+fp16+ef": Measured(11.5 * NS, 1.26 * NS, 0.01 * 32.05 / 8),
}
"""The codec reference, section 2.1, Numba; a dense sum costs about a copy."""
GBIT = 1e9 / 8

seconds = st.floats(0, 1e-3)
errors = st.one_of(st.none(), st.floats(0, 30))
measures = st.builds(Measured, seconds, seconds, st.floats(0, 8), errors, errors)
known = st.sampled_from(["none", "int8", "int8+ef", "int8+zstd+ef", "powersgd:2+ef", "zstd"])
autos = st.builds(
    Auto,
    st.lists(known, min_size=1, max_size=4, unique=True).map(tuple),
    st.floats(0, 100),
    st.floats(0, 1),
    st.floats(0, 1),
    st.booleans(),
    st.sampled_from([None, 0.25, 0.5]),
)
keys = st.builds(
    Key,
    st.integers(1, 10**8),
    st.dictionaries(st.sampled_from(CANDIDATES), measures),
    st.sampled_from(CANDIDATES),
)
conditions = st.builds(Conditions, st.floats(1e3, 1e11), st.floats(0, 10))


def one_choice(rule: Auto, key: Key, given: Conditions) -> Choice:
    return rule.choose({"w": key}, given)["w"]


@given(autos)
def test_auto_reads_back_as_an_equal_value(rule: Auto) -> None:
    assert auto(rule.text) == rule
    assert is_auto(rule.text)


def test_texts_of_auto() -> None:
    assert auto("auto") == Auto()
    assert auto("auto:margin=0.1,pipelined") == Auto(margin=0.1, pipelined=True)
    text = "auto:owed=4.0,candidates=none|powersgd:2+ef|int8+ef"
    assert auto(text) == Auto(("none", "powersgd:2+ef", "int8+ef"), owed=4.0)
    assert auto(text).text == text
    assert not is_auto("int8")


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("int8", "auto, or auto:"),
        ("auto:", "auto: and options"),
        ("auto:fast", "'fast'"),
        ("auto:owed", "'owed'"),
        ("auto:owed=1,owed=2", "each once"),
        ("auto:owed=much", "give a number"),
        ("auto:margin=-1", "margin=-1"),
        ("auto:candidates=", "no codec is called ''"),
        ("auto:candidates=int8|int7", "no codec is called 'int7'"),
        ("auto:candidates=int8|int8", "each once"),
    ],
)
def test_a_wrong_text_names_the_mistake_and_lists_the_forms(text: str, named: str) -> None:
    with pytest.raises(ValueError, match="candidates=none") as caught:
        auto(text)
    assert named in str(caught.value)


def test_measurements_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match="encode_s"):
        Measured(-1.0, 0.0, 4.0)
    with pytest.raises(ValueError, match="error=nan"):
        Measured(0.0, 0.0, 4.0, math.nan)
    with pytest.raises(ValueError, match="most=-1"):
        Measured(0.0, 0.0, 4.0, 1.0, -1.0)
    with pytest.raises(ValueError, match="bytes_per_s"):
        Conditions(0.0)
    with pytest.raises(ValueError, match="compute_s"):
        Conditions(1.0, -1.0)


@given(st.booleans(), st.sampled_from([None, 0.5]), keys, conditions)
def test_a_choice_is_a_measured_candidate_that_pays_and_is_within_the_budget(
    pipelined: bool, late: float | None, key: Key, given_: Conditions
) -> None:
    rule = Auto(pipelined=pipelined, late=late)
    choice = one_choice(rule, key, given_)
    assert choice == one_choice(rule, key, given_)
    assert "\n" not in choice.why
    assert choice.codec in choice.why
    assert choice.codec in {"none", *key.measured}

    def took(codec: str) -> float:
        one = key.measured.get(codec, DENSE if codec == "none" else None)
        assert one is not None
        return rule.seconds(key.elements, one, given_.bytes_per_s, given_.compute_s)

    assert choice.seconds == took(choice.codec)
    assert choice.seconds <= (1 + 2 * rule.margin) * took("none")
    if choice.codec != "none":
        error = key.measured[choice.codec].error
        budget = rule.owed if feeds_back(choice.codec) else rule.lost
        assert error is None or error <= 1.25 * budget
        assert choice.seconds < took("none")


@given(st.booleans(), st.sampled_from([None, 0.5]), keys, conditions)
def test_what_was_chosen_is_chosen_again(
    pipelined: bool, late: float | None, key: Key, given_: Conditions
) -> None:
    rule = Auto(pipelined=pipelined, late=late)
    first = one_choice(rule, key, given_)
    again = one_choice(rule, replace(key, current=first.codec), given_)
    assert again.codec == first.codec


@given(st.lists(st.floats(0.99, 1.01), min_size=2, max_size=30))
def test_noise_of_one_percent_changes_a_choice_once_at_most(noise: list[float]) -> None:
    """The link is where int8 and fp16 are just `margin` apart."""
    rule, key = Auto(("none", "fp16", "int8+ef")), Key(10**6, KERNELS)
    fp16, int8 = KERNELS["fp16"], KERNELS["int8+ef"]
    # compute + fp16 = (1 + margin)(compute + int8), at 1 Gbit/s.
    slower, faster = (rule.seconds(10**6, one, GBIT, 0.0) for one in (fp16, int8))
    compute = (slower - (1 + rule.margin) * faster) / rule.margin
    codecs = []
    for factor in noise:
        choice = one_choice(rule, key, Conditions(GBIT * factor, compute))
        key = replace(key, current=choice.codec)
        codecs.append(choice.codec)
    changes = sum(one != other for one, other in pairwise(codecs))
    assert changes <= 1


def test_the_stages_of_a_step_add_up_or_overlap() -> None:
    one = Measured(1e-9, 2e-9, 1.0)
    assert Auto().seconds(10**6, one, 1e8, 0.005) == pytest.approx(0.018)
    assert Auto(pipelined=True).seconds(10**6, one, 1e8, 0.005) == pytest.approx(0.01)


def test_a_codec_beyond_the_budget_is_left_and_the_line_says_so() -> None:
    measured = KERNELS | {"topk:0.01+fp16+ef": replace(KERNELS["topk:0.01+fp16+ef"], error=13.0)}
    key = Key(10**6, measured, current="topk:0.01+fp16+ef")
    choice = one_choice(Auto(), key, Conditions(GBIT / 100))
    assert choice.codec == "onebit+ef"
    assert choice.why == (
        "'w' (1000000 elements): onebit+ef, 0.113 s a step, against 3.2 s with none; "
        "topk:0.01+fp16+ef owes 13 gradients, 10 at most"
    )


def test_what_is_only_late_and_what_is_lost_have_budgets_of_their_own() -> None:
    both = replace(KERNELS["int8+ef"], error=0.5)
    key = Key(10**6, {"int8": both, "int8+ef": both})
    rule = Auto(("none", "int8", "int8+ef"))
    choice = one_choice(rule, key, Conditions(GBIT))
    assert choice.codec == "int8+ef"
    assert "int8 loses 0.5 of a gradient, 0.01 at most" in choice.why


def test_what_comes_late_costs_steps_where_updates_are_divided_by_a_root_mean_square() -> None:
    """(1 + 4²)^¼ is 2.03, and topk takes 0.72 of the time of onebit."""
    measured = KERNELS | {"topk:0.01+fp16+ef": replace(KERNELS["topk:0.01+fp16+ef"], error=4.0)}
    key = Key(10**6, measured)
    at = Conditions(GBIT / 10, compute_s=0.02)
    choices = {rule: one_choice(Auto().under(rule), key, at) for rule in ("sgd", "adam")}
    assert choices["sgd"].codec == "topk:0.01+fp16+ef"
    assert choices["adam"].codec == "onebit+ef"
    assert Auto().under("momentum") == Auto() != Auto().under("adamw")
    assert Auto(late=0.0).under("adam") == Auto(late=0.0)
    only = one_choice(Auto(("none", "topk:0.01+fp16+ef"), late=0.5), key, at)
    assert "a step (of which it takes 2.03 times as many)" in only.why


@given(st.floats(0, 1e6), st.floats(0, 1e6), st.floats(0, 1))
def test_the_more_is_kept_back_the_more_steps_it_takes(
    one: float, more: float, late: float
) -> None:
    fewer, most = (steps_for_one(error, late) for error in (one, one + more))
    assert 1.0 <= fewer <= most <= 1.0 + one + more
    assert steps_for_one(one, 0.0) == 1.0


@given(st.floats(0, 1e3), st.floats(0, 1e3), st.floats(0, 1))
def test_a_codec_that_was_never_in_use_costs_at_least_what_it_does_in_use(
    error: float, more: float, late: float
) -> None:
    rule = Auto(late=late)
    guessed = rule.steps("int4+ef", Measured(0.0, 0.0, 0.5, error, error + more))
    seen = rule.steps("int4+ef", Measured(0.0, 0.0, 0.5, error))
    assert 1.0 <= seen <= guessed
    assert rule.steps("int4", Measured(0.0, 0.0, 0.5, error, error + more)) == 1.0


def test_what_was_never_in_use_has_to_pay_at_the_highest_price() -> None:
    """Onebit of noise: 0.756 gradients, so (1 + 0.756²)^½ = 1.25 before and 1.12 when it was seen;
    its step takes 0.86 of the time of int8's."""
    seen = KERNELS | {"onebit+ef": replace(KERNELS["onebit+ef"], error=0.756)}
    never = KERNELS | {"onebit+ef": replace(KERNELS["onebit+ef"], error=0.756, most=0.756)}
    rule, at = Auto(("none", "int8+ef", "onebit+ef"), late=0.5), Conditions(GBIT / 100, 4.26)
    times = [rule.seconds(10**6, seen[codec], at.bytes_per_s, 4.26) for codec in rule.candidates]
    assert times[2] / times[1] == pytest.approx(0.86, abs=0.01)
    assert [rule.steps("onebit+ef", one["onebit+ef"]) for one in (seen, never)] == pytest.approx(
        [1.12, 1.25], abs=0.005
    )
    assert one_choice(rule, Key(10**6, never), at).codec == "int8+ef"
    # At a tenth of the speed it pays whatever it costs.
    slow = Conditions(GBIT / 1000, 4.26)
    assert one_choice(rule, Key(10**6, never), slow).codec == "onebit+ef"
    # Where nothing that comes late costs steps it is the shortest that is taken.
    assert one_choice(replace(rule, late=0.0), Key(10**6, never), at).codec == "onebit+ef"


def test_computing_is_shared_out_by_elements() -> None:
    """Where computing takes most of a step, a harsher codec is not worth it."""
    two: dict[str | int, Key] = {"w": Key(10**6, KERNELS), 7: Key(10**6, KERNELS)}
    alone = Auto().choose(two, Conditions(GBIT))
    assert {choice.codec for choice in alone.values()} == {"topk:0.01+fp16+ef"}
    beside = Auto().choose(two, Conditions(GBIT, compute_s=0.4))
    assert {choice.codec for choice in beside.values()} == {"int8+ef"}
    assert sum(choice.seconds for choice in beside.values()) > 0.4
    most = Auto().choose(two, Conditions(GBIT, compute_s=2.0))
    assert {choice.codec for choice in most.values()} == {"none"}


# --- a real small problem -----------------------------------------------------------------------

STEPS = 300
SMALL = 1024


def for_keys(codec: str, sizes: dict[str, int]) -> dict[str, str]:
    return {key: codec if size >= SMALL else "none" for key, size in sizes.items()}


def clock(problem: Any, link: float) -> Any:
    return problem.Clock(
        link, kernel_s={codec: one.encode_s + one.decode_s for codec, one in KERNELS.items()}
    )


@lru_cache(maxsize=1)
def steps_of_fixed() -> dict[str, float]:
    """Steps that each candidate takes to the loss of dense training after STEPS steps, and 2 %."""
    pytest.importorskip("sklearn")
    goal, found = math.inf, {}
    for codec in CANDIDATES:
        training = problem.Training()
        while training.steps < 2 * STEPS:
            training.step(for_keys(codec, training.sizes))
            if codec == "none" and training.steps == STEPS:
                goal = training.loss() * 1.02
            if training.steps % problem.EVERY == 0 and training.loss() <= goal < math.inf:
                break
        found[codec] = float(training.steps)
    return found | {"goal": goal}


def seconds_of_auto(link: float) -> tuple[float, set[str]]:
    """Return virtual seconds to the goal, and the codecs that the large keys end with."""
    training, time = problem.Training(), clock(problem, link)
    large = {key: n for key, n in training.sizes.items() if n >= SMALL}
    state: dict[str | int, Key] = {key: Key(n, KERNELS) for key, n in large.items()}
    conditions = Conditions(link, time.compute_s)
    while training.steps < 2 * STEPS:
        for name, choice in Auto().choose(state, conditions).items():
            state[name] = replace(state[name], current=choice.codec)
        use = {key: state[key].current if key in large else "none" for key in training.sizes}
        squares = dict.fromkeys(large, 0.0)
        for _ in range(problem.EVERY):
            training.step(use)
            time.step(training.sizes, use)
            squares = {key: square + training.owed[key] ** 2 for key, square in squares.items()}
        for key, square in squares.items():
            old, codec = state[key], state[key].current
            error = math.sqrt(square / problem.EVERY)
            seen = replace(old.measured[codec], error=error)
            state[key] = replace(old, measured={**old.measured, codec: seen})
        if training.loss() <= steps_of_fixed()["goal"]:
            break
    return time.now, {key.current for key in state.values()}


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("link", "last"),
    [(GBIT / 100, None), (GBIT / 10, None), (GBIT, None), (20e9, {"none"})],
    ids=["10 Mbit/s", "100 Mbit/s", "1 Gbit/s", "20 GB/s"],
)
def test_auto_takes_little_longer_than_the_best_fixed_codec(
    link: float, last: set[str] | None
) -> None:
    pytest.importorskip("sklearn")
    sizes = problem.Training().sizes
    fixed = {
        codec: steps_of_fixed()[codec] * clock(problem, link).step(sizes, for_keys(codec, sizes))
        for codec in CANDIDATES
    }
    taken, codecs = seconds_of_auto(link)
    print(
        {k: round(v, 3) for k, v in fixed.items()},
        steps_of_fixed(),
        round(taken, 3),
        codecs,
        taken / min(fixed.values()),
    )
    assert taken <= 1.10 * min(fixed.values())
    assert last is None or codecs == last
