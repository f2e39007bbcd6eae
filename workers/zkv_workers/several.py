"""One key's gradients on several devices of this process: combined here, they are one contribution.

A gradient is the mean over its samples, and so is what is combined: Σ wᵢgᵢ / Σ wᵢ, where wᵢ are
the samples of each device. So a batch of 64 samples on two devices counts as one of 64 on one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from zkv.dtypes import Array, DType
from zkv.errors import KeyMismatch
from zkv.reduction import OneDevice, Strategy, plan
from zkv_workers import devices, probe, reducing
from zkv_workers.staging import Piece, Staged


@dataclass(frozen=True, slots=True)
class OnDevices:
    """Arrays of one shape and dtype on several devices, for `batch.push` and `batch.read_into`.

    `samples`: how many each gradient is the mean of; None: as many. `strategy`: how they are
    combined (`zkv.reduction`), or how values reach all of them; None: what the links between the
    devices are measured to do soonest. A strategy that is named gives the same bits in every run.
    """

    arrays: Sequence[Any]
    samples: Sequence[float] | None = None
    strategy: Strategy | None = None


def taken(key: object, array: Any) -> OnDevices | None:
    """Return what is pushed as arrays on several devices; None: it is one array.

    Raises:
        KeyMismatch: there is none, or they do not fit together; which is named.
    """
    if isinstance(array, list | tuple) and any(map(_is_array, array)):
        array = OnDevices(array)
    if not isinstance(array, OnDevices):
        return None
    arrays = [devices.taken(one) for one in array.arrays]
    for at, one in enumerate(arrays):
        if not _is_array(one):
            raise KeyMismatch(
                f"key {key!r}: array {at} of {len(arrays)} is neither a NumPy array nor one on a "
                f"GPU, but {type(one).__name__}"
            )
    try:
        reducing.check(arrays)
        reducing.weights_of(len(arrays), array.samples)
    except ValueError as error:
        raise KeyMismatch(f"key {key!r}: {error}") from error
    return OnDevices(arrays, array.samples, array.strategy)


def _is_array(one: Any) -> bool:
    return isinstance(one, np.ndarray) or devices.is_on_device(one)


def combined(
    key: object, kid: int, given: OnDevices, dtype: DType, cuts: Sequence[int]
) -> Array | Staged:
    """Return what is `taken`, combined: an array of our own, or on devices what will be combined.

    On devices only the gradients' copies are made here, in the order of the current stream of each.
    `cuts`: where the key's blocks begin and end; a block ends up on one device.

    Raises:
        KeyMismatch: the strategy needs other devices.
    """
    arrays = given.arrays
    weights, total = reducing.weights_of(len(arrays), given.samples)
    sites = reducing.sites_of(arrays)
    strategy = given.strategy
    if strategy is not None:
        try:
            plan(strategy, len(arrays), arrays[0].size, cuts)
        except ValueError as error:
            raise KeyMismatch(f"key {key!r}: {error}") from error
    addends = [reducing.owned(*one) for one in zip(arrays, weights, sites, strict=True)]
    if all(isinstance(one, np.ndarray) for one in arrays):
        done = reducing.reduced(addends, strategy or OneDevice(), by=total, dtype=dtype.stored)
        return np.concatenate([part.values for part in done.parts])
    own = reducing.sites_of(arrays, own=True)
    made: list[reducing.Reduced] = []

    def pieces() -> Sequence[Piece]:
        if not made:
            homes = [site.home for site in own]
            way = strategy or probe.strategy_for(homes, addends[0].values.nbytes, spread=False)
            made.append(
                reducing.reduced(addends, way, cuts=cuts, sites=own, by=total, dtype=dtype.stored)
            )
        return [Piece(one.start, one.stop, one.values, one.ready) for one in made[0].parts]

    def done_with() -> None:
        for one in made:
            one.wait()

    nbytes = sum(one.values.nbytes for one in addends)
    return Staged(kid, dtype, nbytes, pieces, done_with)


def each(out: Any) -> Iterator[Any]:
    """Yield the arrays that values are to be written to, each as one of NumPy or CuPy."""
    arrays = out.arrays if isinstance(out, OnDevices) else out
    for one in arrays if isinstance(arrays, list | tuple) else [arrays]:
        yield devices.taken(one)


def write(key: object, values: Array, out: Any) -> None:
    """Write values in the host's memory into one array, or into several on different devices.

    Raises:
        KeyMismatch: an array of another shape or dtype, or that is not contiguous.
    """
    arrays = list(each(out))
    strategy = out.strategy if isinstance(out, OnDevices) else None
    if strategy is None and len(arrays) > 1 and not isinstance(arrays[0], np.ndarray):
        strategy = probe.strategy_for([devices.home(one) for one in arrays], values.nbytes)
    try:
        reducing.broadcast(values, arrays, strategy)
    except ValueError as error:
        raise KeyMismatch(f"key {key!r}: {error}") from error
