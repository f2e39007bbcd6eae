"""Carries out plans of local reduction: gradients on several devices of this process become one.

Where an array lies is its *site*: the host's memory, or a device with the stream that work is done
on there. What NumPy's and CuPy's functions do alike is written once, so NumPy's arrays stand in for
devices. Nothing here waits for a device but what the CPU adds up, and `Reduced.wait`.

Sums are in float32, or in float64 if the gradients are; each sum's order is its plan's. So a sum is
within n · eps · Σ|x| of the exact one, whatever the strategy, and NaN and Inf pass through.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from zkv.dtypes import Array
from zkv.reduction import CPU, Move, OneDevice, Plan, Step, Strategy, plan
from zkv.sums import divided
from zkv_workers import devices, lanes

SUMMED = {"float16": "float32", "float32": "float32", "float64": "float64"}
"""What can be reduced, and in which type it is summed."""


class Site(Protocol):
    """Where arrays lie and what is done to them there."""

    @property
    def home(self) -> int:
        """The host (`devices.HOST`), or the number of a device."""

    @property
    def xp(self) -> Any:
        """The module of its arrays."""

    def here(self) -> AbstractContextManager[Any]:
        """Work inside is this site's."""

    def mark(self) -> Any:
        """Return what stands for all that this site was given to do."""

    def after(self, marks: Iterable[Any]) -> None:
        """What comes next begins only when these are done."""


@dataclass(frozen=True, slots=True)
class HostSite:
    """The host's memory: what it is told to do is done at once."""

    home: int = devices.HOST

    @property
    def xp(self) -> Any:
        """See `Site`."""
        return np

    def here(self) -> AbstractContextManager[Any]:
        """See `Site`."""
        return nullcontext()

    def mark(self) -> Any:
        """See `Site`."""
        return None

    def after(self, marks: Iterable[Any]) -> None:
        """See `Site`: waits."""
        for mark in marks:
            if mark is not None:
                mark.synchronize()


HOST_SITE = HostSite()


@dataclass(frozen=True, slots=True)
class Owned:
    """One device's gradient, copied, weighted and flat: nobody else's memory."""

    values: Any
    site: Site
    ready: Any
    """The mark behind which it is there."""


@dataclass(frozen=True, slots=True)
class Part:
    """A part of the sum, and where it lies."""

    start: int
    stop: int
    values: Any
    site: Site
    ready: Any


@dataclass(slots=True)
class Reduced:
    """A sum whose parts lie where their strategy has left them. Keep it until it is waited for:
    devices may still read each other's memory."""

    plan: Plan
    parts: tuple[Part, ...]
    marks: list[Any]
    held: Mapping[int, Any]
    """All that the steps read and write, by place."""

    def wait(self) -> None:
        """Wait until all is done."""
        HOST_SITE.after(self.marks)


def check(arrays: Sequence[Any]) -> None:
    """Check that arrays may be reduced together.

    Raises:
        ValueError: none, another shape or dtype than the first's, not float16, float32 or float64,
            or some of them in the host's memory and some on devices; which one is named.
    """
    if not arrays:
        raise ValueError("there is no array to reduce")
    first = arrays[0]
    for at, array in enumerate(arrays):
        if array.dtype.name not in SUMMED:
            raise ValueError(
                f"array {at} is of {array.dtype.name}, and only {', '.join(SUMMED)} are summed "
                "over devices; convert it with .astype('float32')"
            )
        for what in ("dtype", "shape"):
            expected, given = getattr(first, what), getattr(array, what)
            if expected != given:
                raise ValueError(f"array {at} has {what} {given}, and array 0 has {expected}")
        if isinstance(array, np.ndarray) != isinstance(first, np.ndarray):
            raise ValueError(
                f"array {at} and array 0 are not both on GPUs, or both in the host's memory"
            )


def weights_of(count: int, samples: Sequence[float] | None) -> tuple[tuple[float, ...], float]:
    """Return each gradient's weight in the sum, and what the sum is divided by: Σ wᵢgᵢ / Σ wᵢ.

    Equal numbers of samples (None, too) are weights of 1, so that no product is rounded.

    Raises:
        ValueError: another count than that of the arrays, a negative number, or only zeros.
    """
    if samples is None:
        return (1.0,) * count, float(count)
    given = [float(one) for one in samples]
    if len(given) != count:
        raise ValueError(f"{len(given)} numbers of samples for {count} arrays")
    if not all(0 <= one < float("inf") for one in given) or not sum(given) > 0:
        raise ValueError(f"samples {given}: they count, so they are at least 0, and not all are 0")
    if len(set(given)) == 1:
        return (1.0,) * count, float(count)
    return tuple(given), sum(given)


def owned(array: Any, weight: float, site: Site) -> Owned:
    """Return the array times its weight as a copy at this site, on whose stream it was made.

    Where the gradient may be overwritten in the order of that stream, it may be at once.
    """
    with site.here():
        flat = site.xp.ascontiguousarray(array).reshape(-1)
        wide = np.dtype(SUMMED[array.dtype.name])
        values = flat.astype(wide, copy=True)
        if weight != 1.0:
            values *= wide.type(weight)
        return Owned(values, site, site.mark())


def reduced(
    addends: Sequence[Owned],
    strategy: Strategy,
    *,
    cuts: Sequence[int] | None = None,
    sites: Sequence[Site] | None = None,
    by: float = 1.0,
    dtype: Any = None,
    spread: bool = False,
) -> Reduced:
    """Return the sum of what is owned, divided by `by`, in `dtype` (None: as it was summed).

    `addends` are written to. `sites`: where the work is done, one for each (None: where they were
    made). `cuts`: parts begin only there. With `spread` every device has all parts at the end:
    `held` by place.
    """
    places: dict[int, Site] = dict(enumerate(sites or [one.site for one in addends]))
    places[CPU] = HOST_SITE
    made = plan(strategy, len(addends), addends[0].values.size, cuts)
    held: dict[int, Any] = {at: one.values for at, one in enumerate(addends)}
    if any(move.target == CPU for step in made.sums for move in step):
        held[CPU] = np.empty(made.size, addends[0].values.dtype)
    marks: dict[int, Any] = {at: one.ready for at, one in enumerate(addends)}
    for step in made.sums:
        _do(step, made, places, held, marks)
    parts = range(len(made.bounds) - 1)
    if by != 1.0 or dtype not in (None, addends[0].values.dtype):
        for part in parts:
            _finish(made, part, places, held, marks, by)
    for step in made.spread if spread else ():
        _do(step, made, places, held, marks)
    if dtype is not None and dtype != addends[0].values.dtype:
        for at, site in places.items():
            if at in held:
                with site.here():
                    site.after([marks.get(at)])
                    held[at] = held[at].astype(dtype)
                    marks[at] = site.mark()
    return Reduced(
        made,
        tuple(
            Part(
                made.bounds[part],
                made.bounds[part + 1],
                held[made.owner(part)][made.bounds[part] : made.bounds[part + 1]],
                places[made.owner(part)],
                marks.get(made.owner(part)),
            )
            for part in parts
        ),
        list(marks.values()),
        held,
    )


def _finish(
    made: Plan,
    part: int,
    places: Mapping[int, Site],
    held: Mapping[int, Any],
    marks: dict[int, Any],
    by: float,
) -> None:
    """Divide a part where its sum lies."""
    owner = made.owner(part)
    site, values = places[owner], held[owner][made.bounds[part] : made.bounds[part + 1]]
    with site.here():
        site.after([marks.get(owner)])
        site.xp.copyto(values, divided(values, by))
        marks[owner] = site.mark()


def _do(
    step: Step,
    made: Plan,
    places: Mapping[int, Site],
    held: Mapping[int, Any],
    marks: dict[int, Any],
) -> None:
    """Carry out one step; `marks` are of what came before, and of this step afterwards."""
    involved = {at for move in step for at in (move.source, move.target)}
    for at in involved:
        # Of the others too: a part must not be written while somebody still reads it.
        places[at].after([mark for other, mark in marks.items() if other != at or at == CPU])
        own = marks.get(at)
        if own is not None:
            places[at].after([own])
    for move in step:
        _move(move, made, places, held)
    for at in involved:
        marks[at] = places[at].mark()


def _move(move: Move, made: Plan, places: Mapping[int, Site], held: Mapping[int, Any]) -> None:
    low, high = made.bounds[move.part], made.bounds[move.part + 1]
    if low == high:
        return
    given, mine = held[move.source][low:high], held[move.target][low:high]
    source, target = places[move.source], places[move.target]
    if not move.adds:
        carry(given, source, mine, target)
        return
    if source.home == target.home == devices.HOST:
        with np.errstate(all="ignore"):
            mine += given
        return
    with target.here():
        landed = target.xp.empty(mine.shape, mine.dtype)
        carry(given, source, landed, target)
        with np.errstate(all="ignore"):
            mine += landed


def carry(given: Any, source: Site, into: Any, target: Site) -> None:
    """Copy an array into one of its size and dtype, from one site to another.

    What comes to the host is there when this returns, else it is in the order of the target's
    stream.
    """
    if target.home == devices.HOST and source.home != devices.HOST:
        with source.here():
            lanes.fetched(given, into)
        return
    with target.here():
        if source.home == devices.HOST and target.home != devices.HOST:
            into.set(given, stream=lanes.current())
        else:
            target.xp.copyto(into, given)


def sites_of(arrays: Sequence[Any], *, own: bool = False) -> list[Site]:
    """Return the arrays' sites: with the streams that are current (the caller's), or with `own`
    ones, so that no two share a stream."""
    return [
        HOST_SITE
        if devices.home(array) == devices.HOST
        else lanes.CudaSite(
            devices.home(array), lanes.side(devices.home(array), at) if own else None
        )
        for at, array in enumerate(arrays)
    ]


def all_reduced(
    arrays: Sequence[Any],
    strategy: Strategy | None = None,
    *,
    samples: Sequence[float] | None = None,
    mean: bool = False,
) -> list[Any]:
    """Return for each array the sum of all (or the mean by `samples`), where that array is.

    Arrays are of one shape and dtype, on devices of this process (or all in the host's memory).
    They stay as they are. The work is in the order of the current stream of each device, and done
    when this returns.

    Raises:
        ValueError: arrays or numbers of samples that do not fit together; which is named.
    """
    arrays = [devices.taken(one) for one in arrays]
    check(arrays)
    weights, total = weights_of(len(arrays), samples)
    if not mean and samples is None:
        total = 1.0
    sites = sites_of(arrays)
    addends = [owned(*one) for one in zip(arrays, weights, sites, strict=True)]
    done = reduced(
        addends,
        OneDevice() if strategy is None else strategy,
        by=total if mean else 1.0,
        dtype=arrays[0].dtype,
        spread=True,
    )
    done.wait()
    return [done.held[at].reshape(one.shape) for at, one in enumerate(arrays)]


def broadcast(values: Array, into: Sequence[Any], strategy: Strategy | None = None) -> None:
    """Write values in the host's memory into arrays on devices, by a strategy's second half.

    Each part goes to the device where its sum would lie, and from there to the others. In the order
    of the current stream of each device; done when this returns.

    Raises:
        ValueError: an array of another shape or dtype, or that is not contiguous; which is named.
    """
    arrays = [devices.taken(one) for one in into]
    for at, array in enumerate(arrays):
        if (array.shape, array.dtype) != (values.shape, values.dtype):
            raise ValueError(
                f"array {at} has shape {array.shape} and dtype {array.dtype}, and the values have "
                f"{values.shape} and {values.dtype}"
            )
        if not array.flags.c_contiguous:
            raise ValueError(f"array {at} is not C-contiguous")
    flat = np.ascontiguousarray(values).reshape(-1)
    made = plan(OneDevice() if strategy is None else strategy, len(arrays), flat.size)
    places: dict[int, Site] = {CPU: HOST_SITE, **dict(enumerate(sites_of(arrays)))}
    held: dict[int, Any] = {CPU: flat, **{at: one.reshape(-1) for at, one in enumerate(arrays)}}
    marks = {at: site.mark() for at, site in places.items()}
    owners = [(part, made.owner(part)) for part in range(len(made.bounds) - 1)]
    first = tuple(Move(part, CPU, owner, False) for part, owner in owners if owner != CPU)
    _do(first, made, places, held, marks)
    for step in made.spread:
        _do(step, made, places, held, marks)
    HOST_SITE.after(marks.values())
