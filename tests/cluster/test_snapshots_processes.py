"""Snapshots as a person types them: beside a run, at its end, after a crash; and what follows."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from processes import PATIENCE_S, answer_of, free_address, launched, program

from zkv_cli.ask import ask_status
from zkv_net import snapshot_folder as sf

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="sessions are read from /proc"),
]

TRAINS = """
import hashlib, sys
import numpy as np
import zkv

last = int(sys.argv[1])
with zkv.connect() as worker:
    worker.init({f"k/../{at}": np.full(30_000, at, np.float32) for at in range(4)})
    number = -1
    while number < last:
        with worker.batch() as batch:
            number = batch.version + 1
            chance = np.random.default_rng([worker.rank, batch.version])
            for key, value in batch.params.items():
                noise = chance.standard_normal(30_000).astype(np.float32)
                batch.push(key, value * np.float32(0.1) + noise)
    worker.barrier()
    model = worker.pull()
    bits = b"".join(model[key].tobytes() for key in sorted(model))
    print("digest", number, hashlib.sha256(bits).hexdigest(), flush=True)
    worker.barrier()
"""
TWO = ("--workers", "2")
OPTIONS = (*TWO, "--optimizer", "adam:lr=0.1")
ZKV = [sys.executable, "-m", "zkv_cli"]
HERE = dict(os.environ)


def run_of(bind: str, script: str, last: int) -> str:
    """Run two workers up to a version; return the digest of the model."""
    with launched("run", "-n", "2", script, str(last), env={"ZKV_BROKER": bind}) as run:
        found = {run.line(r"digest (\d+ \w+)").group(1) for _ in range(2)}
        assert run.end() == 0
    (digest,) = found
    return digest


def test_a_cluster_that_was_told_to_end_goes_on_later_with_its_bits(tmp_path: Path) -> None:
    script, folder = program(tmp_path, TRAINS), str(tmp_path / "snaps")
    bind = free_address()
    with launched("up", "--servers", "2", *OPTIONS, "--bind", bind) as up:
        up.line("2 servers are in")
        straight = run_of(bind, script, 12)
    bind = free_address()
    with launched("up", "--servers", "2", *OPTIONS, "--bind", bind, "--snapshot-dir", folder) as up:
        up.line("2 servers are in")
        run_of(bind, script, 5)
        said = answer_of([*ZKV, "snapshot", "--broker", bind], tmp_path, HERE)
        assert re.search(r"snaps/zkv-\w+-00000001: version 5, .* in [\d.]+ s", said)
        up.process.send_signal(signal.SIGTERM)
        assert up.end() == 143
    found = [one.manifest for one in sf.found(folder) if one.manifest is not None]
    assert [one.version for one in found] == [5, 5]
    assert sorted(os.listdir(folder)) == sorted(one.name for one in found)
    bind = free_address()
    with launched("up", "--servers", "3", *TWO, "--bind", bind, "--restore", folder) as up:
        up.line("3 servers are in")
        assert ask_status(bind, 10.0)["version"] == 5
        assert run_of(bind, script, 12) == straight


def test_after_a_crash_the_last_periodic_one_is_there(tmp_path: Path) -> None:
    script, folder, bind = program(tmp_path, TRAINS), str(tmp_path / "snaps"), free_address()
    settings = ("--snapshot-dir", folder, "--snapshot-every", "3updates")
    with (
        launched("up", "--servers", "2", *OPTIONS, "--bind", bind, *settings) as up,
        launched("run", "-n", "2", script, "100000", env={"ZKV_BROKER": bind}),
    ):
        for _ in range(3):
            up.line(r"snapshot zkv-[\w-]+ of version \d+ is in")
        for pid in up.session():
            os.kill(pid, signal.SIGKILL)
    version = sf.chosen(folder, whole=True)[1].version
    assert version >= 3
    bind = free_address()
    with launched("up", "--servers", "1", *TWO, "--bind", bind, "--restore", folder) as up:
        up.line("1 server is in")
        again = run_of(bind, script, version + 4)
    bind = free_address()
    with launched("up", "--servers", "1", *OPTIONS, "--bind", bind) as up:
        up.line("1 server is in")
        assert run_of(bind, script, version + 4) == again


def test_what_is_in_a_snapshot_is_told_and_what_is_broken_is_named(tmp_path: Path) -> None:
    script, folder = program(tmp_path, TRAINS), str(tmp_path / "snaps")
    command = ("run", "-n", "2", *OPTIONS[2:], "--snapshot-dir", folder, script, "3")
    with launched(*command) as run:
        assert run.end() == 0
    shown = json.loads(answer_of([*ZKV, "snapshot", "show", folder, "--json"], tmp_path, HERE))
    assert (shown["version"], shown["optimizer"]) == (3, "adam:lr=0.1")
    assert {one["key"] for one in shown["keys"]} == {f"k/../{at}" for at in range(4)}
    text = answer_of([*ZKV, "snapshot", "show", folder, "--check"], tmp_path, HERE)
    assert "every byte is as it was written" in text
    listed = answer_of([*ZKV, "snapshot", "list", folder, "--check"], tmp_path, HERE)
    assert re.search(r"zkv-[\w-]+ +3 .* whole", listed)
    file = Path(folder, shown["name"], "server-0.safetensors")
    file.write_bytes(file.read_bytes()[:-1])
    for arguments, code, words in (
        (("snapshot", "show", folder), 1, "server-0.safetensors has"),
        (("broker", "--restore", folder, "--bind", free_address()), 1, "it was cut off"),
        (("snapshot", "list", str(tmp_path)), 1, "there is no snapshot in"),
        (("broker", "--snapshot-every", "3"), 2, "is no interval; write 300s"),
        (("broker", "--snapshot-every", "3s"), 2, "give --snapshot-dir too"),
    ):
        done = subprocess.run(
            [*ZKV, *arguments], capture_output=True, text=True, check=False, timeout=PATIENCE_S
        )
        assert done.returncode == code, done.stderr
        assert words in done.stderr
        assert "Traceback" not in done.stderr
    assert "broken: " in answer_of([*ZKV, "snapshot", "list", folder], tmp_path, HERE)
