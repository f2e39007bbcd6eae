"""What a server looks at before a pushed block may count: codec, size, dtype and NaN (rule 9).

Pure checks of one block. They know the store's rules, and no contributions, log or sockets.
"""

from __future__ import annotations

from zkv import data_messages as d
from zkv.dtypes import Array, all_finite, narrow
from zkv.errors import ProtocolError
from zkv.wire import SEEDS, BlockSpec
from zkv_brokers.aggregates import Payload, spans
from zkv_brokers.store import Store
from zkv_codecs.frames import aligned, from_payload

Problem = tuple[str | int, str]
"""A key, and why the contribution is refused because of it."""


def admit(
    store: Store, block: BlockSpec, message: d.Push, payload: Array, *, looks: bool = True
) -> Payload | Problem:
    """Return a block as it is kept, or (key, reason) if it must be refused.

    `payload` has the block's bytes as flat uint8. Initial values may have NaN and any dtype, and
    come without a codec. `looks`: also at the values of one that `may_wait`.
    """
    layout = store.layout
    first = layout.entries[block.segments[0].kid].spec
    seeds = message.contribution.group == SEEDS
    if message.form is not None and not seeds and layout.dtype(block).floating:
        began = store.clock()
        try:
            sent = from_payload(
                message.codec, message.form, aligned(payload), layout.shape(block), store.backend
            )
            if sent.chain.stages:
                return sent
            # What was only packed, and is unpacked by now, is looked at like what never was.
            wide = sent.chain.decode(sent.packed, store.backend).values
        except ProtocolError as error:
            return first.key, str(error)
        finally:
            store.decoded(block.bid, store.clock() - began)
        values = narrow(wide.astype(layout.dtype(block).wide, copy=False), layout.dtype(block))
        return check_values(store, block, values) or values
    if message.codec != "none" or message.form is not None:
        return first.key, f"codec {message.codec!r} cannot be used for {first.dtype} or at init"
    bytes_expected = layout.block_bytes(block)
    if payload.nbytes != bytes_expected:
        return first.key, f"{payload.nbytes} bytes where block {block.bid} has {bytes_expected}"
    stored = aligned(payload).view(layout.dtype(block).stored)
    problem = check_values(store, block, stored) if looks and not seeds else None
    return stored if problem is None else problem


def may_wait(store: Store, block: BlockSpec, message: d.Push) -> bool:
    """Return whether a block's values may be looked at when they are summed: who reads them then
    finds what is not finite by the way."""
    return message.form is None and store.sums_in_one_go(block)


def check_values(store: Store, block: BlockSpec, stored: Array) -> Problem | None:
    """Return why values must be refused; None: they need not be."""
    layout, kid = store.layout, block.segments[0].kid
    dtype, rule = layout.dtype(block), store.rules.spec_for(kid).rule.name
    if not dtype.floating and rule != "assign":
        return (
            layout.entries[kid].spec.key,
            f"rule {rule} cannot update {dtype.name}; initialise the key with rule='assign'",
        )
    if all_finite(stored, dtype):
        return None
    for segment, start, stop in spans(block):
        spec = layout.entries[segment.kid].spec
        if not spec.allow_nan and not all_finite(stored[start:stop], dtype):
            return spec.key, "the gradient has NaN or Inf; allow it with allow_nan=True at init"
    return None
