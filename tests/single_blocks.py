"""Layouts of a few keys, each in a block of its own, and what arrives of such a block."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np

from zkv.layout import Layout
from zkv.optimizer_spec import optimizer
from zkv.wire import BlockSpec, KeyEntry, KeySpec, Segment
from zkv_brokers.store import Settings, Store
from zkv_codecs.backend import NUMPY, Backend
from zkv_codecs.frames import from_payload
from zkv_workers.encoding import Sealed

Array = np.ndarray[Any, Any]
SIZE = 600


def layout(*keys: KeySpec, bucket: bool = False) -> Layout:
    """Each key in a block of its own, or all in one."""
    made = Layout()
    entries = [KeyEntry(kid, spec) for kid, spec in enumerate(keys)]
    sizes = [int(np.prod(spec.shape, dtype=np.int64)) for spec in keys]
    parts = [Segment(kid, 0, size) for kid, size in enumerate(sizes)]
    blocks = (
        [BlockSpec(0, 0, parts)]
        if bucket
        else [BlockSpec(kid, 0, [part]) for kid, part in enumerate(parts)]
    )
    made.add(entries, blocks)
    return made


def spec(key: str | int, size: int = SIZE, dtype: str = "float32") -> KeySpec:
    return KeySpec(key, dtype, (size,))


def received(sealed: Sealed, shape: tuple[int, ...] = (SIZE,)) -> Array:
    if sealed.form is None:
        return sealed.payload
    there = from_payload(sealed.codec, sealed.form, sealed.payload, shape)
    values: Array = there.chain.decode(there.packed, NUMPY).values
    return values


def store_of(
    size: int, backend: Backend, rule: str = "sgd:lr=0.1", dtype: str = "float32", cut: int = 0
) -> tuple[Store, BlockSpec]:
    """A store with one block of one key, or of two that meet at `cut`."""
    edges = sorted({0, cut, size}) if size else [0, 0]
    layout = Layout()
    parts = list(pairwise(edges))
    entries = [
        KeyEntry(kid, KeySpec(f"k{kid}", dtype, (stop - start,)))
        for kid, (start, stop) in enumerate(parts)
    ]
    block = BlockSpec(
        0, 0, [Segment(kid, 0, stop - start) for kid, (start, stop) in enumerate(parts)]
    )
    layout.add(entries, [block])
    store = Store(layout)
    store.backend = backend
    store.configure(Settings(optimizer(rule), optimizer("assign")))
    return store, block
