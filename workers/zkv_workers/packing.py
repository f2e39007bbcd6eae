"""From a user's arrays to blocks: gradients are packed (`unpacking` is the way back).

Each copy happens here and only once. What is packed is the project's own memory, so the caller may
do what it likes with its array as soon as the call returns.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from zkv.dtypes import DTYPES, Array, DType, dtype_of
from zkv.errors import KeyMismatch
from zkv.layout import Layout
from zkv.wire import BlockSpec
from zkv_workers import devices, several, staging
from zkv_workers.bucket import Bucket, ranges
from zkv_workers.encoding import Encoder, Sealed

Key = str | int


def check_gradient(layout: Layout, key: Key, kid: int, array: Any) -> DType:
    """Check a pushed array against its key's spec and return the dtype.

    Raises:
        KeyMismatch: shape or dtype differ; both sides' are named. Nothing is broadcast or cast.
    """
    spec = layout.entries[kid].spec
    if not isinstance(array, np.ndarray) and not devices.is_on_device(array):
        raise KeyMismatch(
            f"key {key!r}: push takes a NumPy array or one on a GPU, not {type(array).__name__}"
        )
    dtype = dtype_of(array)
    if tuple(array.shape) != tuple(spec.shape):
        raise KeyMismatch(
            f"key {key!r}: shape {tuple(spec.shape)} expected, given {tuple(array.shape)}"
        )
    if dtype.name != spec.dtype:
        raise KeyMismatch(
            f"key {key!r}: dtype {spec.dtype} expected, given {dtype.name}; "
            f"convert it with .astype({spec.dtype!r})"
        )
    return dtype


@dataclass(frozen=True, slots=True)
class Full:
    """A block that is complete: flat, stored values, to be encoded."""

    bid: int
    values: Array
    own: bool
    """Whether they are ours: else the caller's array, which it may change."""
    lent: bool = False
    """Whether the caller's array stays as it is until the batch is settled."""
    staged: tuple[staging.Staged, ...] = ()
    """Gradients on devices. A key that has its blocks for itself has no values beside it; those of
    keys that share a block are yet to be put into them."""

    def copied(self) -> Full:
        """Return the block with values of our own."""
        return replace(self, values=self.values.copy(), own=True)


NOTHING: Array = np.empty(0, np.uint8)
Empty = Callable[[int, Any], Array]
"""Makes a flat array of a size and dtype."""
fresh: Empty = np.empty


class Packer:
    """Collects the gradients of one batch into blocks, each given out as soon as it is full."""

    def __init__(
        self, layout: Layout, kids: Sequence[int], encoder: Encoder | None = None, batch: int = 0
    ) -> None:
        self._layout = layout
        self._encoder = Encoder() if encoder is None else encoder
        self._batch = batch
        self._left_out: set[int] = set()
        self._kids = kids
        self._allowed = frozenset(kids)
        self._pushed: dict[int, tuple[Key, weakref.ref[Any]]] = {}
        self._buckets: dict[int, Bucket] = {}
        """Those of which something has come, and something is missing."""

    def add(self, key: Key, array: Any, *, own: bool = False) -> list[Full]:
        """Take one key's gradient; return the blocks that are complete now.

        Of a gradient on a device shape and dtype are looked at there, and it is copied there, in
        the order of the caller's current stream: nothing here waits for a device, `sealing` does.
        `own`: an array in the host's memory is the packer's from now on.

        Raises:
            UnknownKey, KeyMismatch: not a key of the model, pushed before, wrong shape or dtype.
            PushRefused: it has NaN or Inf, which its codec cannot send.
        """
        layout, given = self._layout, _taken(key, array)
        parts = given.arrays if isinstance(given, several.OnDevices) else (given,)
        kid = layout.kid(key)
        if kid not in self._allowed:
            raise KeyMismatch(
                f"key {key!r} is pushed by itself (it has a version of its own), "
                "so it cannot be part of a batch; use worker.push"
            )
        for one in parts:
            dtype = check_gradient(layout, key, kid, one)
        if kid in self._pushed:
            other, before = self._pushed[kid]
            if other != key and before() is (array if given is parts[0] else parts[0]):
                return []
            tied = f" (it is tied to {other!r}: push the one gradient once)" if other != key else ""
            raise KeyMismatch(f"key {key!r} was already pushed in this batch{tied}")
        flat: Array | staging.Staged | None
        if isinstance(given, several.OnDevices):
            flat = several.combined(key, kid, given, dtype, self._cuts(kid))
        elif isinstance(given, np.ndarray):
            flat = devices.stored_view(given, dtype)
        else:
            flat = staging.taken(kid, given, dtype)
        if isinstance(flat, np.ndarray):
            flat = self._encoder.admit(layout, kid, flat)
        self._pushed[kid] = (key, _named(array, parts[0]))
        if flat is None:
            self._left_out.add(kid)
            return []
        blocks = layout.blocks_with(kid)
        alone = all(len(block.segments) == 1 for block in blocks)
        lent = alone and self._encoder.buffers.holds(given)
        home = None if alone else self._encoder.buffers.home_of(given)
        if lent or home is not None:
            self._encoder.buffers.lend(self._batch, key, given)
        full = [self._fill(block, kid, flat, own, lent, home) for block in blocks]
        return [one for one in full if one is not None]

    def add_all(self, gradients: Iterable[tuple[Key, Any]], *, own: bool = False) -> Iterator[Full]:
        """Take several keys' gradients; yield the blocks that are complete now (see `add`).

        Buckets all of whose keys are among them are filled by one call: a thousand small keys would
        cost a thousand.

        Raises: see `add`.
        """
        pairs = list(gradients)
        kids = [self._layout.kid_of.get(key, -1) for key, _ in pairs]
        given = dict(zip(kids, pairs, strict=True))
        filled: set[int] = set()
        # Who says a key twice is told so below.
        if len(given) == len(pairs):
            for bid in {bid for kid in given for bid in self._layout.blocks_of_key.get(kid, ())}:
                values = self._filled(self._layout.blocks[bid], given)
                if values is not None:
                    filled.update(self._layout.blocks[bid].kids)
                    yield values
        for kid, (key, array) in zip(kids, pairs, strict=True):
            if kid not in filled:
                yield from self.add(key, array, own=own)

    def _filled(self, block: BlockSpec, given: Mapping[int, tuple[Key, Any]]) -> Full | None:
        """Return a bucket, if all of its keys are given just as their specs say, and go as they
        are; None: each has to be looked at."""
        kids = block.kids
        if (
            len(kids) < 2
            or block.bid in self._buckets
            or not self._encoder.as_is(self._layout, block)
        ):
            return None
        if not all(
            kid in given and kid in self._allowed and kid not in self._pushed for kid in kids
        ):
            return None
        specs = [self._layout.entries[kid].spec for kid in kids]
        dtype = DTYPES[specs[0].dtype].stored
        name = dtype.name
        arrays = [given[kid][1] for kid in kids]
        for spec, array in zip(specs, arrays, strict=True):
            if type(array) is not np.ndarray or array.shape != tuple(spec.shape):
                return None
            if array.dtype != dtype or spec.dtype != name:
                return None
        self._pushed |= {
            kid: (given[kid][0], weakref.ref(array))
            for kid, array in zip(kids, arrays, strict=True)
        }
        home = self._encoder.buffers.lend_all(self._batch, arrays, block.size)
        if home is not None:
            return Full(block.bid, home, own=False, lent=True)
        bucket = self._encoder.spares.empty(block.size, dtype)
        np.concatenate([array.reshape(-1) for array in arrays], out=bucket)
        return Full(block.bid, bucket, own=True)

    def _cuts(self, kid: int) -> list[int]:
        """Return where a key's blocks begin and end."""
        segments = [one for block in self._layout.blocks_with(kid) for one in block.segments]
        return sorted({at for one in segments if one.kid == kid for at in (one.start, one.stop)})

    def seal(self, full: Full) -> Sealed:
        """Return a block as it travels; may be called on another thread than `add`.

        Values on devices, which share this block, are waited for.

        Raises:
            PushRefused: of those, one has NaN or Inf, which its codec cannot send.
        """
        layout, block = self._layout, self._layout.blocks[full.bid]
        arriving = [(one.kid, one.fetching()) for one in full.staged]
        for kid, arrived in arriving:
            flat = self._encoder.admit(layout, kid, arrived())
            if flat is None:
                self._left_out.add(kid)
            else:
                start, stop = ranges(block)[kid]
                full.values[start:stop] = flat
        return self._encoder.encode(
            layout, block, full.values, self._batch, own=full.own, lent=full.lent
        )

    def sealing(self, full: Iterable[Full]) -> Iterator[tuple[int, Sealed]]:
        """Yield blocks as they travel, by number, those of one key on a device together.

        Raises:
            PushRefused: a gradient on a device has NaN or Inf, which its codec cannot send.
        """
        on_devices: dict[int, tuple[staging.Staged, list[BlockSpec]]] = {}
        for one in full:
            if one.values is NOTHING:
                (staged,) = one.staged
                on_devices.setdefault(staged.kid, (staged, []))[1].append(
                    self._layout.blocks[one.bid]
                )
            else:
                yield one.bid, self.seal(one)
        for kid, (staged, blocks) in on_devices.items():
            for sent in staging.sealed(self._layout, blocks, staged, self._encoder, self._batch):
                if sent is None:
                    self._left_out.add(kid)
                else:
                    yield sent

    def sealed(self, full: Iterable[Full]) -> list[tuple[int, Sealed]]:
        """Return blocks as they travel, by number."""
        return list(self.sealing(full))

    def _fill(
        self,
        block: BlockSpec,
        kid: int,
        flat: Array | staging.Staged,
        own: bool,
        lent: bool,
        home: Array | None,
    ) -> Full | None:
        """Return the block, if this gradient completes it. `home`: memory for all of the block, in
        which it lies."""
        if len(block.segments) == 1:
            only = block.segments[0]
            if isinstance(flat, staging.Staged):
                return Full(block.bid, NOTHING, own=False, staged=(flat,))
            return Full(block.bid, flat[only.start : only.stop], own, lent)
        bucket = self._buckets.get(block.bid)
        if bucket is None:
            dtype = flat.dtype.stored if isinstance(flat, staging.Staged) else flat.dtype
            fits = home is not None and home.size == block.size
            bucket = Bucket(block, dtype, self._encoder.spares.empty, home if fits else None)
            self._buckets[block.bid] = bucket
        bucket.take(kid, flat)
        return None if bucket.missing else self._bucket(block.bid)

    def _bucket(self, bid: int) -> Full:
        bucket = self._buckets.pop(bid)
        if bucket.missing:
            bucket.copy()
        return Full(bid, bucket.values, not bucket.lent, bucket.lent, tuple(bucket.staged))

    def rest(self) -> list[Full]:
        """Return the buckets in which some keys were skipped: those are zero there."""
        return [self._bucket(bid) for bid in sorted(self._buckets)]

    def skipped(self) -> tuple[int, ...]:
        """Return the keys that were not pushed, once all is sealed."""
        return tuple(k for k in self._kids if k not in self._pushed or k in self._left_out)


def _taken(key: Key, array: Any) -> Any:
    try:
        together = several.taken(key, array)
        return devices.taken(array) if together is None else together
    except ImportError as error:
        raise KeyMismatch(f"key {key!r}: {error}") from error


def _named(array: Any, given: Array) -> weakref.ref[Any]:
    """Return what tells whether the same object is pushed again, under another name."""
    try:
        return weakref.ref(array)
    except TypeError:  # a NumPy scalar, say
        return weakref.ref(given)


def cut(
    layout: Layout,
    blocks: Iterable[BlockSpec],
    values: Mapping[Key, Array],
    empty: Empty = fresh,
) -> dict[int, Array]:
    """Cut flat values of whole keys into blocks, in arrays that `empty` makes; those of tables have
    none."""
    packed = {}
    for block in (one for one in blocks if one.segments):
        parts = [values[layout.entries[s.kid].spec.key][s.start : s.stop] for s in block.segments]
        packed[block.bid] = empty(block.size, parts[0].dtype)
        np.concatenate(parts, out=packed[block.bid])
    return packed
