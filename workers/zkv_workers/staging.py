"""Gradients on their way from devices: taken in the caller's order, encoded and copied beside it.

Who pushes a gradient that is on a device waits for nothing. It is copied on the device, in the
order of the caller's current stream there, so it may be overwritten in that order as soon as `push`
returns. All else is done behind an event on the encoder's own stream, by whoever seals the blocks:
a worker's pipeline. Only there anybody waits for a device: for whether all is finite, and for what
was copied into pinned memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from zkv.dtypes import Array, DType
from zkv.layout import Layout
from zkv.wire import BlockSpec
from zkv_workers import devices, lanes
from zkv_workers.encoding import Encoder, Sealed

AHEAD = 2
"""Blocks that are encoded while those before them are still on their way to the host."""


@dataclass(slots=True)
class Piece:
    """A stretch of a key's stored values, where it lies, and the event behind which it is there."""

    start: int
    stop: int
    values: Any
    ready: Any = None

    @property
    def home(self) -> int:
        """See `devices.home`."""
        return devices.home(self.values)


@dataclass(slots=True)
class Staged:
    """One key's gradient on devices: in pieces that cover it, which blocks do not straddle."""

    kid: int
    dtype: DType
    nbytes: int
    pieces: Callable[[], Sequence[Piece]]
    """What combines several devices' gradients does so when it is first asked."""
    done: Callable[[], None] = lambda: None
    """Waits for all that still reads them."""

    def fetching(self) -> Callable[[], Array]:
        """Begin to copy the whole to the host; return what waits for it and returns it, once."""
        copies: list[lanes.Copy] = []
        found = []
        for piece in self.pieces():
            if piece.home == devices.HOST:
                found.append(piece.values)
                continue
            lane = lanes.lane(piece.home)
            with lane.working([piece.ready]):
                found.append(devices.own(piece.values, None))
                copies += lane.taken()

        def arrived() -> Array:
            for copy in copies:
                copy.wait()
            self.done()
            return found[0] if len(found) == 1 else np.concatenate(found)

        return arrived


def taken(kid: int, array: Any, dtype: DType) -> Staged:
    """Return one device's gradient, copied in the order of the caller's current stream there."""
    with lanes.on(devices.home(array)):
        flat = devices.stored_view(array, dtype)
        if flat.size:
            # Nobody else's memory: a view of the caller's may be one.
            flat = flat.copy()
        piece = Piece(0, flat.size, flat, lanes.mark())
    return Staged(kid, dtype, flat.nbytes, lambda: (piece,))


def sealed(
    layout: Layout,
    blocks: Sequence[BlockSpec],
    staged: Staged,
    encoder: Encoder,
    batch: int,
) -> Iterator[tuple[int, Sealed] | None]:
    """Yield the blocks of a key that has them for itself as they travel, each once it is here.

    None: the key is skipped.

    Raises:
        PushRefused: it has NaN or Inf, which its codec cannot send.
    """
    if not encoder.on_device(layout, staged.kid):
        yield from _sealed_on_host(layout, blocks, staged, encoder, batch)
        return
    pieces = staged.pieces()
    under_way: deque[tuple[int, Sealed, list[lanes.Copy]]] = deque()
    try:
        admitted = [_admitted(layout, piece, staged.kid, encoder) for piece in pieces]
        if any(values is None for values in admitted):
            yield None
            return
        for block in blocks:
            under_way.append(_encoded(layout, block, pieces, admitted, encoder, batch))
            if len(under_way) > AHEAD:
                yield _arrived(under_way.popleft())
        while under_way:
            yield _arrived(under_way.popleft())
    finally:
        # Memory that is given away must not be read any more.
        for _, _, copies in under_way:
            for copy in copies:
                copy.wait()
        for piece in pieces:
            with devices.working(piece.home):
                pass
        staged.done()


def _sealed_on_host(
    layout: Layout, blocks: Sequence[BlockSpec], staged: Staged, encoder: Encoder, batch: int
) -> Iterator[tuple[int, Sealed] | None]:
    """The same where a codec has no kernels for devices."""
    flat = encoder.admit(layout, staged.kid, staged.fetching()())
    if flat is None:
        yield None
        return
    for block in blocks:
        only = block.segments[0]
        yield block.bid, encoder.encode(layout, block, flat[only.start : only.stop], batch)


def _admitted(layout: Layout, piece: Piece, kid: int, encoder: Encoder) -> Any:
    if piece.home == devices.HOST:
        return encoder.admit(layout, kid, piece.values, piece.start)
    with lanes.lane(piece.home).working([piece.ready]):
        return encoder.admit(layout, kid, piece.values, piece.start)


def _encoded(
    layout: Layout,
    block: BlockSpec,
    pieces: Sequence[Piece],
    admitted: Sequence[Any],
    encoder: Encoder,
    batch: int,
) -> tuple[int, Sealed, list[lanes.Copy]]:
    only = block.segments[0]
    at = next(
        number
        for number, piece in enumerate(pieces)
        if piece.start <= only.start and only.stop <= piece.stop
    )
    low = pieces[at].start
    values, home = admitted[at][only.start - low : only.stop - low], pieces[at].home
    if home == devices.HOST:
        return block.bid, encoder.encode(layout, block, values, batch), []
    lane = lanes.lane(home)
    with lane.working():
        return block.bid, encoder.encode(layout, block, values, batch), lane.taken()


def _arrived(one: tuple[int, Sealed, list[lanes.Copy]]) -> tuple[int, Sealed]:
    bid, payload, copies = one
    for copy in copies:
        copy.wait()
    return bid, payload
