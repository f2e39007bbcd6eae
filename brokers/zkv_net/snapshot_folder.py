"""Snapshots in a folder: which there are, which are whole, how their files are read and written.

What is read is compared with its manifest first, so that nothing broken is ever used.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from zkv import snapshot as sn
from zkv import tensor_file
from zkv.dtypes import Array
from zkv.errors import BadSnapshot
from zkv_net.storage import Folder, folder


@dataclass(frozen=True, slots=True)
class Found:
    """One snapshot of a folder: its manifest, or why it has none that can be used."""

    name: str
    manifest: sn.Manifest | None
    why: str = ""


def split(url: str) -> tuple[str, str]:
    """Return the folder that a text names, and the snapshot in it ("": the newest).

    >>> split("snaps/zkv-0000000000000001-00000002"), split("snaps/")
    (('snaps', 'zkv-0000000000000001-00000002'), ('snaps/', ''))
    """
    parent, _, last = url.rstrip("/").rpartition("/")
    return (parent or ".", last) if sn.NAME.fullmatch(last) else (url, "")


def found(url: str) -> list[Found]:
    """Return the snapshots of a folder that have a manifest, the newest first.

    Raises:
        OSError: the folder cannot be read.
    """
    where = folder(url)
    names = [one for one in sn.in_order(where.names()) if where.exists(f"{one}/{sn.MANIFEST}")]
    return [_found(where, url, name) for name in names]


def _found(where: Folder, url: str, name: str) -> Found:
    try:
        return Found(name, manifest_of(where, url, name))
    except BadSnapshot as error:
        return Found(name, None, str(error))


def manifest_of(where: Folder, url: str, name: str) -> sn.Manifest:
    """Return the manifest of a snapshot.

    Raises:
        BadSnapshot: there is none that is whole, or not of this snapshot.
    """
    path = f"{name}/{sn.MANIFEST}"
    try:
        manifest = sn.decode(where.read(path), f"{url}/{path}")
    except OSError as error:
        raise BadSnapshot(f"{url}/{path} cannot be read: {error}") from error
    if manifest.name != name:
        raise BadSnapshot(f"{url}/{path} is that of {manifest.name}: it was put in its place")
    return manifest


def chosen(url: str, *, whole: bool = False) -> tuple[str, sn.Manifest]:
    """Return the folder and the manifest of the snapshot that `url` names: that one, or the newest
    of a folder. The sizes of its files are right.

    `whole`: of a folder the newest of which every byte is as it was written, which is read for
    that.

    Raises:
        BadSnapshot: there is none, or it is not whole; the file and what to try are named.
    """
    url, name = split(url)
    where = folder(url)
    try:
        there = found(url)
    except OSError as error:
        raise BadSnapshot(f"{url} cannot be read: {error}") from error
    mine = [one for one in there if name in ("", one.name)]
    if not mine:
        which = f"no snapshot {name}" if name else "no snapshot"
        names = ", ".join(one.name for one in there) or "none at all"
        raise BadSnapshot(f"there is {which} in {url}; there are: {names}")
    problems = []
    for one in mine:
        try:
            if one.manifest is None:
                raise BadSnapshot(one.why)
            check(where, url, one.manifest, whole=whole)
            return url, one.manifest
        except BadSnapshot as error:
            problems.append(str(error))
            if not whole or name:
                break
    raise BadSnapshot("\n".join(problems))


def check(where: Folder, url: str, manifest: sn.Manifest, *, whole: bool = True) -> None:
    """Compare the files of a snapshot with its manifest: each byte, or (not `whole`) their sizes.

    Raises:
        BadSnapshot: one is not as it was written.
    """
    for part in manifest.parts:
        path = f"{manifest.name}/{part.file}"
        try:
            size, digest = where.digest(path) if whole else (where.size(path), None)
        except OSError as error:
            raise BadSnapshot(
                f"{url}/{path} cannot be read, and the manifest names it: {error}"
            ) from error
        sn.check_part(part, size, digest, f"{url}/{path}")


def read_part(
    url: str, manifest: sn.Manifest, part: sn.Part
) -> tuple[dict[str, Array], dict[str, str]]:
    """Return the arrays and the metadata of one file.

    Raises:
        BadSnapshot: it cannot be read, or is not as it was written.
    """
    path = f"{manifest.name}/{part.file}"
    try:
        data = folder(url).read(path)
    except OSError as error:
        raise BadSnapshot(f"{url}/{path} cannot be read: {error}") from error
    sn.check_part(part, len(data), sn.digest_of(data), f"{url}/{path}")
    return tensor_file.opened(data, f"{url}/{path}")


def write_part(
    url: str, name: str, file: str, arrays: Mapping[str, Array], metadata: Mapping[str, str]
) -> sn.Part:
    """Write one file of a snapshot, which exists when its manifest does.

    Raises:
        OSError: it cannot be written; nothing of it is left under its name.
    """
    pieces = tensor_file.pieces(arrays, metadata)
    return sn.Part(file, *folder(url).write(f"{name}/{file}", pieces))


def complete(url: str, manifest: sn.Manifest) -> list[str]:
    """Write the manifest of a snapshot whose files are all there, and remove those that are too
    old; return the names of these.

    Raises:
        OSError, BadSnapshot: it does not exist, as a file is missing or the manifest cannot be
            written.
    """
    where = folder(url)
    check(where, url, manifest, whole=False)
    where.write(f"{manifest.name}/{sn.MANIFEST}", [sn.encode(manifest)])
    return _removed(where, sn.to_remove(where.names(), _whole(where)))


def _whole(where: Folder) -> Iterable[str]:
    return [one for one in sn.in_order(where.names()) if where.exists(f"{one}/{sn.MANIFEST}")]


def _removed(where: Folder, names: Iterable[str]) -> list[str]:
    gone = []
    for name in names:
        try:
            where.remove(name, sn.MANIFEST)
        except OSError:
            # The new one exists; the next one tries again.
            continue
        gone.append(name)
    return gone


def give_up(url: str, name: str) -> None:
    """Remove what was written of a snapshot that failed, as far as that can be."""
    _removed(folder(url), [name])
