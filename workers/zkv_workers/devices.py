"""Gradients on a GPU: what is the same for arrays of NumPy and of CuPy, and what is not.

A gradient stays on its device if its codec has kernels there: what is remembered of it does, too,
and only what is sent comes to the host, into pinned memory. Inside of `working` its device and the
worker's stream there are the current ones, and all that was begun is done when it is left. How
gradients get onto that stream is the business of `staging`.

Sums and casts outside our own kernels (what an earlier codec has left, what is taken back, DGC's
momentum, float64) are CuPy's, compiled with -ftz=true: numbers below 1.2e-38 become zeros.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from zkv.dtypes import Array, DType
from zkv.dtypes import stored_view as stored_on_host
from zkv_codecs.backend import Backend
from zkv_codecs.feedback import Codec
from zkv_codecs.packed import State
from zkv_workers import cuda, lanes

HOST = -1
"""The home of an array in the host's memory; that of others is the number of their device."""

CUDA = Backend("cuda")


def is_on_device(array: Any) -> bool:
    """Return whether this is an array of CuPy, a CUDA tensor, or another that CuPy can read."""
    return not isinstance(array, np.ndarray) and hasattr(array, "__cuda_array_interface__")


def taken(array: Any) -> Any:
    """Return what is pushed as an array that has a home: a NumPy array, or one of CuPy.

    NumPy's scalars become 0-d. An array on a device is not copied; anything else passes as it is.

    Raises:
        ImportError: it is on a device, and CuPy is not installed.
    """
    if isinstance(array, np.generic):
        return np.asarray(array)
    if not is_on_device(array):
        return array
    xp = cuda.cupy(array)
    return array if isinstance(array, xp.ndarray) else xp.asarray(array)


def to_host(array: Any) -> Any:
    """Return what `taken` does, and what is on a device as a copy in the host's memory.

    The copy is ordered on CuPy's current stream of that device and waited for.
    """
    array = taken(array)
    if isinstance(array, np.ndarray) or not is_on_device(array):
        return array
    with cuda.cupy(array).cuda.Device(home(array)):
        return array.get()


def home(array: Any) -> int:
    """Return where an array lies: `HOST`, or the number of its device."""
    return HOST if isinstance(array, np.ndarray) else int(array.device.id)


def module_of(array: Any) -> Any:
    """Return the module whose functions take this array: NumPy or CuPy."""
    return np if isinstance(array, np.ndarray) else cuda.cupy(array)


@contextmanager
def working(where: int) -> Iterator[None]:
    """Make this device and our stream there current; on leaving, what that was given is done.

    On the host there is nothing to wait for.
    """
    if where == HOST:
        yield
        return
    lane = lanes.lane(where)
    with lane.working():
        try:
            yield
        finally:
            for copy in lane.taken():
                copy.wait()
            lanes.mark().synchronize()


def has_kernels(codec: Codec) -> bool:
    """Return whether arrays on a device are encoded there; those that are sent as they are, are.

    A compressor of bytes runs on the host, and the products of a factorisation too; behind a stage
    with kernels a compressor is given its codes, which are few.
    """
    kinds = {stage.kind for stage in codec.chain.stages}
    return not kinds or ("lowrank" not in kinds and kinds != {"lossless"})


def stored_view(array: Any, dtype: DType) -> Any:
    """Return a flat contiguous array of the stored type with the same bits, in the same place."""
    if isinstance(array, np.ndarray):
        return stored_on_host(array, dtype)
    # CuPy has no kernels for bfloat16, so its bits are copied.
    return cuda.cupy(array).ascontiguousarray(array.view(dtype.stored)).reshape(-1)


def sendable(wide: Any, largest: float) -> bool:
    """Return whether no element is NaN, infinite or above `largest`.

    Of an array on a device only the answer comes to the host; on the host mostly one dot product
    tells.
    """
    if isinstance(wide, np.ndarray):
        with np.errstate(over="ignore", invalid="ignore"):
            if float(np.dot(wide, wide)) <= largest * largest:
                return True
    return bool((module_of(wide).abs(wide) <= largest).all())


def square(values: Any) -> float:
    """Return the square of an array's norm, summed where it lies."""
    if isinstance(values, np.ndarray):
        return float(np.dot(values, values))
    with working(home(values)):
        return float((values * values).sum())


def own(sent: Any, values: Any) -> Array:
    """Return what is sent, in the host's memory and apart from `values`, the caller's.

    What comes from a device is there when `working` is left.
    """
    if isinstance(sent, np.ndarray):
        return sent.copy() if np.may_share_memory(sent, values) else sent
    if not sent.size:
        return np.empty(0, sent.dtype)
    return lanes.lane(home(sent)).staged(sent)


class Move:
    """Brings arrays to one home, each of them once: what was one array stays one."""

    def __init__(self, where: int) -> None:
        self._where = where
        self._made: dict[int, tuple[Any, Any]] = {}

    def __call__(self, array: Any) -> Any:
        """Return the array if it is there, else its copy there. Numbers stay on the host."""
        if array is None or not array.ndim or home(array) == self._where:
            return array
        if id(array) not in self._made:
            # The array is kept too, or another one might get its number.
            self._made[id(array)] = (array, self._copied(array))
        return self._made[id(array)][1]

    def _copied(self, array: Any) -> Any:
        with working(home(array)):
            host = array if isinstance(array, np.ndarray) else array.get()
        if self._where == HOST:
            return host
        with working(self._where):
            return cuda.cupy().asarray(host)


def started(codec: Codec, shape: Sequence[int], where: int) -> State:
    """Return a codec's first state for arrays of this shape, at this home."""
    return tuple(map(Move(where), codec.start(shape)))
