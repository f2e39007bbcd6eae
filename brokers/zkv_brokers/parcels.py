"""The state of a block as bytes on their way to another server: values, optimizer state, the view
that workers hold, what open gradients were computed on, and the marks of what is settled.

One stream: a head that says what follows, then the arrays, each at a multiple of 8. It is cut into
parts of about 1 MiB. Knows no sockets and no log.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np

from zkv.dtypes import Array
from zkv.errors import ProtocolError
from zkv.marks import Marks
from zkv.wire import BlockSpec, Frozen, Int, Name, UInt
from zkv_brokers.bases import Bases
from zkv_brokers.store import BlockState, Pinned, Store
from zkv_codecs.deltas import View

PART_BYTES = 1024 * 1024
ALIGNMENT = 8


class Head(Frozen, frozen=True):
    """What a stream holds. The arrays: values, a master copy if there is one, `slots`, the view if
    there is one, and `bases`."""

    dtypes: list[Name]
    """Of all arrays (NumPy's names), which have the block's size."""
    master: bool
    rule: Name
    slots: UInt
    counts: list[tuple[UInt, UInt]]
    changed: UInt
    view: Int
    """The version of the view; -1: there is none."""
    bases: list[tuple[UInt, UInt, UInt]]
    """(incarnation, grant, which of the last arrays)."""
    marks: list[tuple[UInt, UInt, list[UInt]]]
    """Of the block's group: (incarnation, all settled up to, others that are settled)."""


@dataclass(slots=True)
class Unpacked:
    """What a stream was made of."""

    state: BlockState
    view: View | None
    bases: dict[tuple[int, int], Pinned]
    marks: dict[int, Marks] = field(default_factory=dict)


_heads = msgspec.msgpack.Decoder(Head)


def pack(
    store: Store, bases: Bases, block: BlockSpec, marks: Iterable[tuple[int, Marks]]
) -> tuple[int, Array]:
    """Return a block's state as it is now: the bytes of the head, and the stream (flat uint8)."""
    head, arrays = collected(store, bases, block, marks)
    return _joined(msgspec.msgpack.encode(head), arrays)


def collected(
    store: Store, bases: Bases, block: BlockSpec, marks: Iterable[tuple[int, Marks]]
) -> tuple[Head, list[Array]]:
    """Return what a block's state is, and its arrays themselves, none of them copied."""
    state, view = store.blocks[block.bid], store.views.kept(block.bid)
    arrays = [state.current.values]
    arrays += [] if state.master is None else [state.master]
    arrays += state.slots
    arrays += [] if view is None else [view.values]
    which: dict[int, int] = {}
    held = []
    for (incarnation, grant), pinned in bases.of_block(block.bid):
        if id(pinned) not in which:
            which[id(pinned)] = len(which)
            arrays.append(pinned.values)
        held.append((incarnation, grant, which[id(pinned)]))
    head = Head(
        [array.dtype.name for array in arrays],
        state.master is not None,
        state.rule,
        len(state.slots),
        sorted(state.counts.items()),
        state.changed,
        -1 if view is None else view.version,
        held,
        [(who, one.high, sorted(one.above)) for who, one in marks],
    )
    return head, arrays


def _joined(head: bytes, arrays: Sequence[Array]) -> tuple[int, Array]:
    at = _room(len(head))
    stream = np.zeros(at + sum(_room(array.nbytes) for array in arrays), np.uint8)
    stream[: len(head)] = np.frombuffer(head, np.uint8)
    for array in arrays:
        stream[at : at + array.nbytes] = np.ascontiguousarray(array).view(np.uint8)
        at += _room(array.nbytes)
    return len(head), stream


def unpack(head_bytes: int, stream: Array, size: int) -> Unpacked:
    """Return what a stream of a block of `size` elements holds, in arrays of their own.

    Raises:
        ProtocolError: it is none.
    """
    try:
        head = _heads.decode(stream[:head_bytes].tobytes())
        at, arrays = _room(head_bytes), list[Array]()
        for name in head.dtypes:
            nbytes = np.dtype(name).itemsize * size
            arrays.append(stream[at : at + nbytes].copy().view(name))
            at += _room(nbytes)
        if at != stream.size:
            raise ValueError(f"{stream.size} bytes where {at} are described")
        return assembled(head, arrays)
    except (ValueError, TypeError, StopIteration, IndexError, RecursionError) as error:
        raise ProtocolError(f"no state of a block of {size} elements: {error}") from error


def assembled(head: Head, arrays: Sequence[Array]) -> Unpacked:
    """Return the state that has this head and these arrays, which it takes over.

    Raises:
        StopIteration, IndexError: they are fewer than the head says.
    """
    rest = iter(arrays)
    state = BlockState(Pinned(next(rest)), next(rest) if head.master else None, head.rule)
    state.slots = tuple([next(rest) for _ in range(head.slots)])
    state.counts, state.changed = dict(head.counts), head.changed
    view = View(head.view, next(rest), head.view) if head.view >= 0 else None
    pinned = [Pinned(array) for array in rest]
    bases = {(who, grant): pinned[which] for who, grant, which in head.bases}
    marks = {who: Marks(high, set(above)) for who, high, above in head.marks}
    return Unpacked(state, view, bases, marks)


def _room(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def parts_of(stream: Array) -> int:
    """Return how many parts a stream is cut into."""
    return max(1, -(-stream.size // PART_BYTES))


def part(stream: Array, at: int) -> Array:
    """Return one part."""
    return stream[at * PART_BYTES : (at + 1) * PART_BYTES]
