"""The journal as a file: locked, appended to, written anew. Decides nothing.

A folder belongs to one broker at a time. Files are for their owner alone. What was appended is on
the disk when `append` returns; a file that is written anew takes the old one's place at once, or
not at all.

Locks do not hold everywhere, so a file is taken before it is read: it gets another name. A broker
that was stopped, and goes on when another one has its place, finds that out after it has written
and before it says anything; and what it had written by then, the other one has read.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from pathlib import Path

from zkv.errors import JournalError
from zkv_brokers.journal import MAGIC, Contents, contents, written

FILE, FRESH, TAKEN, LOCK = "journal", "journal.new", "journal.taken", "lock"
OLD = "journal.old"


class JournalFile:
    """One broker's journal in a folder, which is made if it is not there.

    Raises:
        JournalError: the folder cannot be used, another broker uses it, or others may read it.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / FILE
        self.bytes = 0
        """What the file has."""
        self.sound = False
        """Whether it is this broker's, and records may be appended to it."""
        self._folder = folder
        self._file = -1
        self._number = 0
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise JournalError(f"the journal's folder {folder} cannot be used: {error}") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._lock)
            raise JournalError(
                f"another broker that is running, or was stopped, has the journal in {folder}: end "
                "that one, or name another folder (--journal)"
            ) from error

    def read(self) -> Contents:
        """Take the journal, and return what it holds; nothing if there is none.

        Raises:
            JournalError: it is damaged, or cannot be read, or is not this user's alone.
        """
        taken = self._folder / TAKEN
        try:
            if self.path.exists():
                self.path.replace(taken)
                self._sync_folder()
            file = os.open(taken, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            return Contents([], 0, 0)
        except OSError as error:
            raise JournalError(f"{self.path} cannot be read: {error}") from error
        with os.fdopen(file, "rb") as reader:
            about = os.fstat(reader.fileno())
            if about.st_uid != os.geteuid() or about.st_mode & 0o077:
                raise JournalError(
                    f"{taken} is not this user's alone, so it may be anybody's words: "
                    f"chown it, and chmod 600 {taken}"
                )
            return contents(reader.read(), str(taken))

    def begin(self, content: bytes) -> None:
        """Write the journal anew: this first record alone.

        Raises:
            JournalError: it could not be made safe. The old one is as it was, and goes on if this
                is `sound`.
        """
        if self._file >= 0:
            sound, self.sound = self.sound, False
            self._check_owned()
            self.sound = sound
        fresh = self._folder / FRESH
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            file = os.open(fresh, flags, 0o600)
        except OSError as error:
            raise _unwritten(fresh, error) from error
        whole = MAGIC + written(0, content)
        try:
            _write_all(file, whole)
            os.fsync(file)
        except OSError as error:
            os.close(file)
            with contextlib.suppress(OSError):
                fresh.unlink()
            raise _unwritten(fresh, error) from error
        self.sound = False
        try:
            fresh.replace(self.path)
            (self._folder / TAKEN).unlink(missing_ok=True)
            self._sync_folder()
        except OSError as error:
            os.close(file)
            raise _unwritten(self.path, error) from error
        if self._file >= 0:
            os.close(self._file)
        self._file, self._number, self.bytes = file, 1, len(whole)
        self.sound = True

    def append(self, content: bytes) -> None:
        """Write one more record; it is on the disk when this returns.

        Raises:
            JournalError: it is not, or nobody knows. Nothing may be appended any more.
        """
        record = written(self._number, content)
        self.sound = False
        try:
            _write_all(self._file, record)
            os.fdatasync(self._file)
        except OSError as error:
            # What a failed sync has left out is never told again: this file is of no more use.
            raise _unwritten(self.path, error) from error
        self._check_owned()
        self._number += 1
        self.bytes += len(record)
        self.sound = True

    def _check_owned(self) -> None:
        """See whether this file is still the journal."""
        try:
            mine = os.path.samestat(os.stat(self.path), os.fstat(self._file))
        except FileNotFoundError:
            mine = False
        except OSError as error:
            raise _unwritten(self.path, error) from error
        if not mine:
            raise JournalError(
                f"another broker has taken {self.path} over: this one ends, and changes nothing "
                "more"
            )

    def remove(self) -> None:
        """Take the journal away: what it is of has ended."""
        self.path.unlink(missing_ok=True)
        self._sync_folder()

    def put_aside(self) -> Path:
        """Give the journal another name too, so that it outlives the next one; return that."""
        old = self._folder / OLD
        try:
            old.unlink(missing_ok=True)
            old.hardlink_to(self.path)
        except OSError as error:
            raise _unwritten(old, error) from error
        return old

    def close(self) -> None:
        """Close the file and let the folder go."""
        for file in (self._file, self._lock):
            if file >= 0:
                os.close(file)
        self._file = self._lock = -1

    def _sync_folder(self) -> None:
        folder = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def _write_all(file: int, content: bytes) -> None:
    view = memoryview(content)
    while view:
        view = view[os.write(file, view) :]


def _unwritten(path: Path, error: OSError) -> JournalError:
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    what = "make room" if full else "look at the disk"
    return JournalError(
        f"{path} could not be written: {error}. This broker ends, as it must not promise what it "
        f"may forget; {what} and start it again on the same address within the time after which "
        "workers and servers give it up (--broker-lost)"
    )
