"""The optimizer as text and plain data: round trips for any spec, lookups by key, refusals."""

from __future__ import annotations

import json
import math
from typing import Any

import msgspec
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from zkv.optim import RULES, Rule, rule
from zkv.optimizer_spec import LR_DEFAULTS, KeyOverride, OptimizerSpec, optimizer
from zkv.schedule import Schedule, schedule

amounts = st.floats(0, 1e300)
patterns = st.text(
    st.characters(exclude_characters=";", exclude_categories=["Cs"]), min_size=1, max_size=8
).filter(lambda pattern: pattern == pattern.strip())


@st.composite
def overrides(draw: st.DrawFn, decays: bool) -> KeyOverride:
    decay = draw(st.none() | amounts) if decays else None
    return KeyOverride(
        draw(patterns), decay, draw(amounts if decay is None else st.none() | amounts)
    )


@st.composite
def specs(draw: st.DrawFn) -> OptimizerSpec:
    name = draw(st.sampled_from(RULES))
    decays = name != "assign"
    decay = (("weight_decay", draw(amounts)),) if decays and draw(st.booleans()) else ()
    texts = ["constant", "warmup:5", "steps:30,60:0.1", "warmup:5+cosine:1000:0.1"]
    return OptimizerSpec(
        Rule(name, decay),
        draw(amounts),
        schedule(draw(st.sampled_from(texts))),
        draw(st.none() | st.floats(0, 1e300, exclude_min=True)) if decays else None,
        tuple(draw(st.lists(overrides(decays), max_size=3))),
    )


@given(specs())
def test_text_round_trips(spec: OptimizerSpec) -> None:
    assert optimizer(str(spec)) == spec


@given(specs())
def test_plain_form_round_trips_through_messagepack_and_json(spec: OptimizerSpec) -> None:
    assert OptimizerSpec.from_plain(spec.to_plain()) == spec
    packed = msgspec.msgpack.encode(spec.to_plain())
    assert OptimizerSpec.from_plain(msgspec.msgpack.decode(packed)) == spec
    assert OptimizerSpec.from_plain(json.loads(json.dumps(spec.to_plain()))) == spec


@given(specs(), amounts, st.integers(0, 2000))
def test_a_new_rate_changes_nothing_else(spec: OptimizerSpec, lr: float, version: int) -> None:
    changed = spec.with_lr(lr)
    assert changed.lr == lr
    assert changed.with_lr(spec.lr) == spec
    assert changed.for_key("a") == spec.for_key("a")
    assert changed.lr_at(version) <= lr


@given(specs(), st.text(max_size=5))
def test_a_key_gets_the_rule_or_an_override_of_it(spec: OptimizerSpec, key: str) -> None:
    found, lr_factor = spec.for_key(key)
    assert found.name == spec.rule.name
    assert lr_factor in {1.0, *(o.lr_factor for o in spec.overrides)}
    without = OptimizerSpec(spec.rule, spec.lr)
    assert without.for_key(key) == (spec.rule, 1.0)


@given(specs(), patterns)
def test_the_last_matching_override_wins(spec: OptimizerSpec, key: str) -> None:
    assume(not set("[*?") & set(key))
    last = OptimizerSpec(
        spec.rule, spec.lr, overrides=(*spec.overrides, KeyOverride(key, lr_factor=0.125))
    )
    assert last.for_key(key) == (spec.for_key(key)[0], 0.125)


def test_a_full_text() -> None:
    spec = optimizer(
        "momentum:lr=0.1,momentum=0.8,weight_decay=1e-4,schedule=warmup:5+cosine:1000,"
        "clip_global_norm=1.0"
    )
    assert spec == OptimizerSpec(
        rule("momentum:momentum=0.8,weight_decay=1e-4"), 0.1, schedule("warmup:5+cosine:1000"), 1.0
    )
    assert spec.lr_at(0) == pytest.approx(0.02)
    assert spec.lr_at(505) == pytest.approx(0.05)
    assert str(spec) == (
        "momentum:lr=0.1,momentum=0.8,weight_decay=0.0001,schedule=warmup:5+cosine:1000,"
        "clip_global_norm=1.0"
    )


def test_a_schedule_with_commas_may_stand_anywhere() -> None:
    expected = OptimizerSpec(rule("sgd:weight_decay=0.1"), 0.5, schedule("steps:30,60:0.2"))
    assert optimizer("sgd:schedule=steps:30,60:0.2,weight_decay=0.1,lr=0.5") == expected
    assert optimizer(" sgd : lr = 0.5, weight_decay=0.1, schedule=steps:30, 60:0.2 ") == expected


def test_overrides_by_key() -> None:
    spec = optimizer(
        "adam:lr=0.001,weight_decay=0.1;*.bias:weight_decay=0;head.*:lr=10x;head.out:lr_factor=2"
    )
    assert spec.for_key("body.weight") == (rule("adam:weight_decay=0.1"), 1.0)
    assert spec.for_key("body.bias") == (rule("adam"), 1.0)
    # Weight decay and factor are looked up separately, so both overrides count here.
    assert spec.for_key("head.bias") == (rule("adam"), 10.0)
    assert spec.for_key("head.out") == (rule("adam:weight_decay=0.1"), 2.0)
    assert spec.for_key("HEAD.out") == (rule("adam:weight_decay=0.1"), 1.0)


def test_integer_keys_match_as_their_digits() -> None:
    spec = optimizer("sgd;7:lr=2x;1?:lr=3x")
    assert [spec.for_key(key)[1] for key in (7, "7", 17, 70)] == [2.0, 2.0, 3.0, 1.0]


def test_a_pattern_may_contain_colons_and_escaped_brackets() -> None:
    spec = optimizer("sgd;dense/kernel:0:lr=2x;layers[[]0].w:lr=3x")
    assert spec.for_key("dense/kernel:0")[1] == 2.0
    assert spec.for_key("layers[0].w")[1] == 3.0
    assert optimizer(str(spec)) == spec


def test_the_rate_has_a_default_for_each_rule() -> None:
    assert {name: optimizer(name).lr for name in RULES} == dict(LR_DEFAULTS)
    assert optimizer("sgd").lr == 0.01
    assert optimizer("adam").lr == 0.001
    assert optimizer("sgd").schedule == Schedule()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "unknown update rule ''"),
        ("sdg:lr=0.1", "unknown update rule 'sdg'"),
        ("sgd:", "nothing follows the colon of 'sgd:'"),
        ("sgd:lr", "not of the form name=number"),
        ("sgd:lr=fast", "lr='fast' is not a number"),
        ("sgd:lr=-0.1", "lr=-0.1 must be finite and not negative"),
        ("sgd:lr=nan", "lr=nan is not finite"),
        ("sgd:lr=inf", "lr=inf is not finite"),
        ("sgd:lr=0.1,2", "lr='0.1,2' is not a number"),
        ("sgd:lr=0.1,lr=0.2", "lr is given twice"),
        ("sgd:momentum=0.9", "sgd has no setting 'momentum'; valid here: weight_decay, lr"),
        ("sgd:weight_decay=-1", "weight_decay >= 0"),
        ("sgd:schedule=cosine", "'cosine' is not a schedule"),
        ("sgd:clip_global_norm=0", "must be > 0"),
        ("sgd:clip_global_norm=-1", "clip_global_norm=-1.0 must be finite and not negative"),
        ("sgd:clip_global_norm=nan", "clip_global_norm=nan is not finite"),
        ("assign:clip_global_norm=1", "rule assign stores values"),
        ("assign;a:weight_decay=1", "which rule assign does not have"),
        ("sgd;", "override '' is not of the form"),
        ("sgd;bias", "override 'bias' is not of the form"),
        ("sgd;bias:", "override 'bias:' is not of the form"),
        ("sgd;:lr=2x", "pattern ''"),
        ("sgd;a:lr=0.1", "write lr=10x"),
        ("sgd;a:lr=-1x", "lr_factor of pattern 'a'=-1.0 must be finite"),
        ("sgd;a:lr=x", "lr='' is not a number"),
        ("sgd;a:lr=infx", "is not finite"),
        ("sgd;a:lr=1x,lr=2x", "lr is given twice"),
        ("sgd;a:lr=1x,lr_factor=2", "gives the factor twice"),
        ("sgd;a:weight_decay=-1", "must be finite and not negative"),
        ("sgd;a:momentum=0.5", "override 'a:momentum=0.5' has no setting 'momentum'"),
    ],
)
def test_bad_text_names_the_part_and_the_form(text: str, words: str) -> None:
    with pytest.raises(ValueError) as caught:
        optimizer(text)
    assert words in str(caught.value)
    assert "the form is rule[:name=number" in str(caught.value)


@pytest.mark.parametrize("pattern", ["", " a", "a ", "a;b", "\n"])
def test_patterns_that_text_cannot_hold_are_refused(pattern: str) -> None:
    with pytest.raises(ValueError, match="pattern"):
        KeyOverride(pattern, weight_decay=0.0)


def test_values_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="changes nothing"):
        KeyOverride("a")
    for lr in (-1.0, math.nan, math.inf, True, "1"):
        with pytest.raises(ValueError, match="lr="):
            optimizer("sgd").with_lr(lr)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rule": "sdg"}, "unknown update rule"),
        ({"rule": 3}, "rule is int, expected str"),
        ({"lr": "0.1"}, "lr is str, expected int or float"),
        ({"lr": True}, "lr=True is not a number"),
        ({"lr": -1}, "must be finite and not negative"),
        ({"hyper": {"beta1": 0.5}}, "no setting 'beta1'"),
        ({"hyper": {"weight_decay": "0"}}, "is not a number"),
        ({"hyper": None}, "hyper is NoneType, expected dict"),
        ({"schedule": "cosine"}, "is not a schedule"),
        ({"clip_global_norm": 0}, "must be > 0"),
        ({"overrides": {}}, "overrides is dict, expected list"),
        ({"overrides": [3]}, "override is int, expected a dict"),
        ({"overrides": [{"pattern": "a"}]}, "unknown or missing fields weight_decay, lr_factor"),
        ({"nesterov": True}, "unknown or missing fields 'nesterov'"),
    ],
)
def test_plain_data_that_does_not_fit_is_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError) as caught:
        OptimizerSpec.from_plain(optimizer("sgd").to_plain() | change)
    assert words in str(caught.value)


def test_plain_data_must_be_a_whole_dict() -> None:
    with pytest.raises(ValueError, match="optimizer is list, expected a dict"):
        OptimizerSpec.from_plain([])
    with pytest.raises(ValueError, match="unknown or missing fields rule, hyper"):
        OptimizerSpec.from_plain({})


def test_whole_numbers_in_plain_data_become_floats() -> None:
    plain = optimizer("sgd").to_plain() | {"lr": 1, "hyper": {"weight_decay": 0}}
    spec = OptimizerSpec.from_plain(plain)
    assert spec == optimizer("sgd:lr=1")
    assert str(spec) == "sgd:lr=1.0"
