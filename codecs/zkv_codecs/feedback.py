"""What a sender remembers so that nothing is lost: error feedback, and the memory of DGC.

A `Codec` is what a user chooses: a chain, and a memory around it. The chain that a frame was made
with travels with the frame, as it may be another one from step to step.

Error feedback (Seide et al., Interspeech 2014; Karimireddy et al., ICML 2019): t = g + e is sent as
c = decode(encode(t)), and e' = t − c stays. The sum of all that was received, and the residual, are
the sum of all that was given, to rounding.

DGC (Lin et al., ICLR 2018, arXiv:1712.01887, section 3): u = m·u + g and v = v + u before choosing;
what was sent leaves v (momentum correction), and u of the chosen elements becomes 0 (momentum
factor masking). The share of chosen elements falls in the warm-up from 25 % by equal factors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from zkv.dtypes import Array
from zkv_codecs.backend import NUMPY, Backend
from zkv_codecs.chain import Chain
from zkv_codecs.packed import Packed, State, taken_back

WARMUP_FROM = 0.25
"""The share of elements that DGC sends first."""


@dataclass(frozen=True, slots=True)
class Encoded:
    """What is sent of one array: `packed`, which `chain` decodes."""

    chain: Chain
    packed: Packed

    @property
    def nbytes(self) -> int:
        """Bytes of its arrays in memory."""
        packed = self.packed
        arrays = (packed.values, packed.indices, packed.scales)
        return sum(array.nbytes for array in arrays if array is not None)


@dataclass(frozen=True, slots=True)
class Codec:
    """A chain with no memory of its own: what it cuts off is lost."""

    chain: Chain = field(default_factory=Chain)

    @property
    def text(self) -> str:
        """What `zkv_codecs.spec.codec` reads as this codec."""
        return self.chain.text

    def __str__(self) -> str:
        return self.text

    @property
    def lossy(self) -> bool:
        """Whether what arrives is not always what was given."""
        return any(stage.kind != "lossless" for stage in self.chain.stages)

    def start(self, shape: Sequence[int]) -> State:
        """Return the first state for arrays of this shape."""
        return self.chain.start(shape)

    def carried(self, state: State) -> Array | None:
        """Return what a state still owes to the receiver, to be added to the next array."""
        return self.chain.owes(state)

    def encode(
        self, packed: Packed, state: State, seed: int, backend: Backend = NUMPY
    ) -> tuple[Encoded, State]:
        """Encode a dense array; return what is sent and the next state. `state` stays as it is."""
        sent, state = self.chain.encode(packed.lent(), state, seed, backend)
        return Encoded(self.chain, sent), state

    def restore(self, now: State, old: State, new: State) -> State:
        """Return the state `now` without the encoding that led from `old` to `new`.

        It is what a cancelled contribution asks for. Where nothing was encoded since (`now` is
        `new`) that is `old` to the bit; else old − new is added, so that what later encodings put
        in stays.
        """
        return self.chain.restore(now, old, new)


@dataclass(frozen=True, slots=True)
class ErrorFeedback(Codec):
    """A chain whose error is added to the next array. State: the residual, then the chain's."""

    def __post_init__(self) -> None:
        for stage in self.chain.stages:
            if not stage.feedback:
                raise ValueError(f"{self.chain.text}+ef: {stage.text} has no use for a residual")
            if stage.grows:
                raise ValueError(f"{self.chain.text}+ef: the residual would grow: {stage.grows}")
        if not self.chain.stages:
            raise ValueError("none+ef: nothing is cut off, so there is nothing to feed back")

    @property
    def text(self) -> str:
        """The chain's text with +ef."""
        return f"{self.chain.text}+ef"

    def start(self, shape: Sequence[int]) -> State:
        """See `Codec.start`: a residual of zeros."""
        return (_zeros(shape), *self.chain.start(shape))

    def carried(self, state: State) -> Array | None:
        """See `Codec.carried`: the residual."""
        return state[0]

    def encode(
        self, packed: Packed, state: State, seed: int, backend: Backend = NUMPY
    ) -> tuple[Encoded, State]:
        """See `Codec.encode`."""
        residual, *own = state
        sent, left, kept = self.chain.encode_residual(packed, residual, tuple(own), seed, backend)
        return Encoded(self.chain, sent.lent()), (left, *kept)

    def restore(self, now: State, old: State, new: State) -> State:
        """See `Codec.restore`."""
        return (taken_back(now[0], old[0], new[0]), *self.chain.restore(now[1:], old[1:], new[1:]))


@dataclass(frozen=True, slots=True)
class Dgc(Codec):
    """A sparsifying chain with DGC's memory. State: u, v, and how many arrays were encoded.

    `warmup` is how many encodings it takes from 25 % of the elements to the sparsifier's own share,
    by equal factors. Clipping is the optimizer's (`clip_global_norm`).
    """

    momentum: float = 0.9
    warmup: int = 0

    def __post_init__(self) -> None:
        if not self.chain.sparse or not hasattr(self.chain.stages[0], "ratio"):
            raise ValueError(
                f"{self.chain.text}+dgc: DGC chooses a share of the elements; give it topk:R, "
                "topk_sampled:R or randomk:R first"
            )
        if not 0.0 <= self.momentum < 1.0:
            raise ValueError(f"dgc:{self.momentum!r}: the momentum is at least 0 and below 1")
        if self.warmup < 0:
            raise ValueError(f"dgc: warmup={self.warmup}: it is a number of steps, at least 0")

    @property
    def text(self) -> str:
        """The chain's text with +dgc:M."""
        warmup = f",warmup={self.warmup}" if self.warmup else ""
        return f"{self.chain.text}+dgc:{self.momentum!r}{warmup}"

    def start(self, shape: Sequence[int]) -> State:
        """See `Codec.start`."""
        return (_zeros(shape), _zeros(shape), np.zeros((), np.int64))

    def carried(self, state: State) -> Array | None:
        """See `Codec.carried`: v."""
        return state[1]

    def chain_at(self, step: int) -> Chain:
        """Return the chain of the encoding after `step` others."""
        first = self.chain.stages[0]
        ratio: float = first.ratio  # type: ignore[attr-defined]
        if step >= self.warmup or ratio >= WARMUP_FROM:
            return self.chain
        share = WARMUP_FROM * (ratio / WARMUP_FROM) ** (step / self.warmup)
        # Three digits travel in every frame, and say it well enough.
        wide = replace(first, ratio=float(f"{share:.3g}"))  # type: ignore[type-var]
        return Chain((wide, *self.chain.stages[1:]))

    def encode(
        self, packed: Packed, state: State, seed: int, backend: Backend = NUMPY
    ) -> tuple[Encoded, State]:
        """See `Codec.encode`."""
        u, v, count = state
        chain = self.chain_at(int(count))
        u = u * np.float32(self.momentum) + packed.values
        moved = replace(packed, values=u, own=False)
        sent, left, _ = chain.encode_residual(moved, v, (), seed, backend)
        first = chain.stages[0]
        chosen = Chain(chain.stages[1:]).decode(sent, backend)
        u[first.positions(chosen, backend)] = 0
        return Encoded(chain, sent), (u, left, count + 1)

    def restore(self, now: State, old: State, new: State) -> State:
        """See `Codec.restore`. The warm-up goes on."""
        return (taken_back(now[0], old[0], new[0]), taken_back(now[1], old[1], new[1]), now[2])


def _zeros(shape: Sequence[int]) -> Array:
    return np.zeros(int(np.prod(shape, dtype=np.int64)), np.float32)
