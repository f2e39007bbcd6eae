"""Versioned deltas without a cluster: what a view is, and what a receiver takes."""

from __future__ import annotations

import numpy as np
import pytest
from codec_texts import DOWN
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs
from strategies import struct

from zkv import data_messages as d
from zkv.dtypes import Array
from zkv.errors import ProtocolError
from zkv_codecs.backend import NUMPY, fastest
from zkv_codecs.deltas import KEPT, View, arrived, down_plan
from zkv_codecs.packed import Packed, seed_of
from zkv_codecs.spec import codec

SHAPE = (20, 30)
SIZE = 600

lossy = st.sampled_from([text for text in DOWN if codec(text).lossy])
seeds = st.integers(0, 2**32 - 1)


def walk(seed: int, steps: int) -> list[Array]:
    """Parameters after 0, 1, ... updates."""
    chance = np.random.default_rng(seed)
    moves = chance.standard_normal((steps + 1, SIZE)) * 10.0 ** chance.integers(-3, 3)
    return list(np.cumsum(moves, axis=0).astype(np.float32))


def message(view: View, base: int) -> tuple[d.Block, Array]:
    found = view.after(base)
    assert found is not None
    deltas, payload = found
    return d.Block(0, 1, 0, 4, view.version, 0, "none", [], None, base, deltas), payload


def advance(view: View, target: Array, text: str) -> None:
    seed = seed_of(1, view.version + 1)
    view.advance(target, SHAPE, codec(text), seed, fastest())


@given(lossy, seeds, st.integers(0, 7), st.integers(1, 30))
@settings(max_examples=40, deadline=None)
def test_whoever_holds_a_version_gets_to_the_bits_of_the_view(
    text: str, seed: int, behind: int, steps: int
) -> None:
    first, *targets = walk(seed, steps)
    view = View(0, first.copy(), 0)
    views = [view.values]
    for target in targets:
        advance(view, target, text)
        views.append(view.values)
    base = max(0, steps - behind)
    if view.after(base) is None:
        assert behind > 0
        return
    one, payload = message(view, base)
    # A receiver may hold a newer version than the sender knows of.
    for version in range(base, steps + 1):
        got = arrived(one, payload, SHAPE, (version, views[version]), NUMPY)
        assert got.tobytes() == view.values.tobytes()


@given(lossy, seeds)
@settings(max_examples=20, deadline=None)
def test_the_view_is_behind_by_one_encodings_error_however_many_there_were(
    text: str, seed: int
) -> None:
    first, *targets = walk(seed, 40)
    view, one = View(0, first.copy(), 0), codec(text)
    for target in targets:
        given_error, version = target - view.values, view.version
        advance(view, target, text)
        packed = Packed(given_error, SHAPE)
        sent, _ = one.encode(packed, one.start(SHAPE), seed_of(1, version + 1), NUMPY)
        cut_off = given_error - one.chain.decode(sent.packed, NUMPY).values
        rounding = 2.0**-22 * (np.abs(target) + np.abs(view.values) + np.abs(given_error))
        assert (np.abs((target - view.values) - cut_off) <= rounding).all()


def test_deltas_are_kept_of_the_last_versions_only() -> None:
    first, *targets = walk(1, KEPT + 3)
    view = View(0, first.copy(), 0)
    for target in targets:
        advance(view, target, "int8:1024")
    known = [base for base in range(view.version + 1) if view.after(base) is not None]
    # Four int8 deltas with their scales are more bytes than the values.
    assert known == list(range(view.version - 3, view.version + 1))
    assert view.after(view.version + 1) is None


def test_a_number_that_is_not_finite_ends_what_deltas_can_tell() -> None:
    first, *targets = walk(2, 6)
    view = View(0, first.copy(), 0)
    advance(view, targets[0], "int8")
    targets[1][7] = np.nan
    for bad in (targets[1], targets[2]):
        # The second one is finite, but its difference from the view is not.
        advance(view, bad, "int8")
        assert view.values.tobytes() == bad.tobytes()
        assert view.values is not bad
        assert view.after(view.version - 1) is None
    advance(view, targets[3], "int8")
    assert view.after(view.version - 1) is not None
    assert view.after(view.version - 2) is None


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("int8+ef", "error feedback by themselves; give int8"),
        ("int8;w=int8+ef", "error feedback by themselves; give int8"),
        ("powersgd:2", "not the same on every machine"),
        ("none;w=powersgd:2+int8", "not the same on every machine"),
        ("int9", "no codec is called 'int9'"),
    ],
)
def test_a_plan_that_cannot_carry_deltas_is_refused(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        down_plan(text)


@pytest.mark.parametrize("text", DOWN)
def test_other_plans_are_taken(text: str) -> None:
    assert down_plan(f"{text};small=0").text == f"{text};small=0"


@given(struct(d.Block), st.binary(max_size=2600), st.integers(-1, 3), st.integers(0, 2**20))
@settings(max_examples=200, deadline=None)
def test_any_bytes_are_values_or_a_protocol_error(
    block: d.Block, content: bytes, version: int, seed: int
) -> None:
    first, *targets = walk(seed, 3)
    view = View(0, first.copy(), 0)
    for target in targets:
        advance(view, target, "int8")
    right, payload = message(view, 1)
    held = None if version < 0 else (version, view.values)
    bad = np.frombuffer(content, np.uint8)
    cases = [(block, bad), (right, bad), (structs.replace(block, deltas=right.deltas), payload)]
    cases.append((structs.replace(right, base=block.base), payload))
    for one, sent in cases:
        try:
            got = arrived(one, sent, SHAPE, held, NUMPY)
        except ProtocolError:
            continue
        assert got.size == SIZE
        assert got.dtype == np.float32


@pytest.mark.parametrize("wrong", ["base", "nothing held", "length", "block", "count"])
def test_what_does_not_fit_is_named(wrong: str) -> None:
    first, *targets = walk(5, 2)
    view = View(0, first.copy(), 0)
    for target in targets:
        advance(view, target, "int8")
    one, payload = message(view, 1)
    held: tuple[int, Array] | None = (1, first)
    match wrong:
        case "base":
            held, words = (0, first), "from version 1 to 2, while version 0 is held"
        case "nothing held":
            held, words = None, "while nothing is held"
        case "length":
            payload, words = payload[:-8], "expected"
        case "block":
            held, words = (1, first[:-1]), "deltas for 600 float32, 599 held"
        case _:
            one, words = structs.replace(one, base=0), "1 deltas from version 0 to 2"
            held = (0, first)
    with pytest.raises(ProtocolError, match=words):
        arrived(one, payload, SHAPE, held, NUMPY)
