"""Packing: whatever is pushed, in whatever order and memory, comes out bit for bit the same."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import Model, models, placed, values_of

from zkv.dtypes import DTYPES, Array, stored_view, user_view
from zkv.errors import KeyMismatch, UnknownKey
from zkv.layout import size_of
from zkv.wire import BlockSpec, KeyEntry, KeySpec
from zkv_workers import unpacking
from zkv_workers.bucket import ranges
from zkv_workers.model import as_arrays, specs_of
from zkv_workers.packing import Packer, cut
from zkv_workers.unpacking import unpack

ml_dtypes = pytest.importorskip("ml_dtypes")


def shaped(entry: KeyEntry, flat: Array) -> Array:
    return user_view(flat, DTYPES[entry.spec.dtype]).reshape(entry.spec.shape)


def drawn(model: Model, seed: int) -> dict[int, Array]:
    chance = np.random.default_rng(seed)
    return {e.kid: shaped(e, values_of(e.spec, chance)) for e in model.own}


def disguised(array: Array, how: str) -> Array:
    """The same values in other memory: strides, a byte order of another machine, read-only."""
    match how:
        case "fortran":
            return np.asfortranarray(array) if array.ndim else array
        case "strided" if array.ndim:
            wide = np.repeat(array, 2, axis=-1)
            return wide[..., ::2]
        case "reversed" if array.ndim:
            return np.ascontiguousarray(array[::-1])[::-1]
        case "swapped" if array.dtype.name != "bfloat16":
            return array.astype(array.dtype.newbyteorder())
        case "read-only":
            copy = array.copy()
            copy.flags.writeable = False
            return copy
    return array


def pack(
    model: Model, gradients: dict[int, Array], order: Sequence[int]
) -> tuple[Packer, dict[int, Array]]:
    layout = model.layout
    packer = Packer(layout, layout.kids_in(0))
    blocks: dict[int, Array] = {}
    for kid in order:
        for bid, sealed in packer.sealed(packer.add(layout.entries[kid].spec.key, gradients[kid])):
            assert bid not in blocks
            blocks[bid] = sealed.payload
    return packer, blocks


def same(one: Array, two: Array) -> bool:
    little = two.astype(two.dtype.newbyteorder("=")) if not two.dtype.isnative else two
    return (one.dtype, one.shape, one.tobytes()) == (little.dtype, little.shape, little.tobytes())


# --- laws ------------------------------------------------------------------------------------


@given(model=models(), seed=st.integers(0, 2**32 - 1), data=st.data())
def test_what_is_packed_in_any_order_is_unpacked_bit_for_bit(
    model: Model, seed: int, data: st.DataObject
) -> None:
    kinds = st.sampled_from(["plain", "fortran", "strided", "reversed", "swapped", "read-only"])
    gradients = {kid: disguised(g, data.draw(kinds)) for kid, g in drawn(model, seed).items()}
    before = {kid: gradient.tobytes() for kid, gradient in gradients.items()}
    order = data.draw(st.permutations(list(gradients)))
    packer, blocks = pack(model, gradients, order)
    assert packer.rest() == []
    assert packer.skipped() == ()
    assert blocks.keys() == model.layout.blocks.keys()
    back = unpack(model.layout, list(gradients), blocks)
    assert back.keys() == {entry.spec.key for entry in model.entries}
    for entry in model.entries:
        assert same(back[entry.spec.key], gradients[entry.kid])
        assert back[entry.spec.key].flags.writeable
    assert {kid: gradient.tobytes() for kid, gradient in gradients.items()} == before


@given(model=models(), seed=st.integers(0, 2**32 - 1), data=st.data())
def test_keys_that_are_pushed_together_make_the_blocks_of_those_pushed_one_by_one(
    model: Model, seed: int, data: st.DataObject
) -> None:
    kinds = st.sampled_from(["plain", "plain", "fortran", "strided", "swapped", "read-only"])
    gradients = {kid: disguised(g, data.draw(kinds)) for kid, g in drawn(model, seed).items()}
    order = data.draw(st.permutations(list(gradients)))
    cut = data.draw(st.integers(0, len(order)))
    _, expected = pack(model, gradients, order)
    packer = Packer(model.layout, list(gradients))
    pairs = [(model.layout.entries[kid].spec.key, gradients[kid]) for kid in order]
    full = [one for some in (pairs[:cut], pairs[cut:]) for one in packer.add_all(some)]
    found = {bid: sealed.payload for bid, sealed in packer.sealed(full)}
    assert packer.rest() == []
    assert packer.skipped() == ()
    assert found.keys() == expected.keys()
    assert all(same(found[bid], expected[bid]) for bid in found)
    for key, gradient in pairs:
        with pytest.raises(KeyMismatch, match="already pushed"):
            list(packer.add_all([(key, gradient.copy())]))


@pytest.mark.parametrize(
    ("spoilt", "text"),
    [
        (lambda pairs: [*pairs, pairs[0]], "already pushed"),
        (lambda pairs: [(pairs[0][0], pairs[0][1].astype("f8")), *pairs[1:]], "float32 expected"),
        (lambda pairs: [(pairs[0][0], pairs[0][1].reshape(3, 1)), *pairs[1:]], r"\(3,\) expected"),
        (lambda pairs: [(pairs[0][0], [1.0, 1.0, 1.0]), *pairs[1:]], "not list"),
    ],
)
def test_what_is_refused_by_itself_is_refused_in_a_whole_bucket(spoilt: Any, text: str) -> None:
    specs = [KeySpec(key, "float32", (3,)) for key in ("a", "b", "c")]
    packer = packer_of(placed(specs, 1, bucket_bytes=1000))
    pairs = [(spec.key, np.ones(3, np.float32)) for spec in specs]
    with pytest.raises(KeyMismatch, match=text):
        list(packer.add_all(spoilt(pairs)))
    again = packer_of(placed(specs, 1, bucket_bytes=1000))
    assert len(list(again.add_all(pairs))) == 1
    with pytest.raises(KeyMismatch, match="already pushed"):
        list(again.add_all([(key, gradient.copy()) for key, gradient in pairs]))


@given(model=models(ties=False), seed=st.integers(0, 2**32 - 1), data=st.data())
def test_skipped_keys_are_zero_in_their_buckets_and_named(
    model: Model, seed: int, data: st.DataObject
) -> None:
    gradients = drawn(model, seed)
    pushed = data.draw(st.lists(st.sampled_from(list(gradients)), unique=True))
    packer, blocks = pack(model, gradients, pushed)
    blocks.update((bid, sealed.payload) for bid, sealed in packer.sealed(packer.rest()))
    assert packer.skipped() == tuple(kid for kid in gradients if kid not in pushed)
    here = {b.bid for b in model.blocks if set(b.kids) & set(pushed)}
    assert blocks.keys() == here
    for bid, values in blocks.items():
        for kid, (start, stop) in ranges(model.layout.blocks[bid]).items():
            if kid not in pushed:
                assert not values[start:stop].view(np.uint8).any()
    back = unpack(model.layout, pushed, blocks)
    for kid in pushed:
        assert same(back[model.layout.entries[kid].spec.key], gradients[kid])


@given(model=models(), seed=st.integers(0, 2**32 - 1))
def test_unpack_undoes_cut(model: Model, seed: int) -> None:
    layout = model.layout
    values = drawn(model, seed)
    flat = {e.spec.key: stored_view(values[e.kid], DTYPES[e.spec.dtype]) for e in model.own}
    blocks = cut(layout, layout.blocks.values(), flat)
    for bid, packed in blocks.items():
        assert packed.nbytes == layout.block_bytes(layout.blocks[bid])
        assert not any(np.shares_memory(packed, one) for one in flat.values())
    back = unpack(layout, list(layout.entries), blocks)
    for entry in model.entries:
        assert same(back[entry.spec.key], values[entry.kid])


@given(model=models(ties=False), seed=st.integers(0, 2**32 - 1), data=st.data())
def test_parts_of_blocks_are_enough_for_the_keys_in_them(
    model: Model, seed: int, data: st.DataObject
) -> None:
    layout, values = model.layout, drawn(model, seed)
    _, blocks = pack(model, values, list(values))
    wanted = sorted(data.draw(st.lists(st.sampled_from(list(values)), min_size=1, unique=True)))
    sent, parts = {}, {}
    for block in layout.blocks_for(wanted):
        kids = [kid for kid in block.kids if kid in wanted]
        if kids != block.kids:
            places = ranges(block)
            parts[block.bid] = kids
            pieces = [blocks[block.bid][slice(*places[kid])] for kid in kids]
            sent[block.bid] = np.concatenate(pieces)
        else:
            sent[block.bid] = blocks[block.bid]
    back = unpack(layout, wanted, sent, parts)
    assert back.keys() == {layout.entries[kid].spec.key for kid in wanted}
    for kid in wanted:
        assert same(back[layout.entries[kid].spec.key], values[kid])


# --- cases -----------------------------------------------------------------------------------

A = np.arange(24, dtype=np.float32).reshape(4, 6)


@pytest.mark.parametrize(
    "array",
    [
        A.T,
        A[:, 0],
        A[::2],
        A[::-1],
        np.asfortranarray(A),
        np.broadcast_to(A[0], (4, 6)),
        A.astype(">f4"),
        np.array(3.14, np.float32),
        np.zeros((0,), np.float32),
        np.zeros((3, 0), np.float32),
        np.zeros((0, 3), np.float32),
    ],
    ids=[
        "T",
        "column",
        "rows",
        "reversed",
        "fortran",
        "broadcast",
        "big-endian",
        "0-d",
        "0",
        "3x0",
        "0x3",
    ],
)
@pytest.mark.parametrize("bucket_bytes", [0, 1000])
def test_each_memory_layout_arrives_as_the_contiguous_copy(array: Array, bucket_bytes: int) -> None:
    spec = KeySpec("k", "float32", array.shape)
    model = placed(
        [spec, KeySpec("n", "float32", (3,))], 2, block_bytes=40, bucket_bytes=bucket_bytes
    )
    untouched = array.copy()
    gradients = {0: array, 1: np.ones(3, np.float32)}
    packer, blocks = pack(model, gradients, (1, 0))
    back = unpack(
        model.layout,
        (0, 1),
        blocks | {b: sealed.payload for b, sealed in packer.sealed(packer.rest())},
    )
    expected = np.ascontiguousarray(array).reshape(array.shape).astype(np.float32)
    assert back["k"].dtype == np.float32
    assert back["k"].shape == array.shape
    assert back["k"].tobytes() == expected.tobytes()
    assert back["n"].tolist() == [1, 1, 1]
    assert np.array_equal(array, untouched)


@pytest.fixture
def two() -> Model:
    specs = [
        KeySpec("w", "float32", (2, 3)),
        KeySpec("b", "float32", (3,)),
        KeySpec("tied", "float32", (2, 3), same_as="w"),
    ]
    return placed(specs, 1)


def packer_of(model: Model) -> Packer:
    return Packer(model.layout, model.layout.kids_in(0))


def test_the_callers_array_is_free_as_soon_as_it_was_pushed(two: Model) -> None:
    for bucket_bytes in (0, 1000):
        model = placed([KeySpec("w", "float32", (4,))], 1, bucket_bytes=bucket_bytes)
        gradient = np.ones(4, np.float32)
        packer = packer_of(model)
        ((_, sealed),) = packer.sealed(packer.add("w", gradient))
        block = sealed.payload
        gradient[:] = 7
        assert block.tolist() == [1, 1, 1, 1]


def test_a_key_can_be_pushed_once(two: Model) -> None:
    packer = packer_of(two)
    packer.add("b", np.ones(3, np.float32))
    with pytest.raises(KeyMismatch, match="'b' was already pushed in this batch"):
        packer.add("b", np.ones(3, np.float32))


def test_one_gradient_may_be_pushed_under_both_names_of_a_tied_key(two: Model) -> None:
    packer = packer_of(two)
    gradient = np.ones((2, 3), np.float32)
    packer.add("w", gradient)
    assert packer.add("tied", gradient) == []
    with pytest.raises(KeyMismatch, match="tied to 'w'"):
        packer.add("tied", gradient.copy())


def test_two_gradients_of_a_tied_key_are_refused_also_when_the_first_is_gone(two: Model) -> None:
    for _ in range(20):
        packer = packer_of(two)
        packer.add("w", np.ones((2, 3), np.float32))
        # The allocator gives the second array the address of the first, which is gone.
        with pytest.raises(KeyMismatch, match="tied to 'w'"):
            packer.add("tied", np.full((2, 3), 2, np.float32))


@pytest.mark.parametrize(
    ("gradient", "text"),
    [
        (np.ones((3, 2), np.float32), r"shape \(2, 3\) expected, given \(3, 2\)"),
        (np.ones(3, np.float32), r"shape \(2, 3\) expected, given \(3,\)"),
        (np.float32(1), r"shape \(2, 3\) expected, given \(\)"),
        ([[1.0] * 3] * 2, "takes a NumPy array or one on a GPU, not list"),
        (np.ones((2, 3), np.float64), "dtype float32 expected, given float64"),
        (np.ones((2, 3), np.int32), "dtype float32 expected, given int32"),
        (np.ones((2, 3), ml_dtypes.bfloat16), "dtype float32 expected, given bfloat16"),
    ],
    ids=str,
)
def test_nothing_is_broadcast_or_cast_in_silence(two: Model, gradient: Any, text: str) -> None:
    packer = packer_of(two)
    with pytest.raises(KeyMismatch, match=f"key 'w': .*{text}"):
        packer.add("w", gradient)
    # The refused push has left no trace.
    packer.add("w", np.ones((2, 3), np.float32))


@pytest.mark.parametrize("dtype", [object, complex, "U3", "M8[s]", bool, "f4,f4"], ids=str)
def test_a_dtype_that_does_not_travel_is_named(two: Model, dtype: Any) -> None:
    with pytest.raises(TypeError, match="does not travel; use one of float16, bfloat16, float32"):
        packer_of(two).add("w", np.zeros((2, 3), dtype))


def test_unknown_and_plain_keys_are_no_part_of_a_batch(two: Model) -> None:
    layout = two.layout
    layout.regroup(1, 3, 9)
    packer = Packer(layout, layout.kids_in(0))
    with pytest.raises(UnknownKey, match="unknown key 'x'"):
        packer.add("x", np.ones(1, np.float32))
    with pytest.raises(KeyMismatch, match=r"'b' is pushed by itself.*worker\.push"):
        packer.add("b", np.ones(3, np.float32))


# --- specs of a user's arrays ------------------------------------------------------------------


@given(model=models(ties=False), seed=st.integers(0, 2**32 - 1))
def test_specs_of_arrays_are_those_that_the_arrays_have(model: Model, seed: int) -> None:
    arrays = {
        e.spec.key: value for e, value in zip(model.own, drawn(model, seed).values(), strict=True)
    }
    specs, values = specs_of(as_arrays(arrays))
    assert [(s.key, s.dtype, s.shape) for s in specs] == [
        (e.spec.key, e.spec.dtype, e.spec.shape) for e in model.own
    ]
    for spec in specs:
        assert spec.same_as is None
        assert len(values[spec.key]) == size_of(spec)
        assert values[spec.key].tobytes() == arrays[spec.key].tobytes()


def test_a_second_name_of_one_array_is_a_tie_and_an_equal_array_is_not() -> None:
    w = np.ones((2, 3), np.float32)
    empty = np.zeros(0, np.float32)
    specs, values = specs_of(
        as_arrays({"a": w, "b": w, "T": w.T, "copy": w.copy(), "e": empty, "f": empty})
    )
    assert {spec.key: spec.same_as for spec in specs} == {
        "a": None, "b": "a", "T": None, "copy": None, "e": None, "f": None
    }  # fmt: skip
    assert values.keys() == {"a", "T", "copy", "e", "f"}


def test_numbers_are_0_d_arrays_and_other_things_are_refused() -> None:
    arrays = as_arrays({"scale": 2.5, "count": 3})
    assert (arrays["scale"].shape, arrays["scale"].dtype) == ((), np.float64)
    assert (arrays["count"].shape, arrays["count"].dtype) == ((), np.int64)
    with pytest.raises(TypeError, match="key 'x': init takes arrays, not str"):
        as_arrays({"x": "text"})
    with pytest.raises(TypeError, match="not list"):
        as_arrays([1, 2])
    with pytest.raises(TypeError, match="key 'o': dtype object does not travel"):
        specs_of(as_arrays({"o": np.array([None])}))


def test_views_of_small_keys_go_through_their_block_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand keys share a block: once for each of them would be a million steps."""
    model = placed([KeySpec(f"w{number}", "float32", (2,)) for number in range(20)], 1)
    (block,) = model.blocks
    looked: list[int] = []

    def counted(one: BlockSpec) -> dict[int, tuple[int, int]]:
        looked.append(one.bid)
        return ranges(one)

    monkeypatch.setattr(unpacking, "ranges", counted)
    values = np.arange(40, dtype=np.float32)
    found = unpacking.views(model.layout, range(20), {block.bid: values})
    assert looked == [block.bid]
    for kid, array in found.items():
        assert array.tolist() == [2 * kid, 2 * kid + 1]
        assert np.shares_memory(array, values)
