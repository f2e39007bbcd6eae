"""Stages one after the other: a sparsifier or low-rank step, then a quantizer, then a lossless one.

The receiver of a chain needs no more than its text and what was sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from zkv.dtypes import Array
from zkv_codecs.backend import Backend
from zkv_codecs.packed import Packed, Sizes, Stage, State

ORDER = ("sparsify", "lowrank", "quantize", "lossless")
"""Which kind may stand before which; each at most once, and not both of the first two."""


@dataclass(frozen=True, slots=True)
class Chain(Stage):
    """A codec's stages; none of them: float32 values as they are.

    Raises:
        ValueError: stages that do not fit together; the text says why.
    """

    kind: ClassVar[str] = "chain"
    stages: tuple[Stage, ...] = ()

    def __post_init__(self) -> None:
        ranks = [ORDER.index(stage.kind) for stage in self.stages]
        for (before, first), (after, second) in zip(
            zip(self.stages, ranks, strict=True),
            list(zip(self.stages, ranks, strict=True))[1:],
            strict=False,
        ):
            if second <= first or (first, second) == (0, 1):
                raise ValueError(
                    f"{before.text}+{after.text}: {_why(before.kind, after.kind)}; a codec is at "
                    "most one of topk, randomk, threshold, powersgd, ..., then a quantizer, then "
                    "zstd or lz4"
                )
            if after.remembers:
                raise ValueError(
                    f"{before.text}+{after.text}: {after.text} remembers every element, and gets "
                    "other ones each time; let it be the first stage"
                )

    @property
    def text(self) -> str:
        """The stages' texts joined by +, or "none"."""
        return "+".join(stage.text for stage in self.stages) or "none"

    @property
    def is_vote(self) -> bool:
        """Whether its values are votes (see `Stage.votes`)."""
        return any(stage.votes for stage in self.stages)

    @property
    def sparse(self) -> bool:
        """Whether it sends some elements only."""
        return bool(self.stages) and self.stages[0].kind == "sparsify"

    def start(self, shape: Sequence[int]) -> State:
        """See `Stage.start`: the first stage's, as no other has one."""
        return self.stages[0].start(shape) if self.stages else ()

    def encode(
        self, packed: Packed, state: State, seed: int, backend: Backend
    ) -> tuple[Packed, State]:
        """See `Stage.encode`."""
        for at, stage in enumerate(self.stages):
            packed, own = stage.encode(packed, () if at else state, seed, backend)
            state = state if at else own
        return packed, state

    def encode_residual(
        self, packed: Packed, residual: Array | None, state: State, seed: int, backend: Backend
    ) -> tuple[Packed, Array, State]:
        """See `Stage.encode_residual`."""
        if not self.stages:
            values = packed.values if residual is None else packed.values + residual
            return replace(packed, values=values), backend.xp.zeros_like(values), state
        if len(self.stages) == 1:
            return self.stages[0].encode_residual(packed, residual, state, seed, backend)
        first, rest = self.stages[0], Chain(self.stages[1:])
        exact = all(stage.kind == "lossless" for stage in rest.stages)
        if not exact and first.kind != "sparsify":
            return Stage.encode_residual(self, packed, residual, state, seed, backend)
        sent, left, state = first.encode_residual(packed, residual, state, seed, backend)
        sent = sent.lent()
        if exact:
            return rest.encode(sent, (), seed, backend)[0], left, state
        # What a quantizer cuts off belongs to the elements that were chosen.
        places = first.positions(sent, backend)
        sent, errors, _ = rest.encode_residual(sent, None, (), seed, backend)
        left[places] = errors
        return sent, left, state

    def decode(self, packed: Packed, backend: Backend) -> Packed:
        """See `Stage.decode`."""
        for stage in reversed(self.stages):
            packed = stage.decode(packed, backend)
        return packed

    def add(self, packed: Packed, weight: float, total: Array, backend: Backend) -> None:
        """See `Stage.add`; only what the first stage is given back exists between."""
        if not self.stages:
            Stage.add(self, packed, weight, total, backend)
            return
        packed = Chain(self.stages[1:]).decode(packed, backend)
        self.stages[0].add(packed, weight, total, backend)

    def chosen(self, packed: Packed, backend: Backend) -> tuple[Array, Array]:
        """Return what a sparse chain has sent: float32 values, and their positions (uint32,
        strictly ascending) in the flat dense array. Neither may be written to."""
        packed = Chain(self.stages[1:]).decode(packed, backend)
        return packed.values, self.stages[0].positions(packed, backend)

    def sizes(self, count: int) -> Sizes:
        """See `Stage.sizes`."""
        return self.sizes_after(Sizes(np.dtype(np.float32), count), (count,))

    def sizes_after(self, given: Sizes, shape: Sequence[int]) -> Sizes:
        """See `Stage.sizes_after`."""
        for stage in self.stages:
            after = stage.sizes_after(given, shape)
            given = replace(after, scales=max(given.scales, after.scales))
        return given

    def owes(self, state: State) -> Array | None:
        """See `Stage.owes`."""
        return self.stages[0].owes(state) if self.stages else None

    def restore(self, now: State, old: State, new: State) -> State:
        """See `Stage.restore`."""
        return self.stages[0].restore(now, old, new) if self.stages else now


def _why(first: str, second: str) -> str:
    if first == second:
        return f"two stages that {first}"
    names = {"sparsify": "choose elements", "lowrank": "factorise"}
    if second in names and first in names:
        return f"one stage can {names[first]}, or another {names[second]}, not both"
    return f"a stage that can {names.get(second, second)} comes first"
