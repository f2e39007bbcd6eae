"""Files of snapshots, written beside an event loop by one thread, one after the other."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from queue import SimpleQueue
from threading import Thread

from msgspec import structs

from zkv.errors import ZkvError
from zkv_brokers.shard_events import Write, Wrote
from zkv_brokers.signals import Complete, GiveUp, Written
from zkv_net import snapshot_folder

log = logging.getLogger("zkv.disk")


def write(action: Write) -> Wrote:
    """Write a server's part of a snapshot."""
    try:
        part = snapshot_folder.write_part(
            action.url, action.name, action.file, action.saved.arrays, action.saved.metadata
        )
    except (OSError, ValueError, ZkvError) as error:
        return Wrote(action.number, why=f"{action.url}/{action.name}/{action.file}: {error}")
    return Wrote(action.number, part.nbytes, part.sha256)


def complete(action: Complete) -> Written:
    """Write a snapshot's manifest, and remove those that are too old."""
    manifest = structs.replace(action.manifest, at=round(time.time(), 3))
    try:
        snapshot_folder.complete(action.url, manifest)
    except ZkvError as error:
        return Written(
            action.number,
            f"{error} (every server, and the broker, must reach the same folder: one that they "
            "share, or an URL such as s3://bucket/folder)",
        )
    except OSError as error:
        return Written(action.number, f"{action.url}: {error}")
    return Written(action.number)


class Disk:
    """Does one thing after the other, and says what came of it in the loop that it was made for."""

    def __init__(self, tell: Callable[[Wrote], None] | Callable[[Written], None]) -> None:
        self._tell: Callable[..., None] = tell
        self._jobs: SimpleQueue[Callable[[], None]] | None = None
        self._closed = False

    def write(self, action: Write) -> None:
        """Write a server's part."""
        self._begin(lambda: write(action))

    def complete(self, action: Complete) -> None:
        """Write a manifest."""
        self._begin(lambda: complete(action))

    def give_up(self, action: GiveUp) -> None:
        """Remove what there is of a snapshot."""

        def remove() -> None:
            try:
                snapshot_folder.give_up(action.url, action.name)
            except (OSError, ZkvError) as error:
                log.warning("the rest of %s stays in %s: %s", action.name, action.url, error)

        self._begin(remove)

    def _begin(self, act: Callable[[], Wrote | Written | None]) -> None:
        loop = asyncio.get_running_loop()
        if self._jobs is None:
            self._jobs = SimpleQueue()
            # A disk that hangs must not keep the process from ending.
            Thread(target=_work, args=(self._jobs,), daemon=True).start()

        def run() -> None:
            said = None if self._closed else act()
            # The loop may have ended meanwhile.
            if said is not None and not loop.is_closed():
                loop.call_soon_threadsafe(self._told, said)

        self._jobs.put(run)

    def _told(self, said: Wrote | Written) -> None:
        if not self._closed:
            self._tell(said)

    def close(self) -> None:
        """Begin nothing more. A file that is being written stays a part without a name."""
        self._closed = True


def _work(jobs: SimpleQueue[Callable[[], None]]) -> None:
    while True:
        jobs.get()()
