"""Laws of every codec and chain, on every kernel that runs on a CPU, through the wire and back."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from codec_texts import MOMENTUM, PLAIN, REMEMBERING
from hypothesis import given, settings
from hypothesis import strategies as st

from zkv.data_messages import Form
from zkv.errors import ProtocolError
from zkv_codecs.backend import Backend
from zkv_codecs.feedback import Codec, Dgc
from zkv_codecs.frames import from_payload, to_payload
from zkv_codecs.packed import dense
from zkv_codecs.spec import codec

Array = np.ndarray[Any, Any]

SHAPES = ((0,), (1,), (), (3,), (3, 0), (255,), (256,), (257,), (40, 70), (5, 3, 7), (1000,))
BACKENDS = [Backend("numpy")]
if importlib.util.find_spec("numba"):
    BACKENDS.append(Backend("numba"))

codecs = st.sampled_from(PLAIN + REMEMBERING + MOMENTUM).map(codec)
remembering = st.sampled_from(REMEMBERING).map(codec)
backends = st.sampled_from(BACKENDS)
shapes = st.sampled_from(SHAPES)
seeds = st.integers(0, 2**32 - 1)


def gradients(seed: int, shape: tuple[int, ...]) -> Iterator[Array]:
    """Gradients of all sizes: most small, some large, some zero."""
    chance = np.random.default_rng(seed)
    while True:
        values = chance.standard_normal(shape) * 10.0 ** chance.integers(-4, 3)
        values *= chance.random(shape) < 0.9
        yield values.astype(np.float32)


@given(codecs, backends, shapes, seeds)
@settings(max_examples=150, deadline=None)
def test_what_travels_is_what_was_encoded(
    one: Codec, backend: Backend, shape: tuple[int, ...], seed: int
) -> None:
    state = one.start(shape)
    for _, gradient in zip(range(2), gradients(seed, shape), strict=False):
        encoded, state = one.encode(dense(gradient), state, seed, backend)
        form, payload = to_payload(encoded)
        buffer = np.zeros(payload.size + 8, np.uint8)
        received = buffer[: payload.size]
        received[:] = payload
        received.flags.writeable = False
        arrived = from_payload(encoded.chain.text, form, received, shape)
        here = encoded.chain.decode(encoded.packed, backend).values
        there = arrived.chain.decode(arrived.packed, backend).values
        assert there.dtype == np.float32
        assert there.size == gradient.size
        np.testing.assert_array_equal(there, here)
        for weight in (1.0, 3.0):
            total = gradient.reshape(-1).copy()
            arrived.chain.add(arrived.packed, weight, total, backend)
            expected = gradient.reshape(-1) + there * np.float32(weight)
            np.testing.assert_array_equal(total, expected)


@given(codecs, shapes, seeds)
@settings(max_examples=100, deadline=None)
def test_all_kernels_send_the_same_bytes(one: Codec, shape: tuple[int, ...], seed: int) -> None:
    states = [one.start(shape) for _ in BACKENDS]
    for _, gradient in zip(range(3), gradients(seed, shape), strict=False):
        sent = []
        for at, backend in enumerate(BACKENDS):
            encoded, states[at] = one.encode(dense(gradient), states[at], seed, backend)
            form, payload = to_payload(encoded)
            sent.append((encoded.chain, form, payload.tobytes()))
        assert all(one == sent[0] for one in sent)
        for state in states[1:]:
            for mine, first in zip(state, states[0], strict=True):
                np.testing.assert_array_equal(mine, first)


@given(remembering, backends, shapes, seeds)
@settings(max_examples=100, deadline=None)
def test_nothing_is_lost(one: Codec, backend: Backend, shape: tuple[int, ...], seed: int) -> None:
    """What was received and what is remembered are all that was given, to rounding."""
    state = one.start(shape)
    given_, received = np.zeros(shape).reshape(-1), np.zeros(shape).reshape(-1)
    largest = 0.0
    for turn, gradient in zip(range(6), gradients(seed, shape), strict=False):
        encoded, state = one.encode(dense(gradient), state, seed + turn, backend)
        given_ += gradient.reshape(-1)
        received += encoded.chain.decode(encoded.packed, backend).values
        largest = max([largest, *np.abs(gradient).reshape(-1)])
    owed = one.carried(state)
    assert owed is not None
    np.testing.assert_allclose(received + owed, given_, rtol=1e-4, atol=1e-5 * largest)


@given(st.sampled_from(MOMENTUM), backends, shapes, seeds)
@settings(max_examples=50, deadline=None)
def test_dgc_sends_sums_of_momentum(
    text: str, backend: Backend, shape: tuple[int, ...], seed: int
) -> None:
    """Section 3 of the paper: v gathers u = m·u + g, and what is sent leaves v, and its u is 0."""
    one = codec(text)
    assert isinstance(one, Dgc)
    state = one.start(shape)
    size = dense(np.zeros(shape, np.float32)).size
    u, gathered, received, largest = np.zeros(size), np.zeros(size), np.zeros(size), 0.0
    for turn, gradient in zip(range(6), gradients(seed, shape), strict=False):
        encoded, state = one.encode(dense(gradient), state, seed + turn, backend)
        sent = encoded.chain.decode(encoded.packed, backend).values
        u = one.momentum * u + gradient.reshape(-1)
        gathered += u
        received += sent
        u = np.where(state[0] == 0, 0, u)
        assert (state[0][sent != 0] == 0).all()
        largest = max([largest, *np.abs(gradient).reshape(-1)])
        np.testing.assert_allclose(state[0], u, rtol=1e-4, atol=1e-4 * largest)
    np.testing.assert_allclose(received + state[1], gathered, rtol=1e-4, atol=1e-4 * largest)


@given(remembering, shapes, seeds, st.data())
@settings(max_examples=100, deadline=None)
def test_what_does_not_count_leaves_no_trace(
    one: Codec, shape: tuple[int, ...], seed: int, data: st.DataObject
) -> None:
    """Rule 13: whatever the order in which fates are heard, residual and receipts are what counted.

    A batch that does not count is taken back with what it had of the residual; its own gradient is
    what the policy has dropped.
    """
    state = one.start(shape)
    size = dense(np.zeros(shape, np.float32)).size
    given_, received = np.zeros(size), np.zeros(size)
    open_: list[tuple[Any, Any, Array, Array]] = []
    largest = 0.0
    for turn, gradient in zip(range(8), gradients(seed, shape), strict=False):
        before = state
        encoded, state = one.encode(dense(gradient), before, seed + turn)
        largest = max([largest, *np.abs(gradient).reshape(-1)])
        sent = encoded.chain.decode(encoded.packed, BACKENDS[0]).values
        open_.append((before, state, gradient.reshape(-1), sent))
        while open_ and (turn == 7 or data.draw(st.booleans())):
            old, new, flat, sent = open_.pop(data.draw(st.integers(0, len(open_) - 1)))
            if data.draw(st.booleans()):
                given_ += flat
                received += sent
            else:
                state = one.restore(state, old, new)
    owed = one.carried(state)
    assert owed is not None
    np.testing.assert_allclose(received + owed, given_, rtol=1e-4, atol=2e-5 * largest)


def test_the_last_step_is_taken_back_to_the_bit() -> None:
    for text in REMEMBERING:
        one = codec(text)
        gradient = next(gradients(3, (40, 70)))
        _, first = one.encode(dense(gradient), one.start((40, 70)), 1)
        _, second = one.encode(dense(gradient), first, 2)
        assert one.restore(second, first, second)[0] is first[0]


@given(codecs, shapes, seeds, st.data())
@settings(max_examples=300, deadline=None)
def test_any_bytes_are_a_payload_or_a_protocol_error(
    one: Codec, shape: tuple[int, ...], seed: int, data: st.DataObject
) -> None:
    """A payload that was tampered with is refused by name, or decodes to numbers."""
    gradient = next(gradients(seed, shape))
    encoded, _ = one.encode(dense(gradient), one.start(shape), seed)
    form, payload = to_payload(encoded)
    changed = bytearray(payload.tobytes())
    for _ in range(data.draw(st.integers(0, 3))):
        if changed:
            changed[data.draw(st.integers(0, len(changed) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.sampled_from([0, 0, 0, 1, 5, -1]))
    raw = bytes(changed) + bytes(cut) if cut >= 0 else bytes(changed[:cut])
    fields = [form.count, form.coding, form.coded, form.seed]
    at = data.draw(st.integers(0, 6))
    if at in (0, 2, 3):
        fields[at] = data.draw(st.integers(0, 2**63 - 1) | st.integers(0, 300))
    elif at == 1:
        fields[1] = data.draw(st.sampled_from(["", "u16", "gaps", "bitmap", "zip"]))
    received = np.frombuffer(raw, np.uint8)
    try:
        arrived = from_payload(encoded.chain.text, Form(*fields), received, shape)
        values = arrived.chain.decode(arrived.packed, BACKENDS[-1]).values
    except ProtocolError:
        return
    assert values.dtype == np.float32
    assert values.size == gradient.size


@pytest.mark.parametrize("text", ["int9", "int8+int8", "zstd+int8", "int8+ef", "x" * 201, ""])
def test_a_chain_that_is_none_is_a_protocol_error(text: str) -> None:
    with pytest.raises(ProtocolError, match=r"codec|characters"):
        from_payload(text, Form(1, "", 0, 0), np.zeros(8, np.uint8), (1,))
