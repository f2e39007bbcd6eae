"""Codings of positions: they come back, take what they say, and no bytes break a decoder."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from zkv.dtypes import Array
from zkv.errors import ProtocolError
from zkv_codecs.backend import NUMPY, Backend
from zkv_codecs.indices import CODINGS, best, decode, encode, size
from zkv_codecs.packed import ELEMENTS_MAX

needs_numba = pytest.mark.skipif(not importlib.util.find_spec("numba"), reason="needs numba")
NUMBA = Backend("numba")
backends = pytest.mark.parametrize(
    "backend", [NUMPY, pytest.param(NUMBA, marks=needs_numba)], ids=lambda backend: backend.name
)
codings = pytest.mark.parametrize("coding", CODINGS)

VECTOR = np.array([3, 4, 7, 13, 14, 15, 21, 43], np.uint32)

extents = (
    st.sampled_from([0, 1, 7, 8, 9, 128, 129, 65535, 65536, 65537, 131073])
    | st.integers(0, 300)
    | st.integers(0, 200_000)
)
far = st.integers(ELEMENTS_MAX - 70_000, ELEMENTS_MAX)


def as_indices(positions: set[int]) -> Array:
    return np.array(sorted(positions), np.uint32)


@st.composite
def sets(draw: st.DrawFn, extent: st.SearchStrategy[int] = extents) -> tuple[Array, int]:
    """Any indices below any n: none, a few, a run, a share, all but a few, all."""
    n = draw(extent)
    few = as_indices(draw(st.sets(st.integers(0, n - 1), max_size=20))) if n else VECTOR[:0]
    sort = draw(st.sampled_from(["few", "run", "share", "all but few", "all"]))
    if sort == "few" or (n > 200_000 and sort != "run"):
        return few, n
    if sort == "run":
        start = draw(st.integers(0, n))
        length = draw(st.integers(0, min(n - start, 1000)))
        return np.union1d(few, np.arange(start, start + length, dtype=np.uint32)), n
    every = np.arange(n, dtype=np.uint32)
    if sort == "all":
        return every, n
    if sort == "all but few":
        return np.delete(every, few), n
    chance = np.random.default_rng(draw(st.integers(0, 2**32)))
    return every[chance.random(n) < draw(st.floats(0, 0.2))], n


def is_valid(indices: Array, k: int, n: int) -> bool:
    return (
        indices.dtype == np.uint32
        and indices.size == k
        and bool(np.all(indices < n))
        and bool(np.all(np.diff(indices.astype(np.int64)) > 0))
    )


@backends
@codings
@given(case=sets())
@example(case=(VECTOR[:0], 0))
@example(case=(VECTOR, 44))
def test_indices_come_back(backend: Backend, coding: str, case: tuple[Array, int]) -> None:
    indices, n = case
    data = encode(coding, indices, n, backend)
    assert data.dtype == np.uint8
    assert data.size == size(coding, indices, n, backend)
    again = decode(coding, data, indices.size, n, backend)
    assert again.dtype == np.uint32
    assert np.array_equal(again, indices)
    assert data.tobytes() == encode(coding, indices, n, NUMPY).tobytes()


@backends
@pytest.mark.parametrize("coding", ["u16", "gaps", "elias_fano"])
@given(case=sets(far))
@example(case=(np.array([ELEMENTS_MAX - 1], np.uint32), ELEMENTS_MAX))
@example(case=(np.array([0, ELEMENTS_MAX - 1], np.uint32), ELEMENTS_MAX))
def test_indices_near_the_largest_come_back(
    backend: Backend, coding: str, case: tuple[Array, int]
) -> None:
    """A bitmap of these would be 256 MiB; it is the same code at every size."""
    indices, n = case
    data = encode(coding, indices, n, backend)
    assert data.size == size(coding, indices, n, backend)
    assert np.array_equal(decode(coding, data, indices.size, n, backend), indices)


@backends
@given(case=sets())
def test_the_best_coding_is_the_smallest_and_of_equals_the_simplest(
    backend: Backend, case: tuple[Array, int]
) -> None:
    indices, n = case
    sizes = {coding: size(coding, indices, n, backend) for coding in CODINGS}
    chosen = best(indices, n, backend)
    assert chosen == best(indices, n, NUMPY)
    assert sizes[chosen] == min(sizes.values())
    assert all(sizes[coding] > sizes[chosen] for coding in CODINGS[: CODINGS.index(chosen)])


@backends
def test_the_pages_vector(backend: Backend) -> None:
    """[3, 4, 7, 13, 14, 15, 21, 43] of 44: gaps 3, 0, 2, 5, 0, 0, 5, 21 in five bits each."""
    gaps = sum(gap << 5 * i for i, gap in enumerate([3, 0, 2, 5, 0, 0, 5, 21]))
    lower = sum(low << 2 * i for i, low in enumerate([3, 0, 3, 1, 2, 3, 1, 3]))
    upper = sum(int(bit) << i for i, bit in enumerate("10110011100100000100"))
    bitmap = sum(1 << index for index in VECTOR.tolist())
    expected = {
        "u16": np.array([8], "<u4").tobytes() + VECTOR.astype("<u2").tobytes(),
        "bitmap": bitmap.to_bytes(6, "little"),
        "gaps": bytes([5]) + gaps.to_bytes(5, "little"),
        "elias_fano": lower.to_bytes(2, "little") + upper.to_bytes(3, "little"),
    }
    for coding in CODINGS:
        assert encode(coding, VECTOR, 44, backend).tobytes() == expected[coding]
    assert best(VECTOR, 44, backend) == "elias_fano"


@backends
def test_sizes_on_the_page(backend: Backend) -> None:
    """Bits per index of 1 % of 24.97 M elements: 16.05, 100, about 9.6, 8.56."""
    n = 24_970_000
    chance = np.random.default_rng(0)
    indices = np.flatnonzero(chance.random(n, np.float32) < 0.01)[:249_000].astype(np.uint32)
    bits = {coding: 8 * size(coding, indices, n, backend) / indices.size for coding in CODINGS}
    assert bits["u16"] == pytest.approx(16.05, abs=0.005)
    assert bits["bitmap"] == pytest.approx(100, abs=0.5)
    assert bits["gaps"] == pytest.approx(9.6, abs=0.05)
    assert bits["elias_fano"] == pytest.approx(8.56, abs=0.02)


@pytest.mark.parametrize(
    ("k", "n", "coding"),
    [
        (0, 10**6, "u16"),
        (4, 4, "bitmap"),
        (128, 128, "gaps"),
    ],
)
def test_what_is_chosen_at_the_edges(k: int, n: int, coding: str) -> None:
    assert best(np.arange(k, dtype=np.uint32), n) == coding


# --- what a peer may send ----------------------------------------------------------------------


def outcome(coding: str, data: bytes, k: int, n: int, backend: Backend) -> list[int] | str:
    try:
        indices = decode(coding, data, k, n, backend)
    except ProtocolError as error:
        return str(error)
    assert is_valid(indices, k, n)
    return indices.tolist()


def arbitrary(chance: np.random.Generator, coding: str) -> Iterator[tuple[bytes, int, int]]:
    """Bytes by chance, of the right length and of others; and good ones, broken by chance."""
    for _ in range(600):
        n = int(chance.integers(0, 2 ** chance.integers(1, 18)))
        k = int(chance.integers(0, min(n, 300) + 1))
        indices = np.sort(chance.choice(n, k, replace=False)).astype(np.uint32)
        good = encode(coding, indices, n)
        yield chance.bytes(good.size), k, n
        yield chance.bytes(int(chance.integers(0, 40))), k, n
        yield good.tobytes(), int(chance.integers(-1, n + 2)), n
        yield good.tobytes(), k, int(chance.integers(-1, 2**31 + 1))
        if good.size:
            bad = good.copy()
            bad[chance.integers(0, bad.size)] ^= 1 << chance.integers(0, 8)
            yield bad.tobytes(), k, n
            yield np.roll(good, 1).tobytes(), k, n
            yield good[: chance.integers(0, good.size)].tobytes(), k, n
            yield good.tobytes() + b"\0", k, n
            yield bytes(good.size), k, n
            yield b"\xff" * good.size, k, n


@needs_numba
@codings
def test_any_bytes_are_indices_or_a_protocol_error(coding: str) -> None:
    """No other exception, no index that is none, and the same answer from all kernels."""
    chance = np.random.default_rng(11)
    fine = 0
    for data, k, n in arbitrary(chance, coding):
        given_ = outcome(coding, data, k, n, NUMPY)
        assert outcome(coding, data, k, n, NUMBA) == given_
        if not isinstance(given_, str) and k:
            fine += 1
            # There is one way to write indices, but for widths that are wider than needed.
            if coding != "gaps":
                assert encode(coding, np.array(given_, np.uint32), n).tobytes() == data
    assert fine > 50


@backends
@codings
@given(data=st.binary(max_size=24), k=st.integers(0, 40), n=st.integers(0, 200))
def test_small_bytes_are_indices_or_a_protocol_error(
    backend: Backend, coding: str, data: bytes, k: int, n: int
) -> None:
    outcome(coding, data, k, n, backend)


def spoilt(coding: str, at: int, value: int) -> bytes:
    data = encode(coding, VECTOR, 44)
    data[at] = value
    return data.tobytes()


@backends
@pytest.mark.parametrize(
    ("coding", "data", "text"),
    [
        ("u16", bytes(19), "20 bytes for 8 of 44 elements, not 19"),
        ("u16", spoilt("u16", 0, 9), "counts add up to 9, not to 8"),
        ("u16", spoilt("u16", 3, 255), "counts add up to 4278190088, not to 8"),
        ("u16", spoilt("u16", 6, 3), "not strictly ascending below 44"),
        ("u16", spoilt("u16", 18, 44), "not strictly ascending below 44"),
        ("bitmap", spoilt("bitmap", 0, 0), "8 bits set, not 5"),
        ("bitmap", spoilt("bitmap", 5, 0x18), "0 in the 4 bits of padding, not 1"),
        ("gaps", b"", "1 widths for k = 8, not 0 bytes"),
        ("gaps", spoilt("gaps", 0, 33), "widths of at most 32 bits, not 33"),
        ("gaps", spoilt("gaps", 0, 6), "7 bytes for 8 of 44 elements, not 6"),
        ("gaps", spoilt("gaps", 5, 0xFF), "all below 44, not up to 77"),
        ("elias_fano", bytes(6), "5 bytes for 8 of 44 elements, not 6"),
        ("elias_fano", spoilt("elias_fano", 2, 0xFF), "8 bits set, not 11"),
        ("elias_fano", spoilt("elias_fano", 4, 0x12), "0 in the 4 bits of padding, not 1"),
        ("elias_fano", spoilt("elias_fano", 4, 0x08), "not strictly ascending below 44"),
        ("elias_fano", spoilt("elias_fano", 0, 0xFF), "not strictly ascending below 44"),
        ("varint", b"", "index coding 'varint': choose one of u16, bitmap, gaps, elias_fano"),
    ],
)
def test_a_protocol_error_says_what_was_expected(
    backend: Backend, coding: str, data: bytes, text: str
) -> None:
    with pytest.raises(ProtocolError, match=text):
        decode(coding, data, 8, 44, backend)


@backends
def test_gaps_may_not_go_round(backend: Backend) -> None:
    """Two gaps of 2**32 − 1 end at −1 modulo 2**32: the sum is not taken in 32 bits."""
    data = bytes([32]) + b"\xff" * 8 + b"\0" * 4
    with pytest.raises(ProtocolError, match=f"all below 44, not up to {2**33}"):
        decode("gaps", data, 3, 44, backend)


@pytest.mark.parametrize(("k", "n"), [(-1, 5), (6, 5), (0, -1), (1, 2**31)])
def test_counts_that_cannot_be_are_refused(k: int, n: int) -> None:
    with pytest.raises(ProtocolError, match=f"{k} indices below {n}: want 0 ≤ k ≤ n"):
        decode("gaps", b"", k, n)


@backends
@codings
def test_bytes_at_an_odd_address_are_read(backend: Backend, coding: str) -> None:
    """Small frames lie anywhere within a received buffer, read-only."""
    data = encode(coding, VECTOR, 44)
    for shift in range(1, 4):
        frame = np.frombuffer(bytes(shift) + data.tobytes(), np.uint8)[shift:]
        assert np.array_equal(decode(coding, frame, 8, 44, backend), VECTOR)


# --- what a caller may give --------------------------------------------------------------------

LARGE = [16_777_217, 59_000_001, 2**31 - 2]


@backends
@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint32, np.uint64])
def test_large_row_numbers_are_exact(backend: Backend, dtype: type) -> None:
    """D18: numbers above 2**24 arrive as they are, whatever integers they came in."""
    indices = np.array(LARGE, dtype)
    for coding in ("u16", "gaps", "elias_fano"):
        data = encode(coding, indices, ELEMENTS_MAX, backend)
        assert decode(coding, data, 3, ELEMENTS_MAX, backend).tolist() == LARGE


@backends
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_indices_that_are_floats_are_refused(backend: Backend, dtype: type) -> None:
    """D18: a float32 would have lost the last digits before anybody could see it."""
    with pytest.raises(TypeError, match=f"integers, not {np.dtype(dtype)}"):
        encode("gaps", np.array(LARGE, dtype), ELEMENTS_MAX, backend)


@backends
@pytest.mark.parametrize(
    ("indices", "n", "text"),
    [
        ([-1, 3], 44, r"indices from -1 to 3: they must be in \[0, 44\)"),
        ([3, 44], 44, r"indices from 3 to 44: they must be in \[0, 44\)"),
        ([2**31 + 5], 2**32, "n is at most 2147483647; cut the array"),
        ([2**31 + 5], ELEMENTS_MAX, r"they must be in \[0, 2147483647\)"),
        ([3, 3], 44, "strictly ascending"),
        ([4, 3], 44, "strictly ascending"),
    ],
)
def test_indices_that_are_none_are_refused(
    backend: Backend, indices: list[int], n: int, text: str
) -> None:
    """D18: negative, out of range, beyond what one array may have, out of order."""
    for coding in CODINGS:
        with pytest.raises(ValueError, match=text):
            encode(coding, np.array(indices, np.int64), n, backend)
    with pytest.raises(ValueError, match=text):
        best(np.array(indices, np.int64), n, backend)


def test_an_unknown_coding_is_the_callers_mistake() -> None:
    for call in (encode, size):
        with pytest.raises(ValueError, match="index coding 'raw': choose one of u16"):
            call("raw", VECTOR, 44)
