"""Streams, events and copies of a device: what is to be done there, in which order, and when it is
done.

Of each device that gradients come from, a worker's own work is done on two streams of its own: on
`work` it encodes, behind an event of the caller's stream, and on `copies` what is sent goes into
pinned memory, behind an event of `work`. So nobody who pushes waits for a device, and copies run
beside kernels. What codecs remember is only ever touched on `work`, whichever stream and thread a
gradient came from.

CuPy's memory belongs to the stream on which it was made: it may be given to that stream's next
kernel as soon as nothing refers to it. So what another stream still reads is kept until it has.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

from zkv.dtypes import Array
from zkv_workers import cuda, pinned


def event() -> Any:
    """Return an event of the current device, without a time; waiting for it does not spin, as
    other threads send meanwhile."""
    return cuda.cupy().cuda.Event(block=True, disable_timing=True)


def current() -> Any:
    """Return the current stream of the current device."""
    return cuda.cupy().cuda.get_current_stream()


def mark() -> Any:
    """Return an event behind all that the current stream was given."""
    made = event()
    made.record(current())
    return made


@contextmanager
def on(home: int, stream: Any = None) -> Iterator[None]:
    """Make this the current device, and with a stream, that its current stream."""
    with ExitStack() as stack:
        stack.enter_context(cuda.cupy().cuda.Device(home))
        if stream is not None:
            stack.enter_context(stream)
        yield


def following(home: int, pointer: int) -> AbstractContextManager[None]:
    """Make another library's stream of a device the current one; `pointer`: its cudaStream_t."""
    cupy = cuda.cupy()
    with cupy.cuda.Device(home):
        return on(home, cupy.cuda.ExternalStream(pointer, home))


@dataclass(frozen=True, slots=True)
class CudaSite:
    """A device, and the stream that work is done on there; None: the caller's current one."""

    home: int
    stream: Any = None

    @property
    def xp(self) -> Any:
        """See `reducing.Site`."""
        return cuda.cupy()

    def here(self) -> Any:
        """See `reducing.Site`."""
        return on(self.home, self.stream)

    def mark(self) -> Any:
        """See `reducing.Site`: an event."""
        with self.here():
            return mark()

    def after(self, marks: Iterable[Any]) -> None:
        """See `reducing.Site`: the stream waits, the caller does not."""
        with self.here():
            for one in marks:
                if one is not None:
                    current().wait_event(one)


@dataclass(slots=True)
class Copy:
    """What is on its way from a device to the host."""

    done: Any
    held: tuple[Any, ...]
    """What is copied, and into what: kept until then."""

    def wait(self) -> None:
        """Wait until it is there."""
        self.done.synchronize()
        self.held = ()


@dataclass(slots=True)
class Lane:
    """One device's streams for a worker's own work."""

    home: int
    work: Any
    copies: Any
    _on_the_way: threading.local = field(default_factory=threading.local)
    """Of each thread."""

    @contextmanager
    def working(self, after: Iterable[Any] = ()) -> Iterator[None]:
        """Make the device and its `work` stream current; it begins behind these events."""
        with on(self.home, self.work):
            for one in after:
                self.work.wait_event(one)
            yield

    def staged(self, sent: Any) -> Array:
        """Return memory of the host that an array of this device is being copied into.

        Behind what `work` was given; `taken` has what says when it is there. Where no pinned memory
        is free, ordinary memory takes its place, and this waits.
        """
        ready = mark()
        with on(self.home, self.copies):
            self.copies.wait_event(ready)
            host = room(sent.nbytes, sent.dtype)
            sent.get(out=host, stream=self.copies, blocking=not pinned.is_pinned(host))
            self._list().append(Copy(mark(), (sent, host)))
        return host

    def taken(self) -> list[Copy]:
        """Return the copies that this thread has begun since it was last asked."""
        found = self._list()
        self._on_the_way.copies = []
        return found

    def _list(self) -> list[Copy]:
        if not hasattr(self._on_the_way, "copies"):
            self._on_the_way.copies = []
        found: list[Copy] = self._on_the_way.copies
        return found


_lock = threading.Lock()
_lanes: dict[int, Lane] = {}
_sides: dict[tuple[int, int], Any] = {}


def lane(home: int) -> Lane:
    """Return a device's lane: always the same."""
    with _lock:
        if home not in _lanes:
            _lanes[home] = Lane(home, _stream(home), _stream(home))
        return _lanes[home]


def side(home: int, number: int) -> Any:
    """Return one of a device's streams for what it exchanges with others: always the same."""
    with _lock:
        if (home, number) not in _sides:
            _sides[home, number] = _stream(home)
        return _sides[home, number]


def forget() -> None:
    """Make new streams and new pinned memory from now on (for tests: devices are new)."""
    with _lock:
        _lanes.clear()
        _sides.clear()
    pinned.forget()


def _stream(home: int) -> Any:
    with cuda.cupy().cuda.Device(home):
        # One that blocks would wait for the default stream, and that for it.
        return cuda.cupy().cuda.Stream(non_blocking=True)


def room(nbytes: int, dtype: Any) -> Array:
    """Return memory of the host for so many bytes: pinned, or ordinary where none is free."""
    return pinned.room(nbytes).view(dtype)


def fetched(given: Any, into: Array) -> None:
    """Copy an array of the current device into one in the host's memory, and wait for it."""
    if not given.size:
        return
    host = room(given.nbytes, given.dtype)
    given.get(out=host, stream=current(), blocking=not pinned.is_pinned(host))
    mark().synchronize()
    into[...] = host
