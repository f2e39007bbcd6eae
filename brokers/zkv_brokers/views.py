"""How a server sends the model to those who compute on it: by the codecs of the plan `codec_down`.

For a block with a codec that cuts something off it keeps the view that all workers hold, and the
deltas of the last versions (`zkv_codecs.deltas`). A lossless codec only packs the values. Other
blocks, other groups, and reads of the exact values have nothing to do with this. Knows no log.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from zkv import control as c
from zkv.data_messages import Form
from zkv.dtypes import Array
from zkv.layout import Layout
from zkv.wire import BlockSpec
from zkv_codecs.backend import Backend
from zkv_codecs.deltas import View
from zkv_codecs.feedback import Codec
from zkv_codecs.frames import to_payload
from zkv_codecs.packed import dense, seed_of
from zkv_codecs.plan import NONE, Plan

DTYPE = "float32"
"""Of the blocks that codecs are for: halves are small already, and need no float32 view."""


@dataclass(frozen=True, slots=True)
class _Packed:
    """A block's present values as a lossless codec has packed them; None: it gains nothing."""

    form: Form
    payload: Array


class Views:
    """The views of one server's blocks; `layout` is shared with the shard."""

    def __init__(self, layout: Layout, backend: Backend) -> None:
        self._layout = layout
        self._backend = backend
        self.plan = Plan()
        self._codecs: dict[int, Codec] = {}
        self._views: dict[int, View] = {}
        self._packed: dict[int, _Packed] = {}

    def use(self, chosen: Plan) -> bool:
        """Send by this plan from now on: with another one, the next grants begin with values.

        Return whether it is another one.
        """
        if chosen == self.plan:
            return False
        self.plan = chosen
        for kept in (self._codecs, self._views, self._packed):
            kept.clear()
        return True

    def go_by(self, chosen: Plan) -> None:
        """As `use`, of a copy that grants nothing."""
        self.use(chosen)

    def _codec(self, block: BlockSpec) -> Codec:
        codec = self._codecs.get(block.bid)
        if codec is None:
            fits = self._layout.dtype(block).name == DTYPE
            codec = self.plan.for_block(self._layout, block) if fits else NONE
            self._codecs[block.bid] = codec
        return codec

    def at(self, block: BlockSpec, values: Array, version: int) -> View | None:
        """Return the view of a block at this version; None: workers get the values themselves.

        The first view is a copy of the values, which a commit may write to in place.
        """
        view = self._views.get(block.bid)
        if view is None and self._codec(block).lossy:
            view = self._views[block.bid] = View(version, values.copy(), version)
        return view

    def committed(self, block: BlockSpec, values: Array) -> None:
        """The block's values are those of the next version of the model."""
        self._packed.pop(block.bid, None)
        view = self._views.get(block.bid)
        if view is not None:
            seed = seed_of(block.bid + 1, view.version + 1)
            shape = self._layout.shape(block)
            view.advance(values, shape, self._codec(block), seed, self._backend)

    def coded(
        self, block: BlockSpec, values: Array, entry: c.Grant
    ) -> tuple[dict[str, Any], Array | None]:
        """Return how a block of a grant is sent: fields of its message, and the payload.

        None: as the values that were given, those of the view where there is one.
        """
        view = self._views.get(block.bid)
        if view is not None:
            found = view.after(entry.held) if entry.held >= 0 else None
            if found is None:
                return {}, None
            deltas, payload = found
            return {"base": entry.held, "deltas": deltas}, payload
        codec = self._codec(block)
        if not codec.chain.stages:
            return {}, None
        packed = self._packed.get(block.bid)
        if packed is None:
            given = replace(dense(values), shape=self._layout.shape(block))
            encoded, _ = codec.encode(given, codec.start(given.shape), 0, self._backend)
            packed = self._packed[block.bid] = _Packed(*to_payload(encoded))
        if packed.payload.nbytes >= values.nbytes:
            return {}, None
        return {"codec": codec.text, "form": packed.form}, packed.payload

    def kept(self, bid: int) -> View | None:
        """Return the view of a block, if it has one by now."""
        return self._views.get(bid)

    def adopt(self, bid: int, view: View | None) -> None:
        """Go on from a view that another server has kept."""
        self.drop(bid)
        if view is not None:
            self._views[bid] = view

    def cut(self, bid: int, values: Array) -> None:
        """A key has left the block, whose values are these now; nobody holds them yet."""
        self._codecs.pop(bid, None)
        self._packed.pop(bid, None)
        view = self._views.get(bid)
        if view is not None:
            self._views[bid] = View(view.version, values.copy(), view.version + 1)

    def drop(self, bid: int) -> None:
        """Forget a block."""
        for kept in (self._codecs, self._views, self._packed):
            kept.pop(bid, None)
