"""Codecs as Python values: what their text reads as, and what takes them."""

from __future__ import annotations

import pytest
from codec_texts import PLAIN, REMEMBERING

import zkv
from zkv import codecs
from zkv.errors import ConfigError
from zkv_cli.local import local


@pytest.mark.parametrize("text", PLAIN + REMEMBERING)
def test_a_codec_is_its_text(text: str) -> None:
    one = codecs.codec(text)
    assert str(one) == one.text == text
    assert codecs.codec(str(one)) == one


@pytest.mark.parametrize(
    "value",
    [
        codecs.Plan(codecs.codec("int8+ef"), (("*.bias", codecs.codec("none")),), 64, "skip"),
        codecs.plan("auto:owed=4;small=0"),
        codecs.plan("bits:learned,seed=3;w=none"),
        codecs.Plan(codecs.ErrorFeedback(codecs.Chain((codecs.stage("topk:0.01"),)))),
    ],
)
def test_a_plan_is_its_text(value: codecs.Plan) -> None:
    assert codecs.plan(str(value)) == value


@pytest.mark.parametrize(
    "value",
    [
        codecs.ErrorFeedback(codecs.Chain((codecs.stage("topk:0.01"), codecs.stage("int8")))),
        codecs.Auto(owed=4.0),
        codecs.Learned(seed=3),
        codecs.Heuristic(),
        codecs.Schedule(((0, 32), (100, 8))),
        codecs.Plan(codecs.codec("onebit+ef")),
    ],
)
def test_what_takes_text_takes_a_value(value: codecs.Chosen) -> None:
    made = local(codec=value)
    assert made._settings.broker.codec == str(value)
    assert codecs.plan(made._settings.broker.codec).text == str(value)


def test_a_value_that_is_wrong_somewhere_is_refused_where_it_is_used() -> None:
    with pytest.raises(ConfigError, match="versioned deltas are error feedback by themselves"):
        local(codec_down=codecs.codec("int8+ef"))


def test_it_is_found_from_the_top() -> None:
    assert zkv.codecs is codecs
    assert "codecs" in dir(zkv)
