"""Snapshots in a folder: what is torn, cut off, flipped or put in another's place is refused."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from zkv import snapshot as sn
from zkv.errors import BadSnapshot, ConfigError
from zkv.optimizer_spec import optimizer
from zkv.wire import BlockSpec, KeyEntry, KeySpec, Segment
from zkv_net import snapshot_folder as sf
from zkv_net import storage

SIZE = 100


@pytest.fixture(params=["path", "file", "memory"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A folder of this machine, by its path or URL, and one of fsspec's."""
    if request.param == "memory":
        fsspec = pytest.importorskip("fsspec")
        yield "memory://snaps"
        fsspec.filesystem("memory").store.clear()
    else:
        yield str(tmp_path / "snaps") if request.param == "path" else f"file://{tmp_path}/snaps"


def value(number: int) -> Any:
    return np.full(SIZE, number, np.float32)


def write(url: str, number: int, term: int = 7) -> sn.Manifest:
    """Write a snapshot of one key on one server, whose values are its number."""
    plain = optimizer("sgd:lr=0.1").to_plain()
    name, arrays = sn.name_of(term, number), {"0.0": value(number)}
    part = sf.write_part(url, name, sn.server_file(0), arrays, {"n": str(number)})
    key = KeyEntry(0, KeySpec("../w", "float32", (SIZE,)))
    manifest = sn.Manifest(
        sn.FORMAT, "0.1.0", name, 0.0, number, term, 3,
        sn.Settings("bsp", plain, plain, "none", "none", "none", "servers"),
        [sn.Init(1, [key])], [BlockSpec(0, 0, [Segment(0, 0, SIZE)])],
        [], None, (2, 1, 1), [], [part],
    )  # fmt: skip
    sf.complete(url, manifest)
    return manifest


def read(url: str, manifest: sn.Manifest) -> Any:
    arrays, metadata = sf.read_part(url, manifest, manifest.servers[0])
    assert metadata == {"n": str(manifest.version)}
    return arrays["0.0"]


def test_what_was_written_is_read_and_the_newest_is_taken(url: str) -> None:
    assert sf.found(url) == []
    for number in (1, 2):
        write(url, number)
    where, manifest = sf.chosen(url)
    assert (where, manifest.version) == (url, 2)
    np.testing.assert_array_equal(read(url, manifest), value(2))
    _, older = sf.chosen(f"{url}/{sn.name_of(7, 1)}")
    np.testing.assert_array_equal(read(url, older), value(1))


def test_two_are_kept_and_the_rest_of_one_that_failed_goes_with_them(url: str) -> None:
    write(url, 1)
    sf.write_part(url, sn.name_of(7, 2), sn.server_file(0), {"0.0": value(2)}, {})
    for number in (3, 4):
        write(url, number)
    assert [one.name for one in sf.found(url)] == [sn.name_of(7, 4), sn.name_of(7, 3)]
    assert sn.in_order(storage.folder(url).names()) == [sn.name_of(7, 4), sn.name_of(7, 3)]
    # A later broker's come after an earlier one's, whatever they count.
    write(url, 1, term=8)
    assert sf.chosen(url)[1].name == sn.name_of(8, 1)


def test_without_its_manifest_a_snapshot_does_not_exist(url: str) -> None:
    write(url, 1)
    sf.write_part(url, sn.name_of(7, 2), sn.server_file(0), {"0.0": value(2)}, {})
    assert sf.chosen(url)[1].version == 1
    with pytest.raises(BadSnapshot, match=r"no snapshot zkv-0+7-0+2 in .*; there are: zkv-0+7-0+1"):
        sf.chosen(f"{url}/{sn.name_of(7, 2)}")


def test_an_empty_folder_says_so(url: str) -> None:
    with pytest.raises(BadSnapshot, match=r"there is no snapshot in .*snaps; there are: none"):
        sf.chosen(url)


def cut_off(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-3] ^= 4
    path.write_bytes(data)


def lose(path: Path) -> None:
    path.unlink()


@pytest.mark.parametrize("harm", [cut_off, flip, lose])
@pytest.mark.parametrize("file", [sn.MANIFEST, sn.server_file(0)])
def test_what_is_broken_is_named_with_what_was_expected_and_an_older_one_is_used_on_request(
    tmp_path: Path, harm: Callable[[Path], None], file: str
) -> None:
    url = str(tmp_path)
    write(url, 1)
    manifest = write(url, 2)
    harm(tmp_path / manifest.name / file)
    if (harm, file) == (lose, sn.MANIFEST):
        assert sf.chosen(url)[1].version == 1
        return
    with pytest.raises(BadSnapshot) as caught:
        # Of files only the sizes are looked at before they are read.
        read(*sf.chosen(url))
    assert f"{manifest.name}/{file}" in str(caught.value)
    expected = {cut_off: "manifest", flip: "SHA-256 ", lose: "cannot be read"}
    assert (expected[harm] if file != sn.MANIFEST else "manifest") in str(caught.value)
    assert sf.chosen(url, whole=True)[1].version == 1
    assert [one.name for one in sf.found(url)] == [manifest.name, sn.name_of(7, 1)]


def test_a_manifest_and_a_file_of_other_snapshots_are_not_mistaken_for_its_own(
    tmp_path: Path,
) -> None:
    url = str(tmp_path)
    first, second = write(url, 1), write(url, 2)
    other = tmp_path / first.name / sn.server_file(0)
    (tmp_path / second.name / sn.server_file(0)).write_bytes(other.read_bytes())
    with pytest.raises(BadSnapshot, match="its bytes have changed"):
        read(url, second)
    manifest = (tmp_path / first.name / sn.MANIFEST).read_bytes()
    (tmp_path / second.name / sn.MANIFEST).write_bytes(manifest)
    with pytest.raises(BadSnapshot, match=f"is that of {first.name}"):
        sf.chosen(url)


def test_no_whole_one_says_what_is_wrong_with_each(tmp_path: Path) -> None:
    url = str(tmp_path)
    for number in (1, 2):
        flip(tmp_path / write(url, number).name / sn.server_file(0))
    with pytest.raises(BadSnapshot) as caught:
        sf.chosen(url, whole=True)
    assert len(str(caught.value).splitlines()) == 2


def test_a_snapshot_whose_files_are_elsewhere_is_none(url: str) -> None:
    """As where servers of other machines have written into folders of their own."""
    manifest = write(url, 1)
    parts = [*manifest.servers, sn.Part(sn.server_file(1), 8, "0" * 64)]
    with pytest.raises(BadSnapshot, match=r"server-0.safetensors cannot be read, and the manifest"):
        sf.complete(url, structs.replace(manifest, name=sn.name_of(7, 2), servers=parts))
    assert sf.chosen(url)[1].version == 1


@pytest.mark.parametrize("name", ["write", "fsync", "replace"])
def test_what_fails_on_the_way_leaves_the_old_one_and_nothing_of_the_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    url = str(tmp_path)
    write(url, 1)

    def fails(*given: Any) -> None:
        raise OSError(28, "No space left on device")

    if name == "write":
        monkeypatch.setattr(storage, "_copied", fails)
    else:
        monkeypatch.setattr(os, name, fails)
    with pytest.raises(OSError, match="No space left"):
        write(url, 2)
    monkeypatch.undo()
    assert sf.chosen(url)[1].version == 1
    assert not list(tmp_path.rglob(f"*{storage.PARTIAL}"))
    sf.give_up(url, sn.name_of(7, 2))
    assert storage.folder(url).names() == [sn.name_of(7, 1)]
    assert write(url, 3).version == sf.chosen(url)[1].version


def test_a_file_is_on_the_disk_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    fsync, replace = os.fsync, os.replace

    def noted(what: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def act(*given: Any) -> Any:
            done.append(what)
            return call(*given)

        return act

    monkeypatch.setattr(os, "fsync", noted("fsync", fsync))
    monkeypatch.setattr(os, "replace", noted("rename", replace))
    storage.folder(str(tmp_path)).write("a/b", [b"content"])
    assert done == ["fsync", "rename", "fsync", "fsync", "fsync"]


def test_what_cannot_be_reached_is_said_with_what_to_install() -> None:
    pytest.importorskip("fsspec")
    with pytest.raises(ConfigError, match="nosuch://x cannot be used"):
        storage.folder("nosuch://x")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux's device that is always full")
def test_row_17_a_device_that_is_full_leaves_the_old_one(tmp_path: Path) -> None:
    """What is written goes to a device that takes nothing, so the system itself says so."""
    url = str(tmp_path)
    write(url, 1)
    target = tmp_path / sn.name_of(7, 2) / f"{sn.server_file(0)}{storage.PARTIAL}"
    target.parent.mkdir()
    target.symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left on device"):
        write(url, 2)
    assert sf.chosen(url, whole=True)[1].version == 1
    assert not target.is_symlink()
    assert Path("/dev/full").exists()
    write(url, 2)
    assert sf.chosen(url, whole=True)[1].version == 2
