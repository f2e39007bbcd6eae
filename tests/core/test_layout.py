"""Keys, blocks and groups: every element in one block, through splits, removals and repeats."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import Model, models, placed

from zkv.dtypes import DTYPES
from zkv.errors import KeyMismatch, ProtocolError, UnknownKey
from zkv.layout import (
    Layout,
    check_key,
    check_spec,
    differences,
    size_of,
    unknown_key,
    whole,
)
from zkv.wire import MODEL, BlockSpec, KeyEntry, KeySpec, Segment


def elements(layout: Layout) -> Counter[tuple[int, int]]:
    """How often each element of each key lies in a block."""
    return Counter(
        (segment.kid, at)
        for block in layout.blocks.values()
        for segment in block.segments
        for at in range(segment.start, segment.stop)
    )


def expected_elements(model: Model) -> Counter[tuple[int, int]]:
    return Counter((e.kid, at) for e in model.own for at in range(size_of(e.spec)))


def consistent(layout: Layout) -> None:
    for kid, bids in layout.blocks_of_key.items():
        assert len(set(bids)) == len(bids)
        for bid in bids:
            assert kid in layout.blocks[bid].kids
    for block in layout.blocks.values():
        assert block.size == sum(segment.stop - segment.start for segment in block.segments)
        assert layout.block_bytes(block) == block.size * layout.dtype(block).itemsize
        for kid in block.kids:
            assert block.bid in layout.blocks_of_key[kid]
    for kid in layout.blocks_of_key:
        assert list(layout.blocks_with(kid)) == layout.blocks_for([kid])
    assert layout.entries.keys() == layout.group_of.keys() == layout.blocks_of_key.keys()
    assert set(layout.kid_of.values()) == set(layout.entries)


@given(model=models())
def test_every_element_of_every_key_lies_in_exactly_one_block(model: Model) -> None:
    layout = model.layout
    assert elements(layout) == expected_elements(model)
    consistent(layout)
    for block in layout.blocks.values():
        assert len({layout.entries[kid].spec.dtype for kid in block.kids}) == 1
        assert 0 <= block.server < model.servers
    for entry in model.entries:
        assert layout.kid(entry.spec.key) == entry.kid
    assert layout.kids_in(MODEL) == sorted(e.kid for e in model.own)
    assert layout.blocks_in(MODEL) == sorted(layout.blocks.values(), key=lambda b: b.bid)


@given(model=models())
def test_adding_the_same_again_changes_nothing(model: Model) -> None:
    layout = model.layout
    layout.add(model.entries, model.blocks)
    assert layout == model.layout


@given(model=models(), data=st.data())
def test_a_key_that_leaves_its_bucket_keeps_its_elements_and_server(
    model: Model, data: st.DataObject
) -> None:
    layout = model.layout
    chosen = data.draw(st.lists(st.sampled_from([e.kid for e in model.own]), unique=True))
    for number, kid in enumerate(chosen, start=1):
        before = layout.blocks_for([kid])
        layout.regroup(kid, number, 1000 + number)
        after = layout.blocks_for([kid])
        assert {block.server for block in after} == {block.server for block in before}
        assert all(block.kids == [kid] for block in after)
        assert [s for b in after for s in b.segments] == [
            s for b in before for s in b.segments if s.kid == kid
        ]
        assert layout.kids_in(number) == [kid]
        assert layout.blocks_in(number) == after
        assert elements(layout) == expected_elements(model)
        consistent(layout)
        again = layout.snapshot()
        layout.regroup(kid, number, 2000 + number)
        assert layout.snapshot() == again
    assert layout.kids_in(MODEL) == sorted(e.kid for e in model.own if e.kid not in chosen)


@given(first=models(), second=models())
def test_removing_an_initialisation_leaves_the_others_as_they_were(
    first: Model, second: Model
) -> None:
    layout = first.layout
    alone = layout.snapshot()
    # The second initialisation has other keys and numbers, as the broker gives them out.
    entries = [
        KeyEntry(e.kid + 10_000, KeySpec(f"2/{e.spec.key!r}", e.spec.dtype, e.spec.shape))
        for e in second.own
    ]
    blocks = [
        BlockSpec(
            b.bid + 10_000, b.server, [Segment(s.kid + 10_000, s.start, s.stop) for s in b.segments]
        )
        for b in second.blocks
    ]
    layout.add(entries, blocks)
    assert len(layout.blocks) == len(first.blocks) + len(second.blocks)
    consistent(layout)
    layout.remove([entry.kid for entry in entries])
    assert layout == alone
    layout.clear()
    assert layout == Layout()


@given(model=models())
def test_a_snapshot_stays_as_it_is(model: Model) -> None:
    layout = model.layout
    copy = layout.snapshot()
    assert layout.snapshot() is copy
    kid = model.own[0].kid
    layout.regroup(kid, 1, 999)
    assert copy == model.layout
    assert layout.snapshot() is not copy


def test_0_d_and_empty_keys_have_a_place_like_all_others() -> None:
    specs = [
        KeySpec("scalar", "float32", ()),
        KeySpec("empty", "float32", (3, 0)),
        KeySpec("none", "int8", (0,)),
    ]
    assert [size_of(spec) for spec in specs] == [1, 0, 0]
    for bucket_bytes in (0, 1000):
        layout = placed(specs, 2, bucket_bytes=bucket_bytes).layout
        assert all(layout.blocks_of_key[kid] for kid in (0, 1, 2))
        layout.regroup(1, 5, 50)
        assert [block.size for block in layout.blocks_in(5)] == [0]
    assert size_of(KeySpec("huge", "int8", (2**32, 2**32))) == 2**64


@pytest.mark.parametrize(
    ("entries", "blocks", "text"),
    [
        ([], [BlockSpec(9, 0, [whole(7, 1)])], "in no key"),
        ([], [BlockSpec(9, 0, [Segment(0, 2, 5)])], "in no key"),
        ([], [BlockSpec(9, 0, [Segment(0, 3, 2)])], "in no key"),
        ([KeyEntry(0, KeySpec("other", "float32", (4,)))], [], "is 'k' already"),
        ([KeyEntry(1, KeySpec("k", "float32", (4,)))], [], "no number of its own"),
        ([KeyEntry(8, KeySpec("tie", "float32", (4,), same_as="x"))], [], "no number of its own"),
    ],
    ids=str,
)
def test_what_contradicts_the_layout_is_refused_and_changes_nothing(
    entries: list[KeyEntry], blocks: list[BlockSpec], text: str
) -> None:
    model = placed([KeySpec("k", "float32", (4,))], 1)
    layout = model.layout
    with pytest.raises(ProtocolError, match=text):
        layout.add(entries, blocks)
    assert layout == model.layout


def test_unknown_numbers_are_refused() -> None:
    layout = placed([KeySpec("k", "float32", (4,))], 1).layout
    with pytest.raises(ProtocolError, match="there is no key number 5"):
        layout.blocks_for([0, 5])
    for kid, bid in ((5, 9), (0, 0)):
        with pytest.raises(ProtocolError, match=f"key number {kid} cannot move into block {bid}"):
            layout.regroup(kid, 1, bid)


# --- keys ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "key", ["k", " ", "7", "\U0001f511", "x" * 255, "\u00e9" * 127, 0, 7, 2**63 - 1], ids=repr
)
def test_good_keys(key: str | int) -> None:
    assert check_key(key) == key
    assert type(check_key(key)) is type(key)


@pytest.mark.parametrize(
    "key", [True, False, 1.0, None, b"k", ("k",), np.int64(7), ["k"]], ids=repr
)
def test_other_types_are_no_keys(key: object) -> None:
    with pytest.raises(TypeError, match=f"a key is a str or an int, not {type(key).__name__}"):
        check_key(key)


@pytest.mark.parametrize(
    ("key", "text"),
    [
        (-1, "outside of 0"),
        (2**63, "outside of 0"),
        ("", "has 0 bytes"),
        ("x" * 256, "has 256 bytes in UTF-8; allowed are 1 to 255"),
        ("\u00e9" * 128, "has 256 bytes"),
        ("\ud800", "not valid Unicode: surrogates not allowed"),
    ],
    ids=repr,
)
def test_bad_keys_are_named(key: str | int, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        check_key(key)


@given(st.text(max_size=300) | st.integers())
def test_a_key_is_good_or_refused(key: str | int) -> None:
    try:
        good = check_key(key)
    except ValueError:
        if isinstance(key, int):
            assert not 0 <= key < 2**63
        else:
            assert not 1 <= len(key.encode("utf-8", "surrogatepass")) <= 255 or any(
                0xD800 <= ord(char) < 0xE000 for char in key
            )
    else:
        assert good == key


def test_the_integer_7_and_the_text_7_are_two_keys() -> None:
    layout = placed([KeySpec(7, "float32", (1,)), KeySpec("7", "float32", (2,))], 1).layout
    assert layout.kid(7) != layout.kid("7")
    alone = placed([KeySpec(7, "float32", (1,))], 1).layout
    with pytest.raises(UnknownKey, match="unknown key '7'; there is a key 7, but str and int keys"):
        alone.kid("7")
    text = placed([KeySpec("7", "float32", (1,))], 1).layout
    with pytest.raises(UnknownKey, match="unknown key 7; there is a key '7', but int and str keys"):
        text.kid(7)


def test_an_unknown_key_names_some_that_are_known() -> None:
    assert unknown_key("x", "abcdefg") == (
        "unknown key 'x'; initialised are 'a', 'b', 'c', 'd', 'e', ..."
    )
    assert unknown_key("x", []).endswith("nothing was initialised yet: call init first")


# --- specs -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        (KeySpec("k", "object", (1,)), "dtype 'object' does not travel"),
        (KeySpec("k", "f4,f4", (1,)), "dtype 'f4,f4' does not travel"),
        (KeySpec("k", "float32", (1,), reduce="max"), "reduce 'max' is none of"),
        (KeySpec("k", "int32", (1,), reduce="mean"), "a mean of int32 would lose fractions"),
        (KeySpec("k", "float32", (1,), absent="skip"), "absent 'skip' is none of"),
        (KeySpec("k", "float32", (2**32, 2**32)), r"more than 2\*\*48 bytes"),
        (KeySpec("k", "int8", (2**63 - 1,) * 32), r"more than 2\*\*48 bytes"),
        (KeySpec("", "float32", (1,)), "has 0 bytes"),
        (KeySpec("\u00e9" * 128, "float32", (1,)), "has 256 bytes"),
    ],
    ids=str,
)
def test_a_spec_that_cannot_be_is_refused(spec: KeySpec, text: str) -> None:
    with pytest.raises(KeyMismatch, match=text):
        check_spec(spec)


@pytest.mark.parametrize("dtype", list(DTYPES))
def test_every_dtype_may_be_a_key(dtype: str) -> None:
    check_spec(KeySpec("k", dtype, (2, 0, 3)))


def test_differences_name_both_sides() -> None:
    one = KeySpec("k", "float32", (2, 3), rule="adam")
    assert differences(one, one) == ""
    two = KeySpec("k", "float64", (3, 2), rule="sgd", allow_nan=True)
    text = differences(one, two)
    assert "shape is (2, 3), given (3, 2)" in text
    assert "dtype is 'float32', given 'float64'" in text
    assert "rule is 'adam', given 'sgd'" in text
    assert "allow_nan is False, given True" in text
