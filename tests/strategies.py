"""Hypothesis strategies that several tests share: messages of the wire, models, arrays.

It knows the wire's types and nothing of the machines that handle them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import msgspec
import numpy as np
from hypothesis import strategies as st

from zkv import control as c
from zkv import data_messages as d
from zkv import entries
from zkv.dtypes import DTYPES, Array, narrow
from zkv.layout import Layout, size_of
from zkv.placement import plan
from zkv.wire import BlockSpec, KeyEntry, KeySpec

FLOATING = ("float16", "bfloat16", "float32", "float64")

CONTROL = get_args(c.Message)
FOR_BROKER = get_args(c.ForBroker)
ENTRIES = get_args(entries.Entry)
DATA = get_args(d.Data)

# --- messages, out of the types of their fields ----------------------------------------------

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
plain_data = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)
"""What a field of free form may carry."""

_SIMPLE = {
    int: st.integers(-(2**63), 2**63 - 1),
    float: st.floats(allow_nan=False),
    bool: st.booleans(),
    str: texts,
    type(None): st.none(),
    Any: plain_data,
}
_structs: dict[type, st.SearchStrategy[Any]] = {}


def struct(kind: type) -> st.SearchStrategy[Any]:
    """Return a strategy for any value of a message type."""
    if kind not in _structs:
        hints = get_type_hints(kind, include_extras=True)
        names = [field.name for field in msgspec.structs.fields(kind)]
        _structs[kind] = st.builds(kind, **{name: of_type(hints[name]) for name in names})
    return _structs[kind]


def of_type(annotation: Any) -> st.SearchStrategy[Any]:
    """Return a strategy for the values that a field of this type may have."""
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _limited(*args)
    if origin is list:
        return st.lists(of_type(args[0]), max_size=3)
    if origin is dict:
        return st.dictionaries(texts, plain_data, max_size=3)
    if origin is tuple and args[-1] is ...:
        return st.lists(of_type(args[0]), max_size=4).map(tuple)
    if origin is tuple:
        return st.tuples(*map(of_type, args))
    if isinstance(annotation, type) and issubclass(annotation, msgspec.Struct):
        return struct(annotation)
    if annotation in _SIMPLE:
        return _SIMPLE[annotation]
    return st.one_of(*map(of_type, args))


def _limited(inner: Any, limit: msgspec.Meta) -> st.SearchStrategy[Any]:
    if inner is int:
        low, high = limit.ge, limit.le
        assert low is not None
        assert high is not None
        low, high = int(low), int(high)
        return st.sampled_from([low, high, max(low, 1)]) | st.integers(low, high)
    if inner is float:
        return st.floats(limit.ge, limit.le, allow_nan=False)
    if inner is bytes:
        return st.binary(min_size=limit.min_length or 0, max_size=limit.max_length)
    return of_type(inner)


messages = st.one_of(*map(struct, CONTROL))
broker_messages = st.one_of(*map(struct, FOR_BROKER))
data_messages = st.one_of(*map(struct, DATA))

# --- models ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Model:
    """Keys as a broker would have numbered and placed them."""

    entries: list[KeyEntry]
    blocks: list[BlockSpec]
    servers: int

    @property
    def layout(self) -> Layout:
        """A fresh layout with all of it."""
        layout = Layout()
        layout.add(self.entries, self.blocks)
        return layout

    @property
    def own(self) -> list[KeyEntry]:
        """The keys that are no other name of another."""
        return [entry for entry in self.entries if entry.spec.same_as is None]


keys = st.integers(0, 2**63 - 1) | st.text(
    st.characters(exclude_categories=["Cs"]), min_size=1, max_size=40
)
shapes = st.lists(st.integers(0, 4), max_size=3).map(tuple)


@st.composite
def models(
    draw: st.DrawFn,
    *,
    dtypes: tuple[str, ...] = tuple(DTYPES),
    ties: bool = True,
    servers_max: int = 4,
    absents: tuple[str, ...] = ("zero",),
) -> Model:
    """Draw a model of a few keys and place it, with blocks so small that keys are cut."""
    names = draw(st.lists(keys, min_size=1, max_size=8, unique=True))
    specs: list[KeySpec] = []
    for name in names:
        owners = [spec for spec in specs if spec.same_as is None]
        if ties and owners and draw(st.integers(0, 5)) == 0:
            of = draw(st.sampled_from(owners))
            specs.append(KeySpec(name, of.dtype, of.shape, same_as=of.key))
            continue
        dtype, absent = draw(st.sampled_from(dtypes)), draw(st.sampled_from(absents))
        specs.append(KeySpec(name, dtype, draw(shapes), absent=absent))
    return placed(
        specs,
        draw(st.integers(1, servers_max)),
        block_bytes=draw(st.sampled_from([3, 16, 50, 200])),
        bucket_bytes=draw(st.integers(0, 100)),
    )


def placed(specs: list[KeySpec], servers: int, **sizes: int) -> Model:
    """Number and place keys as a broker does."""
    kids: dict[str | int, int] = {}
    for spec in specs:
        if spec.same_as is None:
            kids[spec.key] = len(kids)
    numbered = [
        KeyEntry(kids[spec.key if spec.same_as is None else spec.same_as], spec) for spec in specs
    ]
    blocks = plan(numbered, servers, together=lambda entry: entry.spec.absent, **sizes)
    return Model(numbered, blocks, servers)


def values_of(spec: KeySpec, chance: np.random.Generator) -> Array:
    """Return a flat array of a key's stored dtype: any bits for integers, normal numbers else."""
    dtype = DTYPES[spec.dtype]
    if dtype.floating:
        wide = chance.normal(size=size_of(spec)).astype(dtype.wide)
        # Zeros of both signs: a sum must not depend on where a skipped key's block was cut.
        wide[chance.random(len(wide)) < 0.2] = -0.0
        return narrow(wide, dtype)
    bits = chance.integers(0, 256, size_of(spec) * dtype.itemsize, dtype=np.uint8)
    return bits.view(dtype.stored)


seeds = st.integers(0, 2**32 - 1)
