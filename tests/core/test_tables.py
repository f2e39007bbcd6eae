"""Tables in words and numbers: how they are made, dealt out and begun. And the same on every
machine: these numbers are written down here."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zkv.errors import KeyMismatch
from zkv.tables import (
    LARGEST,
    Table,
    checked_ids,
    disorder,
    initial_of,
    mixed,
    part_of,
    rows_per_piece,
    state_of,
    summed,
)

IDS = st.lists(st.integers(0, 2**64 - 1), max_size=30)


def first_rows(table: Table, ids: list[int], key: str = "emb") -> Any:
    spec = table.spec(key)
    initial = initial_of(spec.initial)
    return initial.rows(state_of(spec), np.asarray(ids, np.uint64), spec.dim, spec.dtype)


# --- what a table may be -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"dim": 0}, "dim=0 is not a whole number of 1 to"),
        ({"dim": 2**20 + 1}, "dim=1048577"),
        ({"dim": 1.5}, "dim=1.5"),
        ({"dim": True}, "dim=True"),
        ({"dim": 2, "rows": 0}, "rows=0: a table has at least one row"),
        ({"dim": 2, "rows": -1}, "rows=-1"),
        ({"dim": 2, "seed": -1}, "seed=-1"),
        ({"dim": 2, "dtype": "float16"}, "dtype 'float16' is none of those of tables: float32"),
        ({"dim": 2, "dtype": "int64"}, "dtype 'int64'"),
        ({"dim": 2, "reduce": "max"}, "reduce 'max'"),
        *(
            ({"dim": 2, "initial": text}, "none of zeros, normal:SIGMA and uniform:LOW,HIGH")
            for text in (
                "ones",
                "",
                "zeros:0",
                "normal",
                "normal:",
                "normal:-1",
                "normal:nan",
                "normal:1,2",
                "uniform:1",
                "uniform:2,1",
                "uniform:0,inf",
                f"normal:{LARGEST * 10}",
            )
        ),
    ],
)
def test_a_table_that_cannot_be_is_refused_in_words(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError) as refused:
        Table(**options)
    assert says in str(refused.value)


def test_a_piece_has_whole_rows_and_at_least_one() -> None:
    assert rows_per_piece(Table(64).spec("emb")) == 2**20 // (8 + 256)
    assert rows_per_piece(Table(2**20, "float64").spec("emb")) == 1


# --- row numbers -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ids", "rows", "says"),
    [
        ([3, -4, -1], 0, "table 'emb': row -4 is negative"),
        ([1.0], 0, "whole numbers of 0 to 2**64-1, not float64"),
        ([0, 2**64], 0, "not object"),
        ([2**63, -1], 0, "whole numbers"),
        ([True], 0, "not bool"),
        (["a"], 0, "whole numbers"),
        ([2, 9, 10, 11], 10, "row 10 is out of range: it has rows 0 to 9"),
        ([2**64 - 1], 10, f"row {2**64 - 1} is out of range"),
    ],
)
def test_what_is_no_row_number_is_named(ids: Any, rows: int, says: str) -> None:
    with pytest.raises(KeyMismatch) as refused:
        checked_ids("emb", ids, rows)
    assert says in str(refused.value)


@pytest.mark.parametrize(
    "ids",
    [
        [],
        [2**64 - 1, 5],
        [[5, 7], [5, 2**63 + 1]],
        np.asarray([1, 0], np.int8),
        np.asarray([[2**64 - 1]], np.uint64),
        7,
    ],
    ids=str,
)
def test_row_numbers_keep_their_shape_and_every_bit(ids: Any) -> None:
    found = checked_ids("emb", ids, 0)
    assert found.dtype == np.uint64
    assert found.tolist() == (ids.tolist() if isinstance(ids, np.ndarray) else ids)


@pytest.mark.parametrize(
    ("ids", "says"),
    [
        ([4, 4], "row 4 stands twice"),
        ([1, 5, 3], "row 3 stands behind row 5: they must ascend"),
        ([1, 100, 2**64 - 1], "row 100 is out of range: the table has rows 0 to 99"),
    ],
)
def test_what_a_peer_sends_ascends_and_is_in_range(ids: list[int], says: str) -> None:
    spec = Table(2, rows=100).spec("emb")
    assert says in disorder(np.asarray(ids, np.uint64), spec, 0, 1)
    assert not disorder(np.asarray([0, 1, 99], np.uint64), spec, 0, 1)


def test_a_row_of_another_part_is_named() -> None:
    spec, ids = Table(2).spec("emb"), np.arange(40, dtype=np.uint64)
    parts = part_of(ids, 3)
    for part in range(3):
        own, other = ids[parts == part], ids[parts != part]
        assert not disorder(own, spec, part, 3)
        assert f"row {other[0]} is not of part {part} of 3" in disorder(other, spec, part, 3)


# --- the mix -----------------------------------------------------------------------------------


def test_the_mix_is_splitmix64s() -> None:
    """The first outputs of SplitMix64 with seed 1234567, as published with its reference code."""
    golden = 0x9E3779B97F4A7C15
    steps = [(1234567 + (at + 1) * golden) % 2**64 for at in range(5)]
    assert mixed(np.asarray(steps, np.uint64)).tolist() == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]


@pytest.mark.parametrize("step", [1, 2, 3, 64, 1 << 20, 1 << 32, 1 << 44])
@pytest.mark.parametrize("parts", [1, 2, 3, 7, 8])
def test_rows_are_dealt_out_evenly_whatever_their_numbers(step: int, parts: int) -> None:
    ids = np.arange(20_000, dtype=np.uint64) * np.uint64(step)
    counts = np.bincount(part_of(ids, parts), minlength=parts)
    assert counts.size == parts
    # Five standard deviations of a fair deal.
    assert abs(counts - 20_000 / parts).max() <= 5 * (20_000 / parts) ** 0.5


def test_parts_are_the_same_everywhere() -> None:
    ids = np.asarray([0, 1, 2, 3, 1000, 2**63, 2**64 - 1], np.uint64)
    assert part_of(ids, 5).tolist() == PARTS


PARTS = [4, 2, 2, 0, 1, 1, 4]


# --- first values ------------------------------------------------------------------------------


def test_first_values_are_the_same_everywhere() -> None:
    made = first_rows(Table(2, initial="normal:1", seed=3), [0, 2**64 - 1])
    assert made.tolist() == NORMAL
    made = first_rows(Table(2, "float64", "uniform:-1,1", seed=3), [0, 2**64 - 1])
    assert made.tolist() == UNIFORM


NORMAL = [[-0.0888671875, 0.0824432373046875], [0.2916412353515625, -0.969818115234375]]
UNIFORM = [[0.03502129743469551, -0.07261090933396552], [-0.2515622243904383, 0.6539452079026884]]


@given(IDS, st.sampled_from(["normal:0.5", "uniform:-2,3", "zeros"]), st.integers(1, 9))
def test_a_first_value_depends_on_its_row_and_on_nothing_else(
    ids: list[int], initial: str, dim: int
) -> None:
    table = Table(dim, initial=initial)
    together = first_rows(table, ids)
    for at, one in enumerate(ids):
        assert together[at].tobytes() == first_rows(table, [one]).tobytes()
        # Nor does the width of a table decide what its first columns hold.
        if initial.startswith("uniform"):
            narrow = first_rows(Table(1, initial=initial), [one])
            assert together[at, 0] == narrow[0, 0]


def test_tables_seeds_and_rows_have_draws_of_their_own() -> None:
    ids = list(range(50))
    made = [
        first_rows(Table(8), ids),
        first_rows(Table(8, seed=1), ids),
        first_rows(Table(8), ids, key="out"),
        first_rows(Table(8), [one + 1000 for one in ids]),
    ]
    values = np.concatenate([one.reshape(-1) for one in made])
    # Draws of 2**16 possible values or more repeat now and then by chance, and no more than that.
    assert np.unique(values).size > 0.99 * values.size


def test_draws_are_as_their_text_says() -> None:
    ids = list(range(20_000))
    normal = first_rows(Table(8, "float64", "normal:2"), ids)
    assert abs(normal.mean()) < 0.03
    assert abs(normal.std() - 2) < 0.02
    assert abs((np.abs(normal) < 2).mean() - 0.6827) < 0.005
    assert np.abs(normal).max() < 12
    columns = np.corrcoef(normal.T) - np.eye(8)
    assert np.abs(columns).max() < 0.04
    uniform = first_rows(Table(8, "float64", "uniform:-1,3"), ids)
    assert -1 <= uniform.min() < -0.99 < 2.99 < uniform.max() <= 3
    assert abs(uniform.mean() - 1) < 0.03
    assert not first_rows(Table(8, initial="zeros"), ids).any()


# --- sums --------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(0, 6), st.floats(-1e6, 1e6, width=32)), max_size=60))
def test_gradients_of_one_row_are_added_in_their_order(pushed: list[tuple[int, float]]) -> None:
    ids = np.asarray([one for one, _ in pushed], np.uint64)
    rows = np.asarray([[value, -2 * value] for _, value in pushed], np.float32).reshape(-1, 2)
    unique, total = summed(ids, rows)
    expected: dict[int, Any] = {}
    for one, row in zip(ids.tolist(), rows, strict=True):
        expected[one] = row.copy() if one not in expected else expected[one] + row
    assert unique.tolist() == sorted(expected)
    for one, row in zip(unique.tolist(), total, strict=True):
        assert row.tobytes() == expected[one].tobytes()
    assert not np.may_share_memory(total, rows)


@pytest.mark.parametrize("dim", [1, 5])
@pytest.mark.parametrize("kinds", [1, 2, 40])
def test_rows_that_are_pushed_very_often_are_added_in_their_order_too(dim: int, kinds: int) -> None:
    rng = np.random.default_rng(kinds)
    ids = np.minimum(rng.integers(0, 80, 2000), kinds - 1).astype(np.uint64)
    rows = (rng.standard_normal((2000, dim)) * 10.0 ** rng.integers(-3, 4, (2000, 1))).astype("f4")
    unique, total = summed(ids, rows)
    for one, row in zip(unique.tolist(), total, strict=True):
        expected = np.zeros(dim, np.float32)
        for at in np.flatnonzero(ids == one):
            expected = expected + rows[at]
        assert row.tobytes() == expected.tobytes()
    assert unique.tolist() == list(range(kinds))
