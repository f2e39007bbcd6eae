"""Tables: keys whose value is rows by number, of which a batch touches a few (embeddings).

A row exists as soon as an update has changed it. Before that its value is a pure function of the
table's name and seed, the row's number and the column, so that every server computes it alone and
nothing depends on who touched it first. Rows are dealt out to a table's parts by a mix of their
numbers. This module must not know servers, versions, contributions or messages.

The mix is the finalizer of SplitMix64 (Steele, Lea, Flood, "Fast Splittable Pseudorandom Number
Generators", OOPSLA 2014; constants by David Stafford), and a row's draws are that generator's
stream, begun at the row's own state.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np

from zkv.dtypes import Array
from zkv.errors import KeyMismatch
from zkv.hash_ring import name_of
from zkv.keys import check_key
from zkv.wire import TableSpec

DTYPES_OF_TABLES = ("float32", "float64")
DIM_MAX = 1 << 20
"""A row has to fit into a message: 8 MiB of float64 do."""
PIECE_BYTES = 1024 * 1024
"""What travels of a table is cut into pieces of whole rows of about this size, as values are."""
RULES_OF_TABLES = ("sgd", "adagrad", "adam")
"""The update rules whose rows may be updated one by one (see `zkv.row_rules`)."""

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
FIRST, SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
HALF = np.uint64(32)
DRAWS_OF_NORMAL = 3
"""Words of 64 bits for a normal draw: twelve numbers of 16 bits."""
MEAN_OF_NORMAL = 12 * (2**16 - 1) / 2
OFTEN = 32
"""A row that is pushed more often in a call is added up by itself, the others side by side."""
LARGEST = 1e30
"""Of the numbers of an initialiser: its draws are finite in float32."""
PIECE_ELEMENTS = 16 * 1024
"""First values are made so many at a time: their words stay in a core's own cache."""


@dataclass(frozen=True, slots=True)
class Table:
    """How a table is made: ``worker.init(params, tables={"emb": zkv.Table(dim=64)})``.

    `dim` elements of `dtype` (float32 or float64) in a row. `initial`: "zeros", "normal:SIGMA" (the
    sum of twelve uniform draws, so within six sigma) or "uniform:LOW,HIGH". `seed` decides the
    draws, with the table's name. `rows`: numbers of rows are below this; None: any number of 64
    bits without sign is one. `rule`: an optimizer of its own, such as "adagrad:lr=0.1"; "" for the
    model's, which has to be one that tables take. `reduce`: "mean" over the samples of all
    contributions, where a row that one does not name counts as zero, or "sum". `allow_nan`: whether
    gradients may hold NaN and Inf.

    Raises:
        ValueError: something is out of its range, or not of its form.
    """

    dim: int
    dtype: str = "float32"
    initial: str = "normal:0.01"
    seed: int = 0
    rows: int | None = None
    rule: str = ""
    reduce: str = "mean"
    allow_nan: bool = False

    def __post_init__(self) -> None:
        spec = self.spec("table")
        problem = problem_of(spec)
        if self.rows == 0:
            problem = "rows=0: a table has at least one row, or rows=None for any"
        if problem:
            raise ValueError(problem)

    def spec(self, key: str | int) -> TableSpec:
        """Return what travels of this table.

        Raises:
            TypeError, ValueError: not a key.
        """
        return TableSpec(
            check_key(key),
            self.dim,
            self.dtype,
            self.initial,
            self.seed,
            0 if self.rows is None else self.rows,
            self.rule,
            self.reduce,
            self.allow_nan,
        )


def problem_of(spec: TableSpec) -> str:
    """Return what is wrong with a table, in words; "" if nothing is."""
    numbers: tuple[tuple[str, Any, int, int], ...] = (
        ("dim", spec.dim, 1, DIM_MAX),
        ("rows", spec.rows, 0, 2**63 - 1),
        ("seed", spec.seed, 0, 2**63 - 1),
    )
    for name, number, least, most in numbers:
        if isinstance(number, bool) or not isinstance(number, int) or not least <= number <= most:
            return f"{name}={number!r} is not a whole number of {least} to {most}"
    if spec.dtype not in DTYPES_OF_TABLES:
        return f"dtype {spec.dtype!r} is none of those of tables: {', '.join(DTYPES_OF_TABLES)}"
    if spec.reduce not in ("mean", "sum"):
        return f"reduce {spec.reduce!r} is none of 'sum', 'mean'"
    try:
        initial_of(spec.initial)
    except ValueError as error:
        return str(error)
    return ""


# --- rows and their parts --------------------------------------------------------------------


def mixed(words: Array) -> Array:
    """Return the mix of 64-bit words (uint64, any shape): one to one, and each bit of a word
    changes about half of those of its mix."""
    h: Array = words ^ (words >> np.uint64(30))
    h *= FIRST
    h ^= h >> np.uint64(27)
    h *= SECOND
    h ^= h >> np.uint64(31)
    return h


def mixed_ids(ids: Array) -> Array:
    """Return the mix of row numbers (uint64) that parts and places in memory are chosen by."""
    return mixed(ids + GOLDEN)


def part_of(ids: Array, parts: int) -> Array:
    """Return the part (0 … parts−1, int64) of each row (uint64): as many rows to each, nearly."""
    upper = mixed_ids(ids) >> HALF
    chosen: Array = ((upper * np.uint64(parts)) >> HALF).astype(np.int64)
    return chosen


def checked_ids(key: str | int, ids: Any, rows: int) -> Array:
    """Return row numbers as a contiguous array of uint64, of the shape that they were given in.

    `rows`: numbers are below this; 0: any.

    Raises:
        KeyMismatch: not whole numbers, negative, or out of range; the first such number is named.
    """
    given = np.asarray(ids)
    if given.dtype.kind in "fO" and not isinstance(ids, np.ndarray):
        given = _large_ones(ids, given)
    if given.size == 0:
        return np.empty(given.shape, np.uint64)
    if given.dtype.kind not in "iu":
        raise KeyMismatch(
            f"table {key!r}: numbers of rows are whole numbers of 0 to 2**64-1, "
            f"not {given.dtype} ({given.reshape(-1)[0]!r})"
        )
    if given.dtype.kind == "i" and given.min() < 0:
        first = given.reshape(-1)[np.argmax(given.reshape(-1) < 0)]
        raise KeyMismatch(f"table {key!r}: row {first} is negative")
    found: Array = np.asarray(given, np.uint64, order="C")
    if rows and int(found.max()) >= rows:
        first = found.reshape(-1)[np.argmax(found.reshape(-1) >= np.uint64(rows))]
        raise KeyMismatch(
            f"table {key!r}: row {first} is out of range: it has rows 0 to {rows - 1}"
        )
    return found


def _large_ones(ids: Any, given: Array) -> Array:
    """Return Python's own whole numbers as uint64: of some from 2**63 on NumPy makes floats."""
    each = np.asarray(ids, dtype=object)
    flat = each.reshape(-1).tolist()
    if not all(type(one) is int and 0 <= one < 2**64 for one in flat):
        return given if given.dtype.kind == "f" else each
    found: Array = np.asarray(flat, np.uint64).reshape(each.shape)
    return found


def disorder(ids: Array, spec: TableSpec, part: int, parts: int) -> str:
    """Return what is wrong with row numbers (flat, uint64) that a peer has sent to this part of a
    table; "" if nothing is: ascending, each once, in range, and of this part."""
    if ids.size > 1:
        wrong = ids[1:] <= ids[:-1]
        if wrong.any():
            at = int(np.argmax(wrong))
            how = "twice" if ids[at + 1] == ids[at] else f"behind row {ids[at]}: they must ascend"
            return f"row {ids[at + 1]} stands {how}"
    if spec.rows and ids.size and int(ids[-1]) >= spec.rows:
        first = ids[np.searchsorted(ids, np.uint64(spec.rows))]
        return f"row {first} is out of range: the table has rows 0 to {spec.rows - 1}"
    elsewhere = part_of(ids, parts) != part
    if elsewhere.any():
        return f"row {ids[int(np.argmax(elsewhere))]} is not of part {part} of {parts}"
    return ""


def summed(ids: Array, rows: Array) -> tuple[Array, Array]:
    """Return row numbers (uint64) ascending and each once, and for each the sum of its `rows`.

    `rows` is (numbers, dim); those of one number are added from the first to the last, in their
    dtype. Both results are fresh.
    """
    order = np.argsort(ids, kind="stable")
    ordered = ids[order]
    first: Array = np.ones(ids.size, bool)
    first[1:] = ordered[1:] != ordered[:-1]
    starts = np.flatnonzero(first)
    total = rows[order[starts]]
    if starts.size == ids.size:
        return ordered, total
    group = np.cumsum(first) - 1
    counts = np.diff(starts, append=ids.size)
    often = counts > OFTEN
    with np.errstate(all="ignore"):
        for one in np.flatnonzero(often).tolist():
            own = order[starts[one] : starts[one] + counts[one]]
            # Unlike a sum, this adds from the first to the last by definition.
            total[one] = np.add.accumulate(rows[own], axis=0)[-1]
        rest = np.flatnonzero(~often[group])
        turn = rest - starts[group[rest]]
        # All second ones of their numbers together, then all third ones, …
        again = rest[np.argsort(turn, kind="stable")]
        ends = np.cumsum(np.bincount(turn))
        for begin, end in zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True):
            chosen = again[begin:end]
            total[group[chosen]] += rows[order[chosen]]
    return ordered[starts], total


def rows_per_piece(spec: TableSpec) -> int:
    """Return how many rows, with their numbers, travel in one piece."""
    return max(1, PIECE_BYTES // (8 + row_bytes(spec)))


def row_bytes(spec: TableSpec) -> int:
    """Return the bytes of one row's values."""
    return spec.dim * np.dtype(spec.dtype).itemsize


# --- first values ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Initial:
    """What rows hold before any update: `kind` is one of "zeros", "normal" and "uniform"."""

    kind: str
    numbers: tuple[float, ...] = ()

    def rows(self, state: int, ids: Array, dim: int, dtype: str) -> Array:
        """Return the first values of rows (uint64): (rows, dim), fresh. `state` is of `state_of`.

        They are computed in float64, from whole numbers, and rounded once to `dtype`.
        """
        out = np.zeros((ids.size, dim), dtype)
        if self.kind == "zeros":
            return out
        make = self._normal if self.kind == "normal" else self._uniform
        step = max(1, PIECE_ELEMENTS // dim)
        for start in range(0, ids.size, step):
            begun = mixed(mixed_ids(ids[start : start + step]) ^ np.uint64(state))
            out[start : start + step] = make(begun, dim)
        return out

    def _normal(self, begun: Array, dim: int) -> Array:
        total = np.zeros((begun.size, dim), np.uint64)
        for which in range(DRAWS_OF_NORMAL):
            words = _draws(begun, np.arange(dim) * DRAWS_OF_NORMAL + which)
            for shift in (0, 16, 32, 48):
                total += (words >> np.uint64(shift)) & np.uint64(0xFFFF)
        # Twelve uniform whole numbers of 16 bits have a variance of 2**32 - 1 together.
        return (total.astype(np.float64) - MEAN_OF_NORMAL) * (self.numbers[0] / 2**16)

    def _uniform(self, begun: Array, dim: int) -> Array:
        low, high = self.numbers
        draws = (_draws(begun, np.arange(dim)) >> np.uint64(11)).astype(np.float64)
        return draws * ((high - low) / 2**53) + low


def _draws(begun: Array, places: Array) -> Array:
    """Return the words at these places of each row's stream: (rows, places)."""
    steps = (places.astype(np.uint64) + np.uint64(1)) * GOLDEN
    return mixed(begun[:, None] + steps[None, :])


def state_of(spec: TableSpec) -> int:
    """Return what a table's draws begin with: 64 bits of its name and its seed."""
    name = spec.seed.to_bytes(8, "big") + name_of(spec.key)
    return int.from_bytes(blake2b(name, digest_size=8, person=b"table").digest(), "big")


def initial_of(text: str) -> Initial:
    """Read how rows begin: "zeros", "normal:0.01", "uniform:-0.1,0.1".

    Raises:
        ValueError: none of these; the forms are named.
    """
    kind, colon, rest = text.partition(":")
    try:
        numbers = tuple(float(one) for one in rest.split(",")) if colon else ()
    except ValueError:
        numbers = (math.nan,)
    right = _FORMS.get(kind)
    if right is None or not all(abs(one) <= LARGEST for one in numbers) or not right(numbers):
        raise ValueError(
            f"initial {text!r} is none of zeros, normal:SIGMA and uniform:LOW,HIGH "
            f"(numbers of at most {LARGEST:g}, SIGMA not negative, LOW at most HIGH)"
        )
    return Initial(kind, numbers)


_FORMS: dict[str, Callable[[tuple[float, ...]], bool]] = {
    "zeros": lambda numbers: not numbers,
    "normal": lambda numbers: len(numbers) == 1 and numbers[0] >= 0,
    "uniform": lambda numbers: len(numbers) == 2 and numbers[0] <= numbers[1],
}
