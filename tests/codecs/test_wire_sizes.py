"""What travels of each codec, to the byte: values, scales, positions and header apart.

The formulas are those of the table of codecs (docs/codecs.md), written here once more in plain
arithmetic, so that neither `sizes()` nor the sections of a payload can drift from them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import pytest
from msgspec import structs

from zkv import data_messages as d
from zkv.dtypes import Array
from zkv.wire import ContributionId
from zkv_codecs.backend import NUMPY
from zkv_codecs.feedback import Encoded
from zkv_codecs.frames import from_payload, to_payload
from zkv_codecs.packed import dense
from zkv_codecs.spec import codec

SIZES = (0, 1, 2, 255, 256, 257, 1000, 4096, 100_000)


def up(dividend: int, divisor: int) -> int:
    """⌈dividend / divisor⌉"""
    return (dividend + divisor - 1) // divisor


def share(n: int, one_of: int) -> int:
    """max(1, ⌈n / one_of⌉), and nothing of nothing."""
    return max(1, up(n, one_of)) if n else 0


Bytes = Callable[[int], int]
DENSE: dict[str, tuple[Bytes, Bytes]] = {
    "none": (lambda n: 4 * n, lambda n: 0),
    "fp16": (lambda n: 2 * n, lambda n: 0),
    "bf16": (lambda n: 2 * n, lambda n: 0),
    "sfp16": (lambda n: 2 * n, lambda n: 8 * up(n, 1024)),
    "sfp16:64": (lambda n: 2 * n, lambda n: 8 * up(n, 64)),
    "fp8_e4m3": (lambda n: n, lambda n: 4 * up(n, 256)),
    "fp8_e5m2:4096": (lambda n: n, lambda n: 4 * up(n, 4096)),
    "int8": (lambda n: n, lambda n: 4 * up(n, 256)),
    "int8:4096": (lambda n: n, lambda n: 4 * up(n, 4096)),
    "int4": (lambda n: up(n, 2), lambda n: 4 * up(n, 256)),
    "uint8": (lambda n: n, lambda n: 8 * up(n, 256)),
    "qsgd:127": (lambda n: n, lambda n: 4 * up(n, 512)),
    "qsgd:12:128": (lambda n: n, lambda n: 4 * up(n, 128)),
    "natural": (lambda n: n, lambda n: 0),
    "ternary": (lambda n: up(n, 4), lambda n: 4 * up(n, 256)),
    "onebit": (lambda n: up(n, 8), lambda n: 4 * up(n, 256)),
    "twomeans": (lambda n: up(n, 8), lambda n: 8 * up(n, 256)),
    "majority": (lambda n: up(n, 8), lambda n: 0),
    "mx1bit": (lambda n: up(n, 8), lambda n: 0),
    "mx2bit:0.5": (lambda n: up(n, 4), lambda n: 0),
    "powersgd:4": (lambda n: 4 * n, lambda n: 0),
    "randomk:0.01": (lambda n: 4 * share(n, 100), lambda n: 0),
    "randomk:0.01+int8": (lambda n: share(n, 100), lambda n: 4 * up(share(n, 100), 256)),
}
"""Bytes of values and of scales for n elements; no positions travel."""

WITHOUT = ("none", "majority", "mx1bit", "mx2bit:0.5")
"""Those that take no error feedback."""

SPARSE: dict[str, tuple[Bytes, Bytes, Bytes]] = {
    "topk:0.01": (lambda n: share(n, 100), lambda k: 4 * k, lambda k: 0),
    "topk:0.25": (lambda n: share(n, 4), lambda k: 4 * k, lambda k: 0),
    "topk:1": (lambda n: n, lambda k: 4 * k, lambda k: 0),
    "topk:0.01+fp16": (lambda n: share(n, 100), lambda k: 2 * k, lambda k: 0),
    "topk:0.01+int8": (lambda n: share(n, 100), lambda k: k, lambda k: 4 * up(k, 256)),
    "topk:0.25+int4": (lambda n: share(n, 4), lambda k: up(k, 2), lambda k: 4 * up(k, 256)),
    "topk:0.25+onebit": (lambda n: share(n, 4), lambda k: up(k, 8), lambda k: 4 * up(k, 256)),
}
"""How many of n elements are sent, and bytes of values and of scales for so many; and positions."""

BY_THE_DATA: dict[str, Callable[[Array], int]] = {
    "threshold:0.5": lambda x: int((np.abs(x) >= 0.5).sum()),
    "threshold:9": lambda x: int((np.abs(x) >= 9).sum()),
}
"""How many of these elements are sent, with positions; four bytes for each value."""


def coded(positions: Iterable[int], n: int) -> dict[str, int]:
    """Bytes that k positions below n take in each of the four codings."""
    chosen = list(positions)
    k = len(chosen)
    if not k:
        return dict.fromkeys(("u16", "bitmap", "gaps", "elias_fano"), 0)
    gaps = [at - before - 1 for before, at in zip([-1, *chosen], chosen, strict=False)]
    parts = [gaps[at : at + 128] for at in range(0, k, 128)]
    packed = sum(len(part) * max(part).bit_length() for part in parts)
    low = (n // k).bit_length() - 1
    return {
        "u16": 4 * up(n, 65536) + 2 * k,
        "bitmap": up(n, 8),
        "gaps": len(parts) + up(packed, 8),
        "elias_fano": up(k * low, 8) + up(k + n // 2**low + 1, 8),
    }


def sent(text: str, x: Array) -> tuple[Encoded, d.Form, Array]:
    """What a codec sends of x: its parts, the form in the header, and the payload."""
    made = codec(text)
    encoded, _ = made.encode(dense(x), made.start(x.shape), 7, NUMPY)
    form, payload = to_payload(encoded, NUMPY)
    from_payload(encoded.chain.text, form, payload, x.shape, NUMPY)
    return encoded, form, payload


def parts(encoded: Encoded, form: d.Form) -> tuple[int, int, int]:
    """Bytes of values, scales and positions."""
    packed = encoded.packed
    scales = 0 if packed.scales is None else packed.scales.nbytes
    return packed.values.nbytes, scales, form.coded


def normal(*shape: int) -> Array:
    return np.random.default_rng(5).standard_normal(shape, np.float32)


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize(
    ("text", "memory"),
    [(text, "") for text in DENSE] + [(text, "+ef") for text in DENSE if text not in WITHOUT],
)
def test_codecs_without_positions(text: str, memory: str, n: int) -> None:
    encoded, form, payload = sent(text + memory, normal(n))
    values, scales = (formula(n) for formula in DENSE[text])
    assert parts(encoded, form) == (values, scales, 0)
    assert payload.nbytes == values + scales


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("text", SPARSE)
@pytest.mark.parametrize("memory", ["", "+ef"])
def test_codecs_with_positions(text: str, memory: str, n: int) -> None:
    x = normal(n)
    encoded, form, payload = sent(text + memory, x)
    count, values, scales = SPARSE[text]
    k = count(n)
    largest = np.sort(np.argsort(-np.abs(x), kind="stable")[:k])
    positions = min(coded(largest.tolist(), n).values())
    assert parts(encoded, form) == (values(k), scales(k), positions)
    assert payload.nbytes == values(k) + scales(k) + positions
    assert coded(largest.tolist(), n)[form.coding] == positions


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("text", BY_THE_DATA)
def test_codecs_that_send_as_many_as_the_data_say(text: str, n: int) -> None:
    x = normal(n)
    encoded, form, payload = sent(text, x)
    k = BY_THE_DATA[text](x)
    assert encoded.packed.indices is not None
    positions = min(coded(encoded.packed.indices.tolist(), n).values())
    assert parts(encoded, form) == (4 * k, 0, positions)
    assert payload.nbytes == 4 * k + positions


@pytest.mark.parametrize("n", SIZES)
def test_a_sampled_top_k_sends_no_more_than_k(n: int) -> None:
    encoded, form, payload = sent("topk_sampled:0.01", normal(n))
    assert encoded.packed.indices is not None
    chosen = encoded.packed.indices.tolist()
    assert len(chosen) <= share(n, 100)
    positions = min(coded(chosen, n).values())
    assert parts(encoded, form) == (4 * len(chosen), 0, positions)
    assert payload.nbytes == 4 * len(chosen) + positions


@pytest.mark.parametrize(
    ("rows", "columns", "expected"),
    [(400, 250, 4 * 4 * (400 + 250)), (16, 16, 4 * 256), (17, 16, 4 * 4 * 33), (1, 9, 4 * 9)],
)
def test_low_rank_sends_two_factors_if_they_are_smaller_by_half(
    rows: int, columns: int, expected: int
) -> None:
    """8 · (16 + 16) is not below 16 · 16, and 8 · (17 + 16) is below 17 · 16."""
    encoded, form, payload = sent("powersgd:4", normal(rows, columns))
    assert parts(encoded, form) == (expected, 0, 0)
    assert payload.nbytes == expected


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("text", ["zstd", "lz4", "int8+zstd"])
def test_a_lossless_stage_is_as_long_as_the_data_say_and_leaves_scales_alone(
    text: str, n: int
) -> None:
    pytest.importorskip("zstandard")
    pytest.importorskip("lz4")
    encoded, form, payload = sent(text, normal(n))
    scales = 4 * up(n, 256) if text.startswith("int8") else 0
    values = payload.nbytes - scales
    assert parts(encoded, form) == (values, scales, 0)
    assert values <= (n if scales else 4 * n) + 64 + n // 64


def integer(value: int) -> int:
    """Bytes of an unsigned integer in msgpack."""
    return next(size for size, top in ((1, 7), (2, 8), (3, 16), (5, 32), (9, 64)) if value < 2**top)


def string(text: str) -> int:
    """Bytes of a short text in msgpack."""
    return len(text) + (1 if len(text) < 32 else 2)


@pytest.mark.parametrize("text", ["none", *DENSE, *SPARSE, *BY_THE_DATA, "topk_sampled:0.01"])
@pytest.mark.parametrize("n", [0, 1000, 100_000])
def test_the_header_is_msgpack_and_stands_beside_the_payload(text: str, n: int) -> None:
    """[version, [tag, [incarnation, group, batch], grant, block, codec, log index, form, weight,
    placement, of]], where the form is [count, coding, bytes of positions, seed]; each array begins
    with one byte; a weight takes nine, or one if it is not named, and so does what is no sum."""
    encoded, form, _ = sent(text, normal(n))
    name, grant, bid, index = ContributionId(3, 0, 70_000), 200, 40, 300
    push = d.Push(name, grant, bid, encoded.chain.text, index, form)
    numbers = (1, 2, 3, 0, 70_000, grant, bid, index, form.count, form.coded, form.seed, 0)
    texts = (encoded.chain.text, form.coding)
    arrays = 4
    rest = arrays + sum(map(integer, numbers)) + sum(map(string, texts))
    assert len(d.encode_data(push)) == rest + 1 + 1
    assert len(d.encode_data(structs.replace(push, weight=32.0))) == rest + 9 + 1 < 100


def test_one_percent_with_halves_is_under_eight_thousandths_of_what_is_dense() -> None:
    """16 bits of value and 8.57 of position for one element of a hundred: 0.2457 bits each."""
    n = 1_000_000
    encoded, form, payload = sent("topk:0.01+fp16+ef", normal(n))
    assert parts(encoded, form)[:2] == (2 * 10_000, 0)
    assert form.coding == "elias_fano"
    assert payload.nbytes / (4 * n) < 0.008
    assert 8 * payload.nbytes / n == pytest.approx(0.2457, abs=5e-4)
