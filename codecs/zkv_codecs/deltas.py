"""Parameters on their way down as versioned deltas: what a receiver adds to what it holds.

The sender keeps, beside its exact values w, the view x that all receivers hold. At each version

    d = decode(encode(w[v+1] − x[v])),  x[v+1] = x[v] + d

so what a codec cuts off stays in w − x and is in the next delta: that is error feedback (Seide et
al., Interspeech 2014), and x never drifts from w by more than what one encoding cuts off. Whoever
holds x of some version gets the deltas since, and adds the same numbers in the same order, so that
it has the same bits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from zkv.data_messages import Block, Delta
from zkv.dtypes import Array
from zkv.errors import ProtocolError
from zkv_codecs.backend import Backend
from zkv_codecs.feedback import Codec, Encoded, ErrorFeedback
from zkv_codecs.frames import ALIGNMENT, aligned, from_payload, to_payload
from zkv_codecs.packed import Packed, State
from zkv_codecs.plan import Plan, plan

KEPT = 8
"""Deltas that a view keeps: a receiver that is more versions behind gets all values."""


def down_plan(text: str) -> Plan:
    """Return the plan of this text, for parameters.

    Raises:
        ValueError: no plan, or a codec of it cannot carry deltas; the text says why.
    """
    chosen = plan(text)
    if chosen.adaptive is not None:
        raise ValueError(
            f"codec_down {chosen.adaptive.text}: what adapts does so by gradients; choose a codec "
            "for parameters, such as int8"
        )
    for one in chosen.codecs():
        if type(one) is not Codec:
            raise ValueError(
                f"codec_down {one.text}: versioned deltas are error feedback by themselves; "
                f"give {one.chain.text}"
            )
        if any(stage.kind == "lowrank" for stage in one.chain.stages):
            raise ValueError(
                f"codec_down {one.text}: its bits are not the same on every machine, so workers "
                "would not hold the same model; choose another codec, such as int8"
            )
        if one.lossy:
            try:
                ErrorFeedback(one.chain)
            except ValueError as error:
                text = f"codec_down {one.text}: deltas are error feedback, and {error}"
                raise ValueError(text) from None
    return chosen


@dataclass(slots=True)
class View:
    """What all receivers hold of one block, at `version`: flat float32, never written to.

    `since` is the first version whose holders may be sent deltas.
    """

    version: int
    values: Array
    since: int
    _state: State | None = None
    _kept: deque[tuple[Delta, Array]] = field(default_factory=lambda: deque(maxlen=KEPT))
    """What led to each of the last versions."""

    def advance(
        self, target: Array, shape: Sequence[int], codec: Codec, seed: int, backend: Backend
    ) -> None:
        """Go to the next version, as near to `target` (flat float32) as the codec comes.

        Where a number is not finite the view is the target itself, and nobody is sent deltas that
        begin earlier: what codecs make of NaN or Inf is nothing to go on from.
        """
        self.version += 1
        with np.errstate(all="ignore"):
            error = target - self.values
        if np.isfinite(error).all():
            state = codec.start(shape) if self._state is None else self._state
            encoded, self._state = codec.encode(Packed(error, tuple(shape)), state, seed, backend)
            fresh = _added(self.values, [encoded], backend)
            if np.isfinite(fresh).all():
                form, payload = to_payload(encoded)
                self._kept.append((Delta(encoded.chain.text, form, payload.nbytes), payload))
                self.values = fresh
                return
        self.values, self.since, self._state = target.copy(), self.version, None
        self._kept.clear()

    def after(self, base: int) -> tuple[tuple[Delta, ...], Array] | None:
        """Return the deltas that lead from version `base` to this one, and their payload.

        None if they are not kept, or are no fewer bytes than the values.
        """
        count = self.version - base
        if base < self.since or not 0 <= count <= len(self._kept):
            return None
        chosen = list(self._kept)[len(self._kept) - count :]
        if sum(_room(delta.size) for delta, _ in chosen) >= self.values.nbytes:
            return None
        payload = np.zeros(sum(_room(delta.size) for delta, _ in chosen), np.uint8)
        at = 0
        for delta, part in chosen:
            payload[at : at + delta.size] = part
            at += _room(delta.size)
        return tuple(delta for delta, _ in chosen), payload


def arrived(
    message: Block,
    payload: Array,
    shape: tuple[int, ...],
    held: tuple[int, Array] | None,
    backend: Backend,
) -> Array:
    """Return the float32 values (flat, fresh) of a block that came as deltas or by a codec.

    `held` is a version of the block and its values, which may be newer than the deltas' base.

    Raises:
        ProtocolError: they do not begin at or before what is held, or their bytes are wrong.
    """
    payload = aligned(payload)
    if message.base < 0:
        if message.form is None:
            raise ProtocolError(f"block {message.bid}: codec {message.codec}, and no form")
        encoded = from_payload(message.codec, message.form, payload, shape)
        values: Array = encoded.chain.decode(encoded.packed, backend).values
        return values
    steps = message.version - message.base
    if len(message.deltas) != steps:
        raise ProtocolError(
            f"block {message.bid}: {len(message.deltas)} deltas from version {message.base} to "
            f"{message.version}"
        )
    version, values = held if held is not None else (-1, np.empty(0, np.float32))
    if held is None or not message.base <= version <= message.version:
        raise ProtocolError(
            f"block {message.bid}: deltas from version {message.base} to {message.version}, while "
            f"{f'version {version}' if held is not None else 'nothing'} is held"
        )
    size = int(np.prod(shape, dtype=np.int64))
    if values.size != size or values.dtype != np.float32:
        raise ProtocolError(f"block {message.bid}: deltas for {size} float32, {values.size} held")
    found, at = [], 0
    for delta in message.deltas:
        part = payload[at : at + delta.size]
        if part.size != delta.size:
            break
        found.append(from_payload(delta.codec, delta.form, part, shape))
        at += _room(delta.size)
    if len(found) != steps or at != payload.size:
        expected = sum(_room(delta.size) for delta in message.deltas)
        raise ProtocolError(
            f"block {message.bid}: {payload.size} bytes of deltas, {expected} expected"
        )
    return _added(values, found[version - message.base :], backend)


def _added(values: Array, steps: Sequence[Encoded], backend: Backend) -> Array:
    """Return a fresh array: the values and what these decode to, added one after the other."""
    fresh = values.copy()
    with np.errstate(all="ignore"):
        for one in steps:
            one.chain.add(one.packed, 1.0, fresh, backend)
    return fresh


def _room(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
