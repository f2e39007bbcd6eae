"""What a worker writes of itself into a snapshot: what its codecs remember, how many batches it has
begun, and whatever its user keeps there; and how it goes on from that.

A snapshot is of a version, and when a worker hears of it, it may be some batches further. So it
remembers what it began its last batches with: nothing of that is copied, as codecs make new arrays.
Batches begin on the user's thread, snapshots are heard of on that of the loop.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from zkv import control as c
from zkv.dtypes import Array
from zkv.errors import BadSnapshot, ZkvError
from zkv.snapshot import Part, check_part, digest_of, worker_file
from zkv.tensor_file import opened
from zkv.wire import Frozen, Text, UInt
from zkv_codecs.spec import codec
from zkv_net.snapshot_folder import write_part
from zkv_net.storage import folder
from zkv_workers import devices
from zkv_workers.memories import Memories, Memory

if TYPE_CHECKING:
    from zkv_workers.signals import Grant

log = logging.getLogger("zkv.worker")
FINISH_S = 5.0
IDLE_S, LOOKS = 1.0, 10
"""How long a worker is between two batches until no batch is waited for, and how often it is looked
whether it is."""
BEGINNINGS = 4
"""Batches of which it is remembered what they were begun with."""
ABOUT, BLOB = "zkv", "blob"
BLOB_BYTES_MAX = 1 << 30


class Remembered(Frozen, frozen=True):
    """What a file has of one block: the codec, arrays of its state, and whether something is
    owed."""

    codec: Text
    arrays: UInt
    owes: bool


class About(Frozen, frozen=True):
    """What a file has: batches begun, whether there is a blob, and blocks."""

    batches: UInt
    blob: bool
    blocks: dict[UInt, Remembered]


_decoder = msgspec.json.Decoder(About, strict=False)


@dataclass(frozen=True, slots=True)
class Beginning:
    """What a batch was begun with: it is of this version, and so many were begun before it."""

    version: int
    batches: int
    blob: bytes | None
    blocks: Mapping[int, tuple[str, tuple[Array, ...], Array | None]]
    """Codec, state, and what is owed, by block."""


def file_of(begun: Beginning) -> tuple[dict[str, Array], dict[str, str]]:
    """Return the arrays and the metadata of a file."""
    arrays: dict[str, Array] = {}
    blocks = {}
    move = devices.Move(devices.HOST)
    if begun.blob is not None:
        arrays[BLOB] = np.frombuffer(begun.blob, np.uint8)
    for bid, (text, state, owed) in begun.blocks.items():
        blocks[bid] = Remembered(text, len(state), owed is not None)
        arrays.update((f"{bid}.{at}", np.asarray(move(one))) for at, one in enumerate(state))
        if owed is not None:
            arrays[f"{bid}.owed"] = move(owed)
    about = About(begun.batches, begun.blob is not None, blocks)
    return arrays, {ABOUT: msgspec.json.encode(about).decode()}


def beginning_in(arrays: Mapping[str, Array], metadata: Mapping[str, str], file: str) -> Beginning:
    """Return what a file says.

    Raises:
        BadSnapshot: it is none of a worker.
    """
    try:
        about = _decoder.decode(metadata[ABOUT])
        blocks = {
            bid: (
                str(codec(one.codec).text),
                tuple([arrays[f"{bid}.{at}"].copy() for at in range(one.arrays)]),
                arrays[f"{bid}.owed"].copy() if one.owes else None,
            )
            for bid, one in about.blocks.items()
        }
        blob = arrays[BLOB].tobytes() if about.blob else None
    except (KeyError, ValueError, RecursionError) as error:
        raise BadSnapshot(f"{file} is no state of a worker: {error!r}") from error
    return Beginning(-1, about.batches, blob, blocks)


def write(asked: c.SaveState, number: int, begun: Beginning) -> c.Saved:
    """Write a worker's state; return what to tell the broker."""
    file = worker_file(number)
    try:
        part = write_part(asked.url, asked.name, file, *file_of(begun))
    except (OSError, ValueError, ZkvError) as error:
        return c.Saved(asked.number, why=f"{asked.url}/{asked.name}/{file}: {error}"[:4000])
    return c.Saved(asked.number, part.nbytes, part.sha256)


def read(at: c.StateAt) -> Beginning:
    """Return a worker's state.

    Raises:
        BadSnapshot: it cannot be read, or is not as it was written.
    """
    path = f"{at.name}/{at.file}"
    try:
        data = folder(at.url).read(path)
    except OSError as error:
        raise BadSnapshot(f"{at.url}/{path} cannot be read: {error}") from error
    part = Part(at.file, at.nbytes, at.sha256)
    check_part(part, len(data), digest_of(data), f"{at.url}/{path}")
    return beginning_in(*opened(data, f"{at.url}/{path}"), path)


@dataclass(slots=True)
class Keeper:
    """Remembers what batches were begun with, and writes it down when asked. `memories` are those
    of the worker's codecs."""

    memories: Memories
    number: int = 0
    keeps: bool = False
    """Whether the broker may ask."""
    tell: Callable[[c.Saved], None] = lambda said: None
    """Tells the broker; from any thread."""
    inside: Callable[[], bool] = lambda: False
    """Returns whether a batch is being computed; from any thread."""
    away: Callable[[], bool] = lambda: False
    """Returns whether the run has gone back to a snapshot, and the worker does not know it yet."""
    _loaded: bool = True
    """Whether it has gone on from its state in the snapshot that the run has gone back to."""
    blob: bytes | None = None
    """What the user keeps, for the next batch that begins."""
    found: bytes | None = None
    """What was kept so in the snapshot that the run began from."""
    _batches: int = 0
    _begun: deque[Beginning] = field(default_factory=lambda: deque(maxlen=BEGINNINGS))
    _forgotten: int = -1
    """The newest version of which it was remembered, and is not any more."""
    _resting: bool = True
    """Whether no batch is begun before the user does something else."""
    _waiting: list[c.SaveState] = field(default_factory=list)
    _threads: list[threading.Thread] = field(default_factory=list)
    """What is being written."""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def begun(self, grant: Grant) -> None:
        """A batch begins: nothing of it is encoded yet, and all of the ones before."""
        self._batches = grant.batch - 1
        if not self.keeps:
            return
        with self._lock:
            self._resting = False
            if len(self._begun) == BEGINNINGS:
                self._forgotten = self._begun[0].version
            now = self._now(grant.version + grant.behind)
            self._begun.append(now)
            due = [one for one in self._waiting if one.version <= now.version]
            self._waiting = [one for one in self._waiting if one.version > now.version]
            for one in due:
                self._write(one, now)

    def _now(self, version: int) -> Beginning:
        self.memories.hear()
        blocks = {
            bid: (memory.codec.text, memory.state, memory.owed)
            for bid, memory in self.memories.by_block.items()
        }
        return Beginning(version, self._batches, self.blob, blocks)

    def rest(self) -> None:
        """No batch begins soon: what is asked for is what there is now."""
        if not self.keeps:
            return
        with self._lock:
            self._resting = True
            waiting, self._waiting = self._waiting, []
            for one in waiting:
                self._write(one, self._after())

    def _after(self) -> Beginning:
        """Return what the next batch would be begun with."""
        last = max((one.batches + 1 for one in self._begun), default=self._batches)
        now = self._now(-1)
        return Beginning(-1, last, now.blob, now.blocks)

    def restart(self) -> None:
        """The run has gone back to a snapshot: what was begun with is of no use any more."""
        with self._lock:
            self._begun.clear()
            self._waiting.clear()
            self._forgotten, self._resting, self._batches = -1, True, 0
            self.blob = self.found = None
            self._loaded = False

    def asked(self, message: c.SaveState) -> None:
        """The broker takes a snapshot."""
        with self._lock:
            if self.away() or not self._loaded:
                why = "it has not heard yet that the run has gone back to a snapshot"
                self.tell(c.Saved(message.number, why=why))
                return
            found = next((one for one in self._begun if one.version >= message.version), None)
            if found is not None and self._forgotten >= message.version:
                why = f"it was asked for version {message.version} when it was {BEGINNINGS} further"
                self.tell(c.Saved(message.number, why=why))
            elif found is not None:
                self._write(message, found)
            elif self._resting:
                self._write(message, self._after())
            else:
                self._waiting.append(message)
                self._look_later(message, LOOKS)

    def _look_later(self, message: c.SaveState, looks: int) -> None:
        timer = threading.Timer(IDLE_S, self._look, (message, looks))
        timer.daemon = True
        timer.start()

    def _look(self, message: c.SaveState, looks: int) -> None:
        """No batch has begun since: between two batches, what there is now is what is asked for."""
        with self._lock:
            if message not in self._waiting:
                return
            if not self.inside():
                self._waiting.remove(message)
                self._write(message, self._after())
            elif looks:
                self._look_later(message, looks - 1)

    def _write(self, message: c.SaveState, begun: Beginning) -> None:
        def act() -> None:
            self.tell(write(message, self.number, begun))

        self._threads = [one for one in self._threads if one.is_alive()]
        self._threads.append(threading.Thread(target=act, daemon=True))
        self._threads[-1].start()

    def finish(self) -> None:
        """The worker leaves: what it was asked for is written first, in bounded time."""
        self.rest()
        with self._lock:
            threads = list(self._threads)
        until = time.monotonic() + FINISH_S
        for one in threads:
            one.join(max(0.0, until - time.monotonic()))

    def load(self, at: c.StateAt | None) -> int:
        """Go on from what a snapshot has; return how many batches were begun.

        Raises:
            BadSnapshot: it cannot be read, or is not as it was written.
        """
        found = self._load(at)
        self._loaded = True
        return found

    def _load(self, at: c.StateAt | None) -> int:
        if at is None:
            return 0
        if at.lost:
            log.warning(
                "the state of worker %d is not in %s/%s: %s; its codecs begin anew, and load_state "
                "gives nothing", self.number, at.url, at.name, at.lost
            )  # fmt: skip
            return 0
        begun = read(at)
        for bid, (text, state, owed) in begun.blocks.items():
            self.memories.by_block[bid] = Memory(codec(text), state, owed)
        self.found = self.blob = begun.blob
        self._batches = begun.batches
        return begun.batches


def checked_blob(blob: Any) -> bytes:
    """Return what a user keeps in snapshots.

    Raises:
        TypeError, ValueError: no bytes, or too many.
    """
    if not isinstance(blob, bytes | bytearray | memoryview):
        raise TypeError(f"save_state takes bytes, not {type(blob).__name__}")
    made = bytes(blob)
    if len(made) > BLOB_BYTES_MAX:
        raise ValueError(f"save_state takes at most {BLOB_BYTES_MAX} bytes, not {len(made)}")
    return made
