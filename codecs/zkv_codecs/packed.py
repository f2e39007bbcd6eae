"""What a codec is: a frozen value whose stages turn a small value, `Packed`, into another.

An array to be sent begins as a dense `Packed`: flat float32 `values`, nothing else. A sparsifier
leaves fewer values and says where they belong, a quantizer turns values into codes with scales, and
so on; decoding goes the same way back. A codec keeps no state: what it has to remember (a residual,
a warm start) goes in and comes out, so that its owner can adopt it or roll it back. Kernels come in
as a `Backend`, chance as a seed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import numpy as np

from zkv.dtypes import Array
from zkv_codecs.backend import Backend

State = tuple[Array, ...]
"""What a codec has to remember between two encodings of one block; never written to in place."""

ELEMENTS_MAX = 2**31 - 1
"""Elements in one array: counts and positions fit in an int32 on every device."""


GOLDEN = 0x9E3779B97F4A7C15
"""2**64 over the golden ratio: multiples of it spread evenly (Knuth, TAOCP 3, section 6.4)."""
SEED_BITS = (1 << 63) - 1


def seed_of(*names: int) -> int:
    """Return the seed, in [0, 2**63), of the encoding with these numbers (block, version, ...)."""
    seed = 0
    for name in names:
        seed = seed * GOLDEN + name
    return seed * GOLDEN & SEED_BITS


@dataclass(frozen=True, slots=True)
class Packed:
    """One array on its way through a codec. All arrays are flat and C-contiguous."""

    values: Array
    """float32 values, or a quantizer's codes."""
    shape: tuple[int, ...]
    """Of the dense array."""
    indices: Array | None = None
    """Positions of the values in the flat dense array: uint32, strictly ascending. None: all."""
    scales: Array | None = None
    """What a quantizer needs to decode: float32."""
    seed: int = 0
    """What a codec without indices on the wire draws positions from, in [0, 2**63)."""
    kept: int | None = None
    """How many values a sparsifier or a factorisation has left; None: as many as `indices`, or
    all."""
    before: Sizes | None = None
    """What went into a lossless stage. Not on the wire: a receiver knows it from the stages before
    that one, and sets it, and so bounds what is decompressed."""
    own: bool = field(default=False, compare=False, repr=False)
    """Whether `values` may be written over once they are encoded: by what error feedback leaves of
    them. It does not go on with what is sent."""

    def coded(self, values: Array, scales: Array | None) -> Packed:
        """Return the same with other values and scales, as a quantizer does for every block.

        `dataclasses.replace` would take as long as copying 64 KiB.
        """
        return Packed(
            values, self.shape, self.indices, scales, self.seed, self.kept, self.before, False
        )

    def lent(self) -> Packed:
        """Return the same, with values that may not be written over."""
        return self.coded(self.values, self.scales) if self.own else self

    @property
    def count(self) -> int:
        """How many elements are sent, in whatever form."""
        if self.kept is not None:
            return self.kept
        return self.size if self.indices is None else int(self.indices.size)

    @property
    def size(self) -> int:
        """Elements of the dense array."""
        size = 1
        for extent in self.shape:
            size *= extent
        return size


def dense(array: Array) -> Packed:
    """Return an array as a codec takes it: flat, float32, native byte order.

    A view where that is possible; anything else (strided, big-endian, float16, float64) is
    converted. NaN and Inf pass: whether they may be sent is decided before.

    Raises:
        TypeError: not a floating-point array.
        ValueError: more than 2**31 - 1 elements.
    """
    if array.dtype.kind != "f":
        raise TypeError(f"a codec takes floating-point arrays, not {array.dtype}")
    if array.size > ELEMENTS_MAX:
        raise ValueError(f"{array.size} elements in one array; cut it: {ELEMENTS_MAX} at most")
    with np.errstate(over="ignore"):
        flat = array.reshape(-1).astype(np.float32, order="C", copy=False)
    return Packed(flat, tuple(array.shape))


def left_over(packed: Packed, backend: Backend) -> Array:
    """Return the array that what is left of `packed` is written to: its own values, or a new one.

    Written over, a line of memory is read and written once; another one would be read besides.
    On a device a kernel's threads may still read what others have written over.
    """
    if packed.own and backend.xp is np:
        return packed.values
    fresh: Array = backend.xp.empty_like(packed.values)
    return fresh


def taken_back(now: Array, old: Array, new: Array) -> Array:
    """Return a residual `now` without the step from `old` to `new`.

    If no step came since, that is `old` to the bit; else old − new is added, so that what later
    steps put in stays.
    """
    return old if now is new else now + (old - new)


@dataclass(frozen=True, slots=True)
class Sizes:
    """What a stage puts on the wire for a given count of values that go in."""

    dtype: np.dtype
    """Of the values that come out."""
    values: int
    scales: int = 0
    at_most: bool = False
    """Whether there may be fewer values: how many depends on what they are."""


class Stage(ABC):
    """One step of a codec: a frozen dataclass, equal if its parameters are.

    `encode` must not change what it is given, and must give the same bits for the same input, seed
    and state, on every backend and however many threads run. `decode` undoes it as well as it can.
    """

    kind: ClassVar[str]
    """"sparsify", "quantize", "lowrank" or "lossless": which stages may follow which."""
    biased: ClassVar[bool] = True
    """Whether the mean of many encodings differs from what was given: error feedback wanted."""

    @property
    def grows(self) -> str:
        """Why a residual around it would grow without end; "" if it does not."""
        return ""

    feedback: ClassVar[bool] = True
    """Whether error feedback may be put around it: not if it has its own, or if its codes are votes
    and not values."""
    remembers: ClassVar[bool] = False
    """Whether it has a state: then it must be a chain's first stage."""
    positions_travel: ClassVar[bool] = True
    """Of a sparsifier: whether the receiver is told the positions, or draws them again."""
    votes: ClassVar[bool] = False
    """Whether what is decoded are votes: their sum is settled by majority, and not divided."""

    @property
    @abstractmethod
    def text(self) -> str:
        """The text that `zkv_codecs.spec` reads as this stage."""

    def start(self, shape: Sequence[int]) -> State:
        """Return the first state, for arrays of this shape."""
        return ()

    @abstractmethod
    def encode(
        self, packed: Packed, state: State, seed: int, backend: Backend
    ) -> tuple[Packed, State]:
        """Return what is sent instead of `packed`, and the next state."""

    @abstractmethod
    def decode(self, packed: Packed, backend: Backend) -> Packed:
        """Return what `encode` was given, as well as can be known: float32 values."""

    def encode_residual(
        self, packed: Packed, residual: Array | None, state: State, seed: int, backend: Backend
    ) -> tuple[Packed, Array, State]:
        """Encode `packed` + residual, and return what was sent and the new residual beside it.

        The new residual is what was given less what `decode` gives, of the size of
        `packed.values`. Stages override this where one kernel does it all in one pass.
        """
        values = packed.values if residual is None else packed.values + residual
        given = replace(packed, values=values, own=False)
        sent, state = self.encode(given, state, seed, backend)
        return sent, values - self.decode(sent, backend).values, state

    def add(self, packed: Packed, weight: float, total: Array, backend: Backend) -> None:
        """Add weight · decode(packed) to `total`, in place: float32 or float64, flat and dense.

        Each product is rounded to the dtype of `total` and then added, as `zkv.sums.weighted` and
        an addition do, so that a fused kernel gives the same bits.
        """
        decoded = self.decode(packed, backend).values.astype(total.dtype, copy=False)
        total += decoded if weight == 1.0 else decoded * total.dtype.type(weight)

    def owes(self, state: State) -> Array | None:
        """Return what the state keeps back of the arrays that were given."""
        return None

    def finite(self, codes: Array) -> bool:
        """Return whether codes that a peer has sent stand for finite numbers, given finite scales.

        Float32 values are looked at; codes of a stage that can express others override this.
        """
        return codes.dtype.kind != "f" or bool(np.isfinite(codes).all())

    def positions(self, packed: Packed, backend: Backend) -> Array:
        """Return where the values of a sparsifier belong: positions in the flat dense array."""
        assert packed.indices is not None
        return packed.indices

    @abstractmethod
    def sizes(self, count: int) -> Sizes:
        """Return what is sent for `count` float32 values of a flat array."""

    def sizes_after(self, given: Sizes, shape: Sequence[int]) -> Sizes:
        """Return what is sent when `given` goes in; a receiver refuses anything else.

        `shape` is the dense array's. Only stages that look at more than the count override this.
        """
        return self.sizes(given.values)

    def restore(self, now: State, old: State, new: State) -> State:
        """Return the state `now` without the step that led from `old` to `new`.

        By default what is remembered is only a start for the next step, and any will do.
        """
        return now
