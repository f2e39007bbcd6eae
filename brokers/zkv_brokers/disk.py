"""Files of snapshots, written and read beside an event loop by one thread, one after the other."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from queue import SimpleQueue
from threading import Thread

from msgspec import structs

from zkv.errors import BadSnapshot, ZkvError
from zkv.snapshot import encode, server_file
from zkv_brokers import saving
from zkv_brokers.saving import Saved
from zkv_brokers.shard_events import Load, Loaded, Write, Wrote
from zkv_brokers.signals import Complete, Find, Found, GiveUp, Written
from zkv_net import loop, snapshot_folder
from zkv_net.storage import folder

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


def load(action: Load) -> Loaded:
    """Read a server's blocks out of the files that they are in, one file after the other."""
    found = Saved()
    try:
        manifest = snapshot_folder.manifest_of(folder(action.url), action.url, action.name)
        if manifest.checksum != action.checksum:
            raise BadSnapshot(
                f"{action.url}/{action.name} is not the snapshot that the broker has read: its "
                f"manifest has checksum {manifest.checksum[:12]}…, the broker's "
                f"{action.checksum[:12]}…; both must reach the same folder"
            )
        files = {server_file(one.server) for one in manifest.blocks if one.bid in action.bids}
        for part in manifest.servers:
            if part.file in files:
                read = snapshot_folder.read_part(action.url, manifest, part)
                found.join(saving.read(*read, part.file).only(action.bids))
    except (OSError, ZkvError) as error:
        return Loaded(action.term, Saved(), f"{error}")
    return Loaded(action.term, found)


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


def find(action: Find) -> Found:
    """Look for a snapshot of which every byte is as it was written."""
    problems = []
    for url, name in action.places:
        try:
            where, manifest = snapshot_folder.chosen(f"{url}/{name}" if name else url, whole=True)
            snapshot_folder.check(folder(where), where, manifest)
            return Found(where, encode(manifest).decode(), loop.term_number())
        except (OSError, ZkvError) as error:
            problems.append(str(error))
    return Found("", "", loop.term_number(), "\n".join(problems))


class Disk:
    """Does one thing after the other, and says what came of it in the loop that it was made for."""

    def __init__(
        self, tell: Callable[[Wrote | Loaded], None] | Callable[[Written | Found], None]
    ) -> None:
        self._tell: Callable[..., None] = tell
        self._jobs: SimpleQueue[Callable[[], None]] | None = None
        self._closed = False

    def carry_out(self, action: Write | Load) -> None:
        """Write a server's part, or read it."""
        self._begin(lambda: write(action) if isinstance(action, Write) else load(action))

    def complete(self, action: Complete) -> None:
        """Write a manifest."""
        self._begin(lambda: complete(action))

    def find(self, action: Find) -> None:
        """Look for a snapshot to go back to."""
        self._begin(lambda: find(action))

    def give_up(self, action: GiveUp) -> None:
        """Remove what there is of a snapshot."""

        def remove() -> None:
            try:
                snapshot_folder.give_up(action.url, action.name)
            except (OSError, ZkvError) as error:
                log.warning("the rest of %s stays in %s: %s", action.name, action.url, error)

        self._begin(remove)

    def _begin(self, act: Callable[[], Wrote | Loaded | Written | Found | None]) -> None:
        running = asyncio.get_running_loop()
        if self._jobs is None:
            self._jobs = SimpleQueue()
            # A disk that hangs must not keep the process from ending.
            Thread(target=_work, args=(self._jobs,), daemon=True).start()

        def run() -> None:
            said = None if self._closed else act()
            # The loop may have ended meanwhile.
            if said is not None and not running.is_closed():
                running.call_soon_threadsafe(self._told, said)

        self._jobs.put(run)

    def _told(self, said: Wrote | Loaded | Written | Found) -> None:
        if not self._closed:
            self._tell(said)

    def close(self) -> None:
        """Begin nothing more. A file that is being written stays a part without a name."""
        self._closed = True


def _work(jobs: SimpleQueue[Callable[[], None]]) -> None:
    while True:
        jobs.get()()
