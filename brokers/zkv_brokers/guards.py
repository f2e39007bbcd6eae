"""What a server looks at before a pushed block may count: codec, size, dtype and NaN (rule 9).

Pure checks of one block. They know the store's rules, and no contributions, log or sockets.
"""

from __future__ import annotations

import numpy as np

from zkv import data_messages as d
from zkv.dtypes import Array, all_finite
from zkv.wire import SEEDS, BlockSpec
from zkv_brokers.store import Store, spans

Problem = tuple[str | int, str]
"""A key, and why the contribution is refused because of it."""


def check_push(store: Store, block: BlockSpec, message: d.Push, payload: Array) -> Problem | None:
    """Return (key, reason) if a block must be refused, None if it may count.

    `payload` has the block's bytes as flat uint8. Initial values may have NaN and any dtype.
    """
    layout = store.layout
    first = layout.entries[block.segments[0].kid].spec
    if message.codec != "none":
        return first.key, f"codec {message.codec!r} is not known to server {block.server}"
    bytes_expected = layout.block_bytes(block)
    if payload.nbytes != bytes_expected:
        return first.key, f"{payload.nbytes} bytes where block {block.bid} has {bytes_expected}"
    if message.contribution.group == SEEDS:
        return None
    return _check_values(store, block, aligned(payload))


def _check_values(store: Store, block: BlockSpec, payload: Array) -> Problem | None:
    layout, kid = store.layout, block.segments[0].kid
    dtype, rule = layout.dtype(block), store.spec_for(kid).rule.name
    if not dtype.floating and rule != "assign":
        return (
            layout.entries[kid].spec.key,
            f"rule {rule} cannot update {dtype.name}; initialise the key with rule='assign'",
        )
    stored = payload.view(dtype.stored)
    for segment, start, stop in spans(block):
        spec = layout.entries[segment.kid].spec
        if not spec.allow_nan and not all_finite(stored[start:stop], dtype):
            return spec.key, "the gradient has NaN or Inf; allow it with allow_nan=True at init"
    return None


def aligned(payload: Array) -> Array:
    """Return the bytes at an address that any dtype can be viewed at.

    Received frames below about 8 KiB start at any address (libzmq packs them into one buffer).
    """
    if payload.ctypes.data % 8 == 0:
        return payload
    return np.array(payload, copy=True)
