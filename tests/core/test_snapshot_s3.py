"""Snapshots in an object store: a local one that speaks S3, through obstore."""

from __future__ import annotations

import os
import urllib.request
from collections.abc import Iterator

import numpy as np
import pytest

from zkv import snapshot as sn
from zkv.errors import BadSnapshot
from zkv.optimizer_spec import optimizer
from zkv.wire import BlockSpec, KeyEntry, KeySpec, Segment
from zkv_net import snapshot_folder as sf
from zkv_net import storage

moto = pytest.importorskip("moto.server")
pytest.importorskip("obstore")
SIZE = 3_000_000
"""Elements: more than one part of an upload has."""


@pytest.fixture
def url(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A bucket of its own, on a server of its own."""
    server = moto.ThreadedMotoServer(port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    for name, value in {
        "AWS_ACCESS_KEY_ID": "nobody",
        "AWS_SECRET_ACCESS_KEY": "nothing",
        "AWS_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ALLOW_HTTP": "true",
        "NO_PROXY": "*",
    }.items():
        monkeypatch.setenv(name, value)
    made = urllib.request.Request(f"{os.environ['AWS_ENDPOINT_URL']}/bucket", method="PUT")
    urllib.request.urlopen(made).read()
    yield "s3://bucket/runs/one"
    server.stop()


def write(url: str, number: int) -> sn.Manifest:
    plain = optimizer("sgd:lr=0.1").to_plain()
    name, value = sn.name_of(7, number), np.full(SIZE, number, np.float32)
    part = sf.write_part(url, name, sn.server_file(0), {"0.0": value}, {})
    key = KeyEntry(0, KeySpec("w", "float32", (SIZE,)))
    manifest = sn.Manifest(
        sn.FORMAT, "0.1.0", name, 0.0, number, 7, 3,
        sn.Settings("bsp", plain, plain, "none", "none", "none", "servers"),
        [sn.Init(1, [key])], [BlockSpec(0, 0, [Segment(0, 0, SIZE)])],
        [], None, (2, 1, 1), [], [part],
    )  # fmt: skip
    sf.complete(url, manifest)
    return manifest


def test_they_are_written_read_listed_removed_and_compared(url: str) -> None:
    with pytest.raises(BadSnapshot, match="there is no snapshot in s3://bucket/runs/one"):
        sf.chosen(url)
    for number in (1, 2, 3):
        write(url, number)
    assert [one.name for one in sf.found(url)] == [sn.name_of(7, 3), sn.name_of(7, 2)]
    assert storage.folder(url).names() == [sn.name_of(7, 2), sn.name_of(7, 3)]
    _, manifest = sf.chosen(url, whole=True)
    arrays, _ = sf.read_part(url, manifest, manifest.servers[0])
    assert arrays["0.0"][0] == arrays["0.0"][-1] == 3
    storage.folder(url).write(f"{manifest.name}/{sn.server_file(0)}", [b"other"])
    with pytest.raises(BadSnapshot, match="has 5 bytes, and the manifest says 12000"):
        sf.chosen(url)
    assert sf.chosen(url, whole=True)[1].version == 2


def test_a_bucket_that_is_not_there_is_said(url: str) -> None:
    with pytest.raises(OSError, match="elsewhere"):
        write(url.replace("bucket", "elsewhere"), 1)
