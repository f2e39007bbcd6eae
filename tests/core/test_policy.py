"""Policies as values: their fields, their text, and what is refused."""

from __future__ import annotations

import dataclasses
import re

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from zkv.policy import (
    FORMS,
    SyncPolicy,
    asp,
    bsp,
    k_asp,
    k_batch_asp,
    k_batch_bsp,
    k_bsp,
    policy,
    ssp,
)

ks = st.integers(1, 10**9 - 1)
policies = st.one_of(
    st.just(bsp()),
    st.just(asp()),
    st.integers(0, 10**9 - 1).map(ssp),
    *(ks.map(make) for make in (k_bsp, k_batch_bsp, k_asp, k_batch_asp)),
)


@given(policies)
def test_a_policys_text_makes_it_again(value):
    assert policy(str(value)) == value


@given(
    st.text(max_size=30) | st.from_regex(r"(k-(batch-)?)?(bsp|asp|ssp)(:-?\d*)?", fullmatch=True)
)
def test_any_text_is_a_policy_or_an_error_that_lists_the_forms(text):
    if re.fullmatch(r"bsp|asp|ssp:[0-9]{1,9}|k-(batch-)?[ab]sp:0*[1-9][0-9]*", text):
        assume(len(text.partition(":")[2]) < 10)
        assert policy(str(policy(text))) == policy(text)
    else:
        with pytest.raises(ValueError, match=re.escape(", ".join(FORMS))):
            policy(text)


@pytest.mark.parametrize(
    ("text", "threshold", "distinct", "cancel", "slack"),
    [
        ("bsp", None, True, True, None),
        ("asp", 1, False, False, None),
        ("ssp:3", 1, False, False, 3),
        ("ssp:0", 1, False, False, 0),
        ("k-bsp:2", 2, True, True, None),
        ("k-batch-bsp:2", 2, False, True, None),
        ("k-asp:2", 2, True, False, None),
        ("k-batch-asp:2", 2, False, False, None),
    ],
)
def test_the_seven_policies_are_rows_of_one_table(text, threshold, distinct, cancel, slack):
    name = text.partition(":")[0]
    assert policy(text) == SyncPolicy(name, threshold, distinct, cancel, slack)
    assert str(policy(text)) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "sspp",
        "ssp",
        "ssp:",
        "ssp:-1",
        "ssp:1.5",
        "ssp:٣",
        "ssp:9999999999",
        "bsp:2",
        "asp:1",
        "k-bsp",
        "k-bsp:0",
        "k-batch-bsp:0",
        "k-asp:0",
        "k-batch-asp:0",
        "k-asp:-2",
        " bsp",
        "bsp\n",
        "BSP",
    ],
)
def test_a_wrong_text_is_refused_with_the_valid_forms(text):
    with pytest.raises(ValueError, match=r"bsp, asp, ssp:S, k-bsp:K, k-batch-bsp:K, k-asp:K"):
        policy(text)


def test_an_error_quotes_no_more_than_a_little_of_a_long_text():
    with pytest.raises(ValueError) as caught:
        policy("x" * 100_000)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (lambda: k_bsp(0), r"'k-bsp': threshold must be at least 1, given 0"),
        (lambda: k_batch_asp(-1), r"'k-batch-asp': threshold must be at least 1, given -1"),
        (lambda: ssp(-1), r"'ssp': slack must be at least 0, given -1"),
        (lambda: dataclasses.replace(k_asp(2), slack=1), r"slack 1 can deadlock"),
        (lambda: dataclasses.replace(k_batch_bsp(2), slack=1), r"slack 1 can deadlock"),
        (lambda: dataclasses.replace(ssp(1), threshold=None), r"slack 1 can deadlock where"),
    ],
)
def test_a_policy_that_cannot_work_is_never_made(make, complaint):
    with pytest.raises(ValueError, match=complaint):
        make()


def test_policies_are_values():
    assert k_bsp(2) == k_bsp(2)
    assert k_bsp(2) != k_bsp(3)
    assert len({ssp(1), ssp(1), ssp(2)}) == 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        bsp().threshold = 1
