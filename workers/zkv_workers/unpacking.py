"""From blocks to a user's arrays: values are unpacked, each block as soon as it is here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from zkv.dtypes import DTYPES, Array, user_view
from zkv.errors import KeyMismatch
from zkv.layout import Layout
from zkv.wire import BlockSpec
from zkv_net.spares import Spares
from zkv_workers import several
from zkv_workers.bucket import ranges
from zkv_workers.packing import Key, check_gradient


class Unpacking:
    """Fresh, writable arrays of some keys, which blocks (flat, stored dtype) are copied into.

    Fresh is what nobody else has: of `spares`, too. Where all keys of a bucket are among them, it
    is copied at once, and their arrays are parts of that copy.
    """

    def __init__(self, layout: Layout, kids: Sequence[int], spares: Spares | None = None) -> None:
        self.kids = frozenset(kids)
        self._layout = layout
        self._empty = np.empty if spares is None else spares.empty
        self._flat: dict[int, Array] = {}
        bids = {bid for kid in self.kids for bid in layout.blocks_of_key[kid]}
        self.missing = {bid: layout.blocks[bid] for bid in sorted(bids)}
        """Blocks that were not copied yet."""

    def take(
        self, blocks: Mapping[int, Array], parts: Mapping[int, Sequence[int]] | None = None
    ) -> None:
        """Copy what is here of the blocks that are missing; `blocks` may have others beside theirs.

        `parts` names the keys of blocks that came in part.
        """
        # Not an intersection of keys: another thread may add blocks meanwhile.
        for bid in [bid for bid in self.missing if bid in blocks]:
            block = self.missing.pop(bid)
            part = None if parts is None else parts.get(bid)
            if part is None and len(block.segments) > 1 and self.kids.issuperset(block.kids):
                copied = blocks[bid].copy()
                self._flat |= {kid: copied[a:b] for kid, (a, b) in ranges(block).items()}
            else:
                self._copy(block, blocks[bid], set(block.kids if part is None else part))

    def _copy(self, block: BlockSpec, values: Array, present: set[int]) -> None:
        start = 0
        for segment in block.segments:
            if segment.kid not in present:
                continue
            stop = start + segment.stop - segment.start
            if segment.kid in self.kids:
                self._of(segment.kid)[segment.start : segment.stop] = values[start:stop]
            start = stop

    def _of(self, kid: int) -> Array:
        if kid not in self._flat:
            spec = self._layout.entries[kid].spec
            self._flat[kid] = self._empty(_size(spec.shape), DTYPES[spec.dtype].stored)
        return self._flat[kid]

    def arrays(self) -> dict[int, Array]:
        """Return the arrays by the keys' numbers."""
        entries = self._layout.entries
        return {
            kid: user_view(self._of(kid), DTYPES[entries[kid].spec.dtype]).reshape(
                entries[kid].spec.shape
            )
            for kid in self.kids
        }


class _Joined:
    """Arrays that lie one behind the other, as one. They stay as long as it does."""

    def __init__(self, parts: Sequence[Array]) -> None:
        self._parts = list(parts)
        self.__array_interface__: dict[str, Any] = {
            "version": 3,
            "shape": (sum(part.size for part in parts),),
            "typestr": parts[0].dtype.str,
            "data": (parts[0].ctypes.data, True),
        }


def views(
    layout: Layout, kids: Sequence[int], blocks: Mapping[int, Array], spares: Spares | None = None
) -> dict[int, Array]:
    """Return read-only arrays of these keys: where their values lie, if that is in one piece, or
    else copies. `blocks` (flat, stored dtype) are all here, and must not change any more."""
    bids = {bid for kid in kids for bid in layout.blocks_of_key[kid]}
    # A block of a thousand small keys is gone through once, not for each of them.
    places = {bid: ranges(layout.blocks[bid]) for bid in bids}
    seen = {kid: _view(layout, kid, blocks, places) for kid in kids}
    found = {kid: array for kid, array in seen.items() if array is not None}
    rest = [kid for kid in kids if kid not in found]
    copies = unpack_kids(layout, rest, blocks, spares=spares) if rest else {}
    for array in copies.values():
        array.flags.writeable = False
    return found | copies


def _view(
    layout: Layout,
    kid: int,
    blocks: Mapping[int, Array],
    places: Mapping[int, Mapping[int, tuple[int, int]]],
) -> Array | None:
    """Return a key's values where they lie, read-only; None: that is not in one piece."""
    spec, parts = layout.entries[kid].spec, []
    for bid in layout.blocks_of_key[kid]:
        start, stop = places[bid][kid]
        parts.append(blocks[bid][start:stop])
    for one, after in pairwise(parts):
        if one.ctypes.data + one.nbytes != after.ctypes.data:
            return None
    flat: Array = parts[0] if len(parts) == 1 else np.asarray(_Joined(parts))
    seen = user_view(flat, DTYPES[spec.dtype]).reshape(spec.shape)
    seen.flags.writeable = False
    return seen


def unpack(
    layout: Layout,
    kids: Sequence[int],
    blocks: Mapping[int, Array],
    parts: Mapping[int, Sequence[int]] | None = None,
) -> dict[Key, Array]:
    """Return fresh, writable arrays of these keys out of received blocks (see `Unpacking`).

    Names of tied keys give the same array.
    """
    arrays = unpack_kids(layout, kids, blocks, parts)
    return {key: arrays[kid] for key, kid in layout.kid_of.items() if kid in arrays}


def unpack_kids(
    layout: Layout,
    kids: Sequence[int],
    blocks: Mapping[int, Array],
    parts: Mapping[int, Sequence[int]] | None = None,
    spares: Spares | None = None,
) -> dict[int, Array]:
    """Return what `unpack` does, by the keys' numbers."""
    unpacking = Unpacking(layout, kids, spares)
    unpacking.take(blocks, parts)
    return unpacking.arrays()


def read_into(layout: Layout, kid: int, blocks: Mapping[int, Array], out: Any) -> None:
    """Write a key's values into a contiguous array of its shape and dtype, or into several of them.

    Raises:
        KeyMismatch: another shape or dtype, or its elements are not one run of memory.
    """
    spec = layout.entries[kid].spec
    if not isinstance(out, np.ndarray):
        for one in several.each(out):
            check_gradient(layout, spec.key, kid, one)
        several.write(spec.key, unpack_kids(layout, [kid], blocks)[kid], out)
        return
    dtype = check_gradient(layout, spec.key, kid, out)
    if not (out.flags.c_contiguous and out.flags.writeable):
        raise KeyMismatch(f"key {spec.key!r}: read_into takes a writable, C-contiguous array")
    flat = out.reshape(-1).view(dtype.stored)
    for bid in layout.blocks_of_key[kid]:
        start = 0
        for segment in layout.blocks[bid].segments:
            stop = start + segment.stop - segment.start
            if segment.kid == kid:
                flat[segment.start : segment.stop] = blocks[bid][start:stop]
            start = stop


def _size(shape: Sequence[int]) -> int:
    size = 1
    for extent in shape:
        size *= extent
    return size
