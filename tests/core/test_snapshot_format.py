"""The files of a snapshot: what was written is read again, and nothing else is."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs
from safetensors.numpy import load

from zkv import snapshot as sn
from zkv import tensor_file
from zkv.errors import BadSnapshot
from zkv.optimizer_spec import optimizer
from zkv.wire import BlockSpec, KeyEntry, KeySpec, Segment

KINDS = ("float16", "float32", "float64", "uint8", "int64", "uint16")
NAMES = st.text(max_size=8).filter(lambda name: name != tensor_file.METADATA)


@st.composite
def arrays(draw: st.DrawFn) -> dict[str, Any]:
    found = {}
    for name in draw(st.lists(NAMES, unique=True, max_size=5)):
        dtype, size = draw(st.sampled_from(KINDS)), draw(st.integers(0, 9))
        bits = draw(st.binary(min_size=8 * size, max_size=8 * size))
        array = np.frombuffer(bits, np.uint8)[: size * np.dtype(dtype).itemsize].view(dtype)
        found[name] = array.reshape(1, size) if draw(st.booleans()) else array
    return found


def file_of(content: dict[str, Any], **metadata: str) -> bytes:
    return b"".join(bytes(piece) for piece in tensor_file.pieces(content, metadata))


def bits(array: Any) -> tuple[Any, ...]:
    return array.dtype, array.shape, array.tobytes()


@given(content=arrays(), word=st.text(max_size=5))
def test_arrays_come_out_as_they_went_in_and_the_library_reads_the_same(
    content: dict[str, Any], word: str
) -> None:
    data = file_of(content, word=word)
    found, metadata = tensor_file.opened(data, "x")
    assert {n: bits(a) for n, a in found.items()} == {n: bits(a) for n, a in content.items()}
    assert metadata == {"word": word}
    theirs = load(data)
    assert {n: bits(a) for n, a in theirs.items()} == {n: bits(a) for n, a in content.items()}


@given(
    content=arrays(),
    cut=st.integers(0, 40),
    extra=st.binary(max_size=4),
    at=st.integers(0, 200),
    bit=st.integers(0, 7),
)
def test_any_bytes_are_such_a_file_or_are_refused_by_name(
    content: dict[str, Any], cut: int, extra: bytes, at: int, bit: int
) -> None:
    data = bytearray(file_of(content))
    data = data[: max(0, len(data) - cut)] + extra
    if at < len(data):
        data[at] ^= 1 << bit
    why = "folder/server-3"
    try:
        tensor_file.opened(bytes(data), why)
    except BadSnapshot as error:
        why = str(error)
    assert why.startswith("folder/server-3")


def test_what_the_format_has_no_place_for_is_said_before_anything_is_written() -> None:
    for content in ({tensor_file.METADATA: np.zeros(1)}, {"c": np.zeros(1, complex)}):
        with pytest.raises(ValueError, match="cannot be in a safetensors file"):
            file_of(content)


# --- manifests -------------------------------------------------------------------------------

DIGEST = "0" * 64
KEYS = st.text(min_size=1, max_size=20) | st.integers(0, 2**63 - 1)
NUMBERS = st.integers(0, 2**63 - 1)


@st.composite
def manifests(draw: st.DrawFn) -> sn.Manifest:
    names = draw(st.lists(KEYS, unique=True, max_size=4))
    entries = [KeyEntry(kid, KeySpec(key, "float32", (3,))) for kid, key in enumerate(names)]
    blocks = [BlockSpec(kid, kid % 2, [Segment(kid, 0, 3)]) for kid in range(len(names))]
    plain = optimizer("adam:lr=0.1").to_plain()
    number = draw(st.integers(0, 10**8 - 1))
    return sn.Manifest(
        format=sn.FORMAT,
        zkv="0.1.0",
        name=sn.name_of(draw(NUMBERS), number),
        at=draw(st.floats(0, 2e9)),
        version=draw(NUMBERS),
        term=draw(NUMBERS),
        index=draw(NUMBERS),
        settings=sn.Settings("bsp", plain, plain, "none", "none", "none", "servers"),
        inits=[sn.Init(1, entries)],
        blocks=blocks,
        groups=[sn.GroupState(0, list(range(len(names))), 7, [(0, draw(NUMBERS))])],
        pool=draw(st.none() | st.just(sn.PoolState(9, 1, 2, 0, True, 1, 4, [(1, 0, 2)], [], []))),
        next_numbers=(2, 9, 9),
        workers=[sn.WorkerState(0, draw(st.text(max_size=9)), 3, None, "it was slow")],
        servers=[sn.Part(sn.server_file(at), draw(NUMBERS), DIGEST) for at in range(2)],
    )


@given(manifest=manifests())
def test_a_manifest_says_what_it_said_whatever_keys_are_called(manifest: sn.Manifest) -> None:
    data = sn.encode(manifest)
    found = sn.decode(data, "m")
    assert structs.replace(found, checksum="") == manifest
    assert sn.encode(found) == data
    assert all("/" not in part.file for part in found.parts)


@given(manifest=manifests(), cut=st.integers(0, 500), at=NUMBERS, bit=st.integers(0, 7))
def test_a_torn_or_flipped_manifest_is_refused_and_what_to_try_is_said(
    manifest: sn.Manifest, cut: int, at: int, bit: int
) -> None:
    data = bytearray(sn.encode(manifest))
    data[at % len(data)] ^= 1 << bit
    whole = sn.encode(manifest)
    for broken in (bytes(data), whole[: len(whole) - 1 - cut % (len(whole) - 1)], whole + b" "):
        with pytest.raises(BadSnapshot, match=r"(?s)snaps/m.*(zkv snapshot list|install)"):
            sn.decode(broken, "snaps/m")


def of(**changes: Any) -> sn.Manifest:
    entry = KeyEntry(0, KeySpec("w", "float32", (3,)))
    plain = optimizer("sgd:lr=0.1").to_plain()
    made = sn.Manifest(
        sn.FORMAT, "0.1.0", sn.name_of(1, 1), 0.0, 0, 1, 0,
        sn.Settings("bsp", plain, plain, "none", "none", "none", "servers"),
        [sn.Init(1, [entry])], [BlockSpec(0, 0, [Segment(0, 0, 3)])], [], None, (1, 1, 1), [],
        [sn.Part("server-0.safetensors", 5, DIGEST)],
    )  # fmt: skip
    return structs.replace(made, **changes)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"format": 2, "zkv": "9.9"}, "format 2, written by zkv 9.9; this zkv reads format 1"),
        ({"blocks": [BlockSpec(0, 1, [Segment(0, 0, 3)])]}, "blocks in server-1.safetensors"),
        ({"blocks": [BlockSpec(0, 0, [Segment(0, 0, 2)])]}, "has 2 of the 3 elements of key 'w'"),
        ({"blocks": [BlockSpec(0, 0, [Segment(0, 0, 9)])]}, "contradicts itself"),
        ({"servers": [sn.Part("../../x", 5, DIGEST)]}, "no manifest"),
        ({"name": "../../../x"}, "no manifest"),
    ],
)
def test_what_contradicts_itself_is_refused_with_the_reason(
    changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(BadSnapshot) as caught:
        sn.decode(sn.encode(of(**changes)), "m")
    assert words in str(caught.value)


@given(
    numbers=st.sets(st.integers(0, 30), max_size=9), whole=st.sets(st.integers(0, 30), max_size=9)
)
def test_two_whole_ones_stay_and_what_may_be_on_its_way(numbers: set[int], whole: set[int]) -> None:
    there = {sn.name_of(1, one) for one in numbers | whole}
    complete = {sn.name_of(1, one) for one in whole}
    gone = sn.to_remove(there | {"notes.txt", "zkv-x"}, complete)
    left = there - set(gone)
    assert sn.in_order(left & complete) == sn.in_order(complete)[: sn.KEPT]
    newest = max(complete, default="")
    assert left - complete == {one for one in there - complete if one > newest}
    assert set(gone) <= there
