"""Update rules: laws for any arrays and cuts, worked examples, agreement with PyTorch (CPU)."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from zkv import optim
from zkv.optim import (
    RULES,
    Rule,
    clip_factor,
    init_slots,
    rule,
    square_sum,
    square_sum_of,
    stays_where_zero,
    update,
)

FLOATS = (np.float32, np.float64)
VARIED = (
    "assign",
    "sgd",
    "sgd:weight_decay=0.1",
    "momentum:momentum=0.8",
    "momentum:weight_decay=0.1",
    "nesterov",
    "nesterov:weight_decay=0.1",
    "adam",
    "adam:beta1=0.3,weight_decay=0.1",
    "adamw:weight_decay=0.2",
    "adagrad:initial=0.5,lr_decay=0.01",
    "adagrad:weight_decay=0.1",
)


def bits(array: np.ndarray[Any, Any]) -> bytes:
    return array.tobytes()


@st.composite
def cases(draw: st.DrawFn) -> dict[str, Any]:
    """A rule with a value, its state after some updates, and a gradient."""
    chosen = rule(draw(st.sampled_from(VARIED)))
    dtype = draw(st.sampled_from(FLOATS))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    length = draw(st.integers(0, 70))
    scale = draw(st.sampled_from([1e-20, 1e-3, 1.0, 1e6, 1e30]))
    value = rng.normal(size=length).astype(dtype)
    slots = init_slots(chosen, value)
    count = draw(st.integers(1, 4))
    for earlier in range(1, count):
        gradient = rng.normal(size=length).astype(dtype)
        value, slots = update(chosen, value, slots, gradient, lr=0.1, count=earlier)
    return {
        "rule": chosen,
        "value": value,
        "slots": slots,
        "gradient": (rng.normal(size=length) * scale).astype(dtype),
        "lr": draw(st.sampled_from([0.0, 1e-4, 0.1, 3.0])),
        "count": count,
    }


@given(cases(), st.lists(st.integers(0, 70), max_size=6))
def test_any_cut_into_blocks_gives_the_same_bits(case: dict[str, Any], marks: list[int]) -> None:
    whole, whole_slots = update(**case)
    length = len(case["value"])
    ends = sorted({0, length, *(mark for mark in marks if mark < length)})
    for start, end in pairwise(ends):
        cut = slice(start, end)
        block = case | {name: case[name][cut] for name in ("value", "gradient")}
        block["slots"] = tuple(slot[cut] for slot in case["slots"])
        part, part_slots = update(**block)
        assert bits(part) == bits(whole[cut])
        for slot, expected in zip(part_slots, whole_slots, strict=True):
            assert bits(slot) == bits(expected[cut])


@given(cases())
def test_in_place_separate_buffers_and_new_arrays_agree(case: dict[str, Any]) -> None:
    before = [bits(array) for array in (case["value"], *case["slots"], case["gradient"])]
    pure = update(**case)
    buffers = np.full_like(case["value"], 7), tuple(np.full_like(s, 7) for s in case["slots"])
    separate = update(**case, out=buffers)
    # Neither way touches an input.
    assert before == [bits(array) for array in (case["value"], *case["slots"], case["gradient"])]
    assert separate is buffers
    in_place = update(**case, out=(case["value"], case["slots"]))
    assert in_place[0] is case["value"]
    assert bits(case["gradient"]) == before[-1]
    for result in (separate, in_place):
        assert bits(result[0]) == bits(pure[0])
        assert [bits(slot) for slot in result[1]] == [bits(slot) for slot in pure[1]]


@given(cases())
def test_results_keep_dtype_and_shape(case: dict[str, Any]) -> None:
    value, slots = update(**case)
    assert len(slots) == len(case["rule"].slots)
    for array in (value, *slots):
        assert array.dtype == case["value"].dtype
        assert array.shape == case["value"].shape


@settings(max_examples=30)
@given(cases(), st.integers(1, 9))
def test_the_size_of_a_piece_never_changes_a_bit(case: dict[str, Any], elements: int) -> None:
    expected = update(**case)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(optim, "PIECE_ELEMENTS", elements)
        value, slots = update(**case)
    assert bits(value) == bits(expected[0])
    assert [bits(slot) for slot in slots] == [bits(slot) for slot in expected[1]]


@pytest.mark.parametrize("text", VARIED)
def test_values_longer_than_one_piece(text: str) -> None:
    chosen = rule(text)
    rng = np.random.default_rng(3)
    length = 2 * optim.PIECE_ELEMENTS + 5
    value, gradient = rng.normal(size=(2, length)).astype(np.float32)
    value_out, slots_out = update(
        chosen, value, init_slots(chosen, value), gradient, lr=0.1, count=1
    )
    for cut in (
        slice(0, 11),
        slice(optim.PIECE_ELEMENTS - 3, optim.PIECE_ELEMENTS + 3),
        slice(-7, None),
    ):
        part = value[cut]
        expected, slots = update(
            chosen, part, init_slots(chosen, part), gradient[cut], lr=0.1, count=1
        )
        assert bits(value_out[cut]) == bits(expected)
        assert [bits(slot[cut]) for slot in slots_out] == [bits(slot) for slot in slots]


# Worked examples: value 1, then what two gradients of 1 and 0.5 make of it at rate 0.1.
@pytest.mark.parametrize(
    ("text", "first", "second"),
    [
        ("assign", 1.0, 0.5),
        ("sgd", 0.9, 0.85),
        # 1 - 0.1 * (1 + 0.5 * 1) = 0.85; 0.85 - 0.1 * (0.5 + 0.5 * 0.85) = 0.7575
        ("sgd:weight_decay=0.5", 0.85, 0.7575),
        # m = 1; then m = 0.9 + 0.5 = 1.4
        ("momentum", 0.9, 0.76),
        # 1 + 0.9 * 1 = 1.9; then 0.5 + 0.9 * 1.4 = 1.76
        ("nesterov", 0.81, 0.634),
        # s = 1, then s = 1.25: 0.9 - 0.1 * 0.5 / sqrt(1.25)
        ("adagrad:eps=1e-30", 0.9, 0.9 - 0.05 / math.sqrt(1.25)),
        # s starts at 3: sqrt(4) = 2; the second rate is 0.1 / (1 + 1)
        ("adagrad:eps=1e-30,initial=3,lr_decay=1", 0.95, 0.95 - 0.025 / math.sqrt(4.25)),
        # Corrected mean and square: 1 and 1; then (0.25 + 0.25) / 0.75, (0.25 + 0.125) / 0.75
        ("adam:beta1=0.5,beta2=0.5,eps=1e-30", 0.9, 0.9 - 0.1 * (0.5 / 0.75) / math.sqrt(0.5)),
        # Shrinks by 1 - 0.1 * 0.5 before each: 0.95 - 0.1, then 0.85 * 0.95 - the same as above
        (
            "adamw:beta1=0.5,beta2=0.5,eps=1e-30,weight_decay=0.5",
            0.85,
            0.8075 - 0.1 * (0.5 / 0.75) / math.sqrt(0.5),
        ),
    ],
)
def test_worked_examples(text: str, first: float, second: float) -> None:
    chosen = rule(text)
    value = np.array([1.0])
    slots = init_slots(chosen, value)
    for count, (gradient, expected) in enumerate([(1.0, first), (0.5, second)], start=1):
        value, slots = update(chosen, value, slots, np.array([gradient]), lr=0.1, count=count)
        assert value[0] == pytest.approx(expected, rel=1e-14)


def test_assign_takes_any_dtype() -> None:
    for dtype in (np.int64, np.uint8, np.float16, np.bool_, np.complex64):
        value, wanted = np.zeros(3, dtype), np.array([1, 0, 1], dtype)
        result, slots = update(Rule("assign"), value, (), wanted, lr=0.1, count=1)
        assert slots == ()
        assert result.dtype == dtype
        assert result.tolist() == wanted.tolist()
        assert result is not wanted


@pytest.mark.filterwarnings("error")
def test_overflow_and_nan_pass_through_without_a_warning() -> None:
    value = np.array([3e38, 1.0, 1.0], np.float32)
    gradient = np.array([-3e38, np.inf, np.nan], np.float32)
    result, _ = update(Rule("sgd"), value, (), gradient, lr=10.0, count=1)
    assert result[0] == np.inf
    assert result[1] == -np.inf
    assert np.isnan(result[2])


def test_without_momentum_adams_mean_is_the_gradient_itself() -> None:
    chosen, tiny = rule("adam:beta1=0"), np.array([1e-12], np.float32)
    slots = (np.ones(1, np.float32), np.ones(1, np.float32))
    _, (mean, _) = update(chosen, np.ones(1, np.float32), slots, tiny, lr=0.1, count=2)
    assert mean[0] == tiny[0]


def test_state_arrays_and_their_names() -> None:
    names = {name: Rule(name).slots for name in RULES}
    assert names == {
        "assign": (),
        "sgd": (),
        "momentum": ("momentum",),
        "nesterov": ("momentum",),
        "adam": ("mean", "square"),
        "adamw": ("mean", "square"),
        "adagrad": ("sum",),
    }
    (total,) = init_slots(rule("adagrad:initial=0.25"), np.ones(2, np.float32))
    assert total.dtype == np.float32
    assert total.tolist() == [0.25, 0.25]


# What is refused, and in which words.


@pytest.mark.parametrize("dtype", [np.float16, np.int32, ">f4", np.complex128])
@pytest.mark.parametrize("name", [name for name in RULES if name != "assign"])
def test_other_dtypes_are_refused_by_name(name: str, dtype: Any) -> None:
    value = np.zeros(2, dtype)
    with pytest.raises(TypeError, match=str(value.dtype)):
        init_slots(Rule(name), value)
    with pytest.raises(TypeError, match=str(value.dtype)):
        update(Rule(name), value, (value,) * len(Rule(name).slots), value, lr=0.1, count=1)


def test_inputs_that_do_not_fit_are_refused() -> None:
    one = np.ones(3, np.float32)
    momentum = Rule("momentum")
    with pytest.raises(TypeError, match="gradient is float64, the value is float32"):
        update(momentum, one, (one,), np.ones(3), lr=0.1, count=1)
    with pytest.raises(TypeError, match="momentum is float64"):
        update(momentum, one, (np.ones(3),), one, lr=0.1, count=1)
    with pytest.raises(ValueError, match=r"gradient has shape \(2,\), the value has \(3,\)"):
        update(momentum, one, (one,), one[:2], lr=0.1, count=1)
    with pytest.raises(ValueError, match="given 0; use init_slots"):
        update(momentum, one, (), one, lr=0.1, count=1)
    with pytest.raises(ValueError, match="flat arrays"):
        update(Rule("sgd"), np.ones((2, 2)), (), np.ones((2, 2)), lr=0.1, count=1)
    with pytest.raises(ValueError, match="first update has count 1"):
        update(Rule("sgd"), one, (), one, lr=0.1, count=0)
    for lr in (-0.1, math.nan, math.inf):
        with pytest.raises(ValueError, match="learning rate"):
            update(Rule("sgd"), one, (), one, lr=lr, count=1)


def test_outputs_that_would_destroy_an_input_are_refused() -> None:
    memory = np.ones(9, np.float32)
    value, slot, gradient = memory[:3].copy(), memory[:3].copy(), memory[:3].copy()

    def run(value_out: Any, slot_out: Any, start: Any = value) -> None:
        update(
            Rule("momentum"),
            start,
            (slot,),
            gradient,
            lr=0.1,
            count=1,
            out=(value_out, (slot_out,)),
        )

    with pytest.raises(ValueError, match=r"out\[0\] overlaps"):
        run(gradient, slot)
    with pytest.raises(ValueError, match=r"out\[0\] overlaps"):
        run(slot, value)
    with pytest.raises(ValueError, match=r"out\[0\] overlaps"):
        run(memory[1:4], slot, start=memory[:3])
    with pytest.raises(ValueError, match=r"out\[0\] overlaps"):
        run(memory[2::-1], slot, start=memory[:3])
    fresh = np.empty_like(value)
    with pytest.raises(ValueError, match="overlaps"):
        run(fresh, fresh)
    fresh.flags.writeable = False
    with pytest.raises(ValueError, match=r"out\[1\]\[0\] is read-only"):
        run(value, fresh)
    with pytest.raises(ValueError, match=r"out has 0 state arrays, expected 1"):
        update(Rule("momentum"), value, (slot,), gradient, lr=0.1, count=1, out=(value, ()))
    assert value.tolist() == slot.tolist() == gradient.tolist() == [1, 1, 1]


# Rules as values and as text.


def _numbers(name: str) -> st.SearchStrategy[float]:
    if name in ("momentum", "beta1", "beta2"):
        return st.floats(0, 1, exclude_max=True)
    return st.floats(0, 1e300, exclude_min=name == "eps")


@st.composite
def rules(draw: st.DrawFn) -> Rule:
    name = draw(st.sampled_from(RULES))
    some = draw(st.sets(st.sampled_from([s for s, _ in Rule(name).hyper] or [""])))
    return Rule(name, tuple((setting, draw(_numbers(setting))) for setting in some if setting))


@given(rules())
def test_rule_text_round_trips(chosen: Rule) -> None:
    assert rule(str(chosen)) == chosen
    assert hash(rule(str(chosen))) == hash(chosen)
    assert Rule(chosen.name, chosen.hyper) == chosen


def test_defaults_are_filled_in_and_sorted() -> None:
    assert Rule("adamw").hyper == (
        ("beta1", 0.9),
        ("beta2", 0.999),
        ("eps", 1e-8),
        ("weight_decay", 0.01),
    )
    assert rule("adagrad").hyper == (
        ("eps", 1e-10),
        ("initial", 0.0),
        ("lr_decay", 0.0),
        ("weight_decay", 0.0),
    )
    assert rule("momentum:weight_decay=1e-4, momentum=0.90") == Rule(
        "momentum", (("weight_decay", 1e-4),)
    )
    assert str(rule("momentum:momentum=0.95,weight_decay=0")) == "momentum:momentum=0.95"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("sdg", "unknown update rule 'sdg'; the rules are assign, sgd"),
        ("", "unknown update rule ''"),
        ("sgd:", "nothing follows the colon"),
        ("sgd:momentum=0.9", "rule sgd has no setting 'momentum'; its settings are: weight_decay"),
        ("assign:weight_decay=1", "its settings are: none"),
        ("momentum:momentum=1", "0 <= momentum < 1"),
        ("momentum:momentum=0.9,momentum=0.9", "momentum is given twice"),
        ("adam:beta1=-0.1", "0 <= beta1 < 1"),
        ("adam:eps=0", "eps > 0"),
        ("adam:weight_decay=-1", "weight_decay >= 0"),
        ("adam:eps=nan", "eps=nan is not finite"),
        ("adam:eps=inf", "eps=inf is not finite"),
        ("adam:eps=small", "eps='small' is not a number"),
        ("adam:eps", "not of the form name=number"),
        ("adam:eps=", "not of the form name=number"),
        ("adam:eps=1,,beta1=0", "not of the form name=number"),
    ],
)
def test_bad_rule_text_names_the_part(text: str, words: str) -> None:
    with pytest.raises(ValueError) as caught:
        rule(text)
    assert words in str(caught.value)


def test_with_hyper_changes_one_setting() -> None:
    changed = rule("momentum:momentum=0.5,weight_decay=0.1").with_hyper(weight_decay=0)
    assert changed == rule("momentum:momentum=0.5")
    with pytest.raises(ValueError, match="no setting 'beta1'"):
        rule("sgd").with_hyper(beta1=0.5)
    with pytest.raises(ValueError, match="is not a number"):
        rule("sgd").with_hyper(weight_decay=True)


# Norms and clipping.


@given(st.lists(st.floats(-1e100, 1e100), max_size=50))
def test_square_sum_is_the_sum_of_squares(numbers: list[float]) -> None:
    expected = math.fsum(number * number for number in numbers)
    assert square_sum(np.array(numbers)) == pytest.approx(expected, rel=1e-13)


def test_square_sum_accumulates_in_float64() -> None:
    # In float32 the square of 1e30 overflows, and 2**24 + 1 is not a number.
    assert square_sum(np.array([1e30], np.float32)) == pytest.approx(1e60, rel=1e-6)
    ones = np.ones(2 * optim.PIECE_ELEMENTS + 1, np.float32)
    ones[0] = 4096.0
    assert square_sum(ones) == 4096.0**2 + 2 * optim.PIECE_ELEMENTS
    assert square_sum(np.empty(0, np.float32)) == 0.0
    with pytest.raises(TypeError):
        square_sum(np.ones(2, np.complex64))


@settings(max_examples=20)
@given(st.integers(0, 2**32 - 1), st.integers(0, 3 * optim.PIECE_ELEMENTS))
def test_square_sum_depends_on_the_elements_and_not_on_their_memory(seed: int, length: int) -> None:
    numbers = np.random.default_rng(seed).normal(size=length).astype(np.float32)
    shifted = np.empty(length + 1, np.float32)[1:]
    spread = np.empty(2 * length, np.float32)[::2]
    shifted[:], spread[:] = numbers, numbers
    assert square_sum(numbers) == square_sum(shifted) == square_sum(spread)


@given(
    seed=st.integers(0, 2**32 - 1),
    length=st.integers(0, 3 * optim.PIECE_ELEMENTS) | st.integers(0, 300),
    share=st.sampled_from([0.0, 0.001, 0.1, 1.0]),
    dtype=st.sampled_from(FLOATS),
    kind=st.sampled_from([np.uint32, np.int64]),
)
@settings(max_examples=60, deadline=None)
def test_the_square_sum_of_a_few_elements_is_that_of_the_dense_array_to_the_bit(
    seed: int, length: int, share: float, dtype: Any, kind: Any
) -> None:
    rng = np.random.default_rng(seed)
    positions = np.flatnonzero(rng.random(length) < share).astype(kind)
    values = (rng.normal(size=positions.size) * 10.0 ** rng.integers(-9, 9)).astype(dtype)
    dense = np.zeros(length, dtype)
    dense[positions] = values
    assert square_sum_of(positions, values, length) == square_sum(dense)


@given(case=cases())
def test_an_element_stays_where_the_gradient_is_zero_if_the_rule_says_so(
    case: dict[str, Any],
) -> None:
    if not stays_where_zero(case["rule"]):
        return
    value = case["value"]
    value[::3] = -0.0
    value[1::7] = np.inf
    nothing = np.zeros_like(value)
    options = {"lr": case["lr"], "count": case["count"]}
    after, slots = update(case["rule"], value, case["slots"], nothing, **options)
    assert bits(after) == bits(value)
    assert [bits(one) for one in slots] == [bits(one) for one in case["slots"]]


def test_the_rules_that_let_elements_stay() -> None:
    staying = {text for text in VARIED if stays_where_zero(rule(text))}
    assert staying == {"sgd", "adagrad:initial=0.5,lr_decay=0.01"}
    # In float32 this is 0, and 0 / 0 is not.
    assert not stays_where_zero(rule("adagrad:eps=1e-50"))


@given(st.floats(0, 1e300), st.floats(1e-300, 1e300))
@example(7.522512418662465e299, 7.778557586296688e-165)
def test_clip_factor_bounds_the_norm(total: float, bound: float) -> None:
    factor, norm = clip_factor(total, bound), math.sqrt(total)
    assert 0.0 <= factor <= 1.0
    # Below 2.2e-308 a factor is rounded to a multiple of the least number that there is.
    assert factor * norm <= bound * (1 + 1e-12) + norm * math.ulp(0.0)


def test_clip_factor_examples() -> None:
    assert clip_factor(25.0, 1.0) == 1.0 / (5.0 + 1e-6)
    assert clip_factor(25.0, 6.0) == 1.0
    assert clip_factor(math.inf, 6.0) == 0.0
    assert math.isnan(clip_factor(math.nan, 6.0))
    with pytest.raises(ValueError, match="cannot be negative"):
        clip_factor(-1.0, 1.0)
    for bound in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match="positive and finite"):
            clip_factor(1.0, bound)


# Agreement with PyTorch.

UPDATES = 60
TORCH_CASES = (
    ("sgd", "SGD", {}),
    ("sgd:weight_decay=0.05", "SGD", {"weight_decay": 0.05}),
    ("momentum", "SGD", {"momentum": 0.9}),
    ("momentum:momentum=0.5,weight_decay=0.05", "SGD", {"momentum": 0.5, "weight_decay": 0.05}),
    ("nesterov", "SGD", {"momentum": 0.9, "nesterov": True}),
    (
        "nesterov:weight_decay=0.05",
        "SGD",
        {"momentum": 0.9, "nesterov": True, "weight_decay": 0.05},
    ),
    ("adam", "Adam", {}),
    (
        "adam:beta1=0.3,beta2=0.95,eps=1e-6,weight_decay=0.05",
        "Adam",
        {"betas": (0.3, 0.95), "eps": 1e-6, "weight_decay": 0.05},
    ),
    ("adamw", "AdamW", {}),
    ("adamw:weight_decay=0.3", "AdamW", {"weight_decay": 0.3}),
    ("adagrad", "Adagrad", {}),
    (
        "adagrad:initial=0.1,lr_decay=0.02,weight_decay=0.05",
        "Adagrad",
        {"initial_accumulator_value": 0.1, "lr_decay": 0.02, "weight_decay": 0.05},
    ),
)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("text", "peer", "options"), TORCH_CASES)
def test_equal_to_torch_over_many_updates(
    text: str, peer: str, options: dict[str, Any], dtype: Any
) -> None:
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(11)
    value = rng.normal(size=101).astype(dtype)
    parameter = torch.nn.Parameter(torch.from_numpy(value.copy()))
    optimizer = getattr(torch.optim, peer)([parameter], lr=0.1, **options)
    chosen = rule(text)
    slots = init_slots(chosen, value)
    for count in range(1, UPDATES + 1):
        # A falling and rising rate, and gradients of many sizes, exact zeros among them.
        lr = 0.05 * (1.2 + math.sin(count))
        gradient = (rng.normal(size=101) * 10.0 ** rng.integers(-3, 2, size=101)).astype(dtype)
        gradient[count % 7 :: 7] = 0
        optimizer.param_groups[0]["lr"] = lr
        parameter.grad = torch.from_numpy(gradient.copy())
        optimizer.step()
        value, slots = update(chosen, value, slots, gradient, lr=lr, count=count)
        # Theirs fuses multiply and add on some machines, so single elements that come close to
        # zero after larger values differ by more; float64 shows that the formulas are the same.
        apart = np.abs(parameter.detach().numpy() - value).max() / np.abs(value).max()
        assert apart <= (1e-6 if dtype == np.float32 else 1e-14)
    state = optimizer.state[parameter]
    named = {
        "momentum": "momentum_buffer",
        "mean": "exp_avg",
        "square": "exp_avg_sq",
        "sum": "sum",
    }
    for name, slot in zip(chosen.slots, slots, strict=True):
        theirs = state[named[name]].numpy()
        np.testing.assert_allclose(slot, theirs, rtol=1e-6, atol=1e-6 * np.abs(slot).max())


def test_first_update_from_fresh_torch_state_is_the_same() -> None:
    torch = pytest.importorskip("torch")
    for text, peer, options in TORCH_CASES:
        parameter = torch.nn.Parameter(torch.tensor([1.0, -2.0], dtype=torch.float64))
        parameter.grad = torch.tensor([0.5, 1e-9], dtype=torch.float64)
        getattr(torch.optim, peer)([parameter], lr=0.1, **options).step()
        value = np.array([1.0, -2.0])
        slots = init_slots(rule(text), value)
        value, _ = update(rule(text), value, slots, np.array([0.5, 1e-9]), lr=0.1, count=1)
        np.testing.assert_allclose(value, parameter.detach().numpy(), rtol=1e-14)


@pytest.mark.parametrize("bound", [0.5, 3.0, 1e6])
def test_clipping_equals_torch(bound: float) -> None:
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(5)
    gradients = [rng.normal(size=size) for size in (3, 40, 1000)]
    parameters = [torch.nn.Parameter(torch.zeros(len(g), dtype=torch.float64)) for g in gradients]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = torch.from_numpy(gradient.copy())
    norm = torch.nn.utils.clip_grad_norm_(parameters, bound)
    total = sum(square_sum(gradient) for gradient in gradients)
    assert math.sqrt(total) == pytest.approx(float(norm), rel=1e-13)
    factor = clip_factor(total, bound)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        np.testing.assert_allclose(gradient * factor, parameter.grad.numpy(), rtol=1e-12)
