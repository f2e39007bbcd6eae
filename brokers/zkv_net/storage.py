"""Folders that files are kept in: on this machine, or wherever fsspec reaches.

A file is there whole or not at all: here it gets its name when it is written and on the disk, and
an object store shows an object when it is complete. What cannot be written is an `OSError`, whoever
says so. Knows nothing of what is in the files.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from zkv.dtypes import Array
from zkv.errors import ConfigError

READ_BYTES = 1 << 22
PARTIAL = ".part"
STORES = ("s3", "gs", "az", "abfs")


class Folder(ABC):
    """A folder of folders of files; paths are relative to it, with "/" between their parts."""

    @abstractmethod
    def write(self, path: str, pieces: Iterable[bytes | Array]) -> tuple[int, str]:
        """Write a file; return its bytes and their SHA-256. OSError: it is not there, or as
        before."""

    @abstractmethod
    def pieces(self, path: str) -> Iterator[bytes]:
        """Yield the bytes of a file. OSError: it cannot be read."""

    @abstractmethod
    def size(self, path: str) -> int:
        """Return the bytes of a file. OSError: there is none."""

    @abstractmethod
    def names(self) -> list[str]:
        """Return what lies in the folder; nothing if it is not there. OSError: nobody can say."""

    @abstractmethod
    def exists(self, path: str) -> bool:
        """Return whether there is such a file."""

    @abstractmethod
    def remove(self, name: str, first: str) -> None:
        """Remove a folder in it with its files, that of the name `first` before all others.
        OSError: something is left of it."""

    def read(self, path: str) -> bytes:
        """Return the bytes of a file. OSError: it cannot be read."""
        return b"".join(self.pieces(path))

    def digest(self, path: str) -> tuple[int, str]:
        """Return the bytes of a file, and their SHA-256. OSError: it cannot be read."""
        total, found = 0, hashlib.sha256()
        for piece in self.pieces(path):
            total += len(piece)
            found.update(piece)
        return total, found.hexdigest()


def folder(url: str) -> Folder:
    """Return the folder that a path or an URL names; nothing is looked at yet.

    Raises:
        ConfigError: it needs a package that is not installed, or is no URL that fsspec knows.
    """
    if "://" not in url or url.startswith("file://"):
        return _Local(Path(url.removeprefix("file://")))
    return _Remote(url)


def absolute(url: str) -> str:
    """Return a path or an URL as it is named from any process of this machine."""
    return url if not url or "://" in url else os.path.abspath(os.path.expanduser(url))


class _Local(Folder):
    """A folder of this machine."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def write(self, path: str, pieces: Iterable[bytes | Array]) -> tuple[int, str]:
        target = self._path / path
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_name(target.name + PARTIAL)
        try:
            with partial.open("wb") as file:
                total, digest = _copied(file, pieces)
                file.flush()
                os.fsync(file.fileno())
            os.replace(partial, target)
            # Without these the name may be lost with the power, and the file with it.
            for one in (target.parent, self._path, self._path.parent):
                _sync_folder(one)
        except BaseException:
            with contextlib.suppress(OSError):
                partial.unlink(missing_ok=True)
            raise
        return total, digest

    def pieces(self, path: str) -> Iterator[bytes]:
        with (self._path / path).open("rb") as file:
            while piece := file.read(READ_BYTES):
                yield piece

    def size(self, path: str) -> int:
        return (self._path / path).stat().st_size

    def names(self) -> list[str]:
        try:
            return sorted(one.name for one in self._path.iterdir())
        except FileNotFoundError:
            return []

    def exists(self, path: str) -> bool:
        return (self._path / path).is_file()

    def remove(self, name: str, first: str) -> None:
        there = self._path / name
        (there / first).unlink(missing_ok=True)
        for file in sorted(there.iterdir()) if there.is_dir() else ():
            file.unlink(missing_ok=True)
        with contextlib.suppress(FileNotFoundError):
            there.rmdir()


def _sync_folder(path: Path) -> None:
    if os.name == "nt":
        return  # It has no such call for folders.
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _copied(file: Any, pieces: Iterable[Any]) -> tuple[int, str]:
    total, digest = 0, hashlib.sha256()
    for piece in pieces:
        view = memoryview(piece)
        for at in range(0, view.nbytes, READ_BYTES):
            part = view[at : at + READ_BYTES]
            file.write(part)
            digest.update(part)
            total += part.nbytes
    return total, digest.hexdigest()


class _Remote(Folder):
    """A folder that fsspec reaches. Its stores show an object when it is complete."""

    def __init__(self, url: str) -> None:
        try:
            import fsspec
        except ImportError as error:
            raise ConfigError(f"{url} needs fsspec: pip install 'zkv[remote]'") from error
        self._is_store = url.partition("://")[0] in STORES
        if self._is_store:
            _register(url.partition("://")[0])
        try:
            self._fs, self._root = fsspec.core.url_to_fs(url)
        except (ImportError, ValueError) as error:
            raise ConfigError(
                f"{url} cannot be used: {error}; for s3:// install 'zkv[s3]'"
            ) from error
        self._root = self._root.rstrip("/")

    def _at(self, path: str) -> str:
        return f"{self._root}/{path}" if path else self._root

    def write(self, path: str, pieces: Iterable[bytes | Array]) -> tuple[int, str]:
        with _as_os_error(self._at(path)):
            if not self._is_store:  # It has no folders, and would make a bucket of a slip.
                self._fs.makedirs(self._at(path).rpartition("/")[0], exist_ok=True)
            with self._fs.open(self._at(path), "wb") as file:
                total, digest = _copied(_Bytes(file), pieces)
            self._fs.invalidate_cache()
            found = int(self._fs.size(self._at(path)))
        if found != total:
            raise OSError(f"{self._at(path)} has {found} bytes of the {total} that were written")
        return total, digest

    def pieces(self, path: str) -> Iterator[bytes]:
        with _as_os_error(self._at(path)), self._fs.open(self._at(path), "rb") as file:
            while piece := file.read(READ_BYTES):
                yield bytes(piece)

    def size(self, path: str) -> int:
        with _as_os_error(self._at(path)):
            return int(self._fs.size(self._at(path)))

    def names(self) -> list[str]:
        with _as_os_error(self._root):
            try:
                self._fs.invalidate_cache()
                found = self._fs.ls(self._root, detail=False)
            except FileNotFoundError:
                return []
        return sorted({str(one).rstrip("/").rpartition("/")[2] for one in found})

    def exists(self, path: str) -> bool:
        with _as_os_error(self._at(path)):
            self._fs.invalidate_cache()
            return bool(self._fs.exists(self._at(path)))

    def remove(self, name: str, first: str) -> None:
        with _as_os_error(self._at(name)):
            self._fs.invalidate_cache()
            if self._fs.exists(self._at(f"{name}/{first}")):
                self._fs.rm_file(self._at(f"{name}/{first}"))
            if self._fs.exists(self._at(name)):
                self._fs.rm(self._at(name), recursive=True)


class _Bytes:
    """A file for those that take nothing but bytes."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def write(self, part: memoryview) -> None:
        """Write a part."""
        self._file.write(bytes(part))


def _register(protocol: str) -> None:
    """Let obstore speak to object stores, if it is installed; else fsspec takes what it has."""
    with contextlib.suppress(ImportError):
        from obstore.fsspec import register

        register(protocol, asynchronous=False)


@contextmanager
def _as_os_error(where: str) -> Iterator[None]:
    """Each store has exceptions of its own for what it could not do."""
    try:
        yield
    except FileNotFoundError:
        raise
    except Exception as error:
        raise OSError(f"{where}: {type(error).__name__}: {error}") from error
