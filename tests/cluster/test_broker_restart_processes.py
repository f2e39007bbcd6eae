"""SIGKILL for the broker, again and again, and start it on the same address: the run goes on, and
every bit and every count is as if nothing had been."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from keyrings import Keys
from processes import PATIENCE_S, Launched, free_address, launched, program

from zkv_cli.ask import ask_status
from zkv_net import snapshot_folder as sf

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="sessions are read from /proc"),
]

KILLS, EVERY = 4, 25
BATCHES = KILLS * EVERY + 5
TRAINS = """
import hashlib, sys
import numpy as np
import zkv

batches, every = int(sys.argv[1]), int(sys.argv[2])
with zkv.connect() as worker:
    worker.init({"w": np.ones((40, 50), np.float32), "b": np.zeros(7, np.float16)})
    worker.init({"n": np.zeros(3)}, plain=True, rule="assign")
    for number in range(batches):
        chance = np.random.default_rng([worker.rank, number])
        with worker.batch(weight=1.0 + worker.rank) as batch:
            for key in ("w", "b"):
                value = batch.params[key]
                noise = chance.standard_normal(value.shape).astype(value.dtype)
                batch.push(key, value * value.dtype.type(0.1) + noise)
        if number % every == every - 1:
            if worker.rank == 0:
                print("at", number, flush=True)
            worker.push("n", np.full(3, float(number)))
    worker.barrier()
    model = worker.pull()
    bits = b"".join(model[key].tobytes() for key in sorted(model))
    print("digest", hashlib.sha256(bits).hexdigest(), int(worker.pull("n")[0]), flush=True)
    worker.barrier()
"""
COUNTS = """
import sys
import numpy as np
import zkv

batches, every = int(sys.argv[1]), int(sys.argv[2])
with zkv.connect() as worker:
    one = {"rule": "sgd:lr=1.0", "reduce": "sum"}
    worker.init({"counts": np.zeros(batches)}, **one)
    told = []
    for number in range(batches):
        with worker.batch() as batch:
            gradient = np.zeros(batches)
            gradient[number] = -(4.0**worker.rank)
            batch.push("counts", gradient)
        told.append(batch)
        if worker.rank == 0 and number % every == every - 1:
            print("at", number, flush=True)
    worker.barrier()
    counts = worker.pull()["counts"].astype(int)
    digits = counts // 4**worker.rank % 4
    assert {one.outcome for one in told} == {"committed"}, [one.outcome for one in told]
    print("digits", *digits, flush=True)
    worker.barrier()
"""


@contextmanager
def cluster(
    folder: Path, policy: str, *extra: str
) -> Iterator[tuple[str, list[Launched], list[Launched]]]:
    """Run a broker (with these words) and two servers; yield its address, its lives, the present
    one last, and the servers."""
    address = free_address()
    with ExitStack() as stack:
        lives = [stack.enter_context(broker(address, folder, policy, *extra))]
        servers = [stack.enter_context(launched("server", "--broker", address)) for _ in range(2)]
        for server in servers:
            server.line("is in")
        yield address, lives, servers
        assert all(server.process.poll() is None for server in servers)


@contextmanager
def broker(address: str, folder: Path, policy: str, *extra: str) -> Iterator[Launched]:
    words = ("--bind", address, "--servers", "2", "--workers", "2", "--policy", policy)
    optimizer = ("--optimizer", "momentum:lr=0.1,momentum=0.9")
    journal = ("--journal", str(folder / "journal"))
    with launched("broker", *words, *optimizer, *journal, *extra) as one:
        one.line("broker at")
        yield one


def run_with_kills(folder: Path, policy: str, text: str, kills: int) -> list[str]:
    """Train with two workers, kill the broker so often, and return what the workers printed last:
    the rest of their lines that begin with a word in lower case."""
    script = program(folder, text)
    numbers = (str(BATCHES), str(EVERY))
    with cluster(folder, policy) as (address, lives, _), ExitStack() as stack:
        env = {"ZKV_BROKER": address}
        run = stack.enter_context(launched("run", "-n", "2", script, *numbers, env=env))
        for at in range(kills):
            run.line(rf"at {at * EVERY + EVERY - 1}$")
            os.kill(lives[-1].process.pid, signal.SIGKILL)
            lives[-1].process.wait()
            lives.append(stack.enter_context(broker(address, folder, policy)))
        found = [run.line(r"(digest|digits) (.*)").group(2) for _ in range(2)]
        assert run.end() == 0, run.text
        assert len(lives) == kills + 1
        return found


def test_bsp_ends_with_the_bits_of_a_run_that_was_never_interrupted(tmp_path: Path) -> None:
    for name in ("killed", "quiet"):
        (tmp_path / name).mkdir()
    killed = run_with_kills(tmp_path / "killed", "bsp", TRAINS, KILLS)
    quiet = run_with_kills(tmp_path / "quiet", "bsp", TRAINS, 0)
    assert killed == quiet
    assert len(set(killed)) == 1
    # Of the plain key, which both have pushed behind each kill.
    assert killed[0].endswith(f" {2 * (KILLS * EVERY - 1)}")


def test_asp_counts_every_contribution_once(tmp_path: Path) -> None:
    for digits in run_with_kills(tmp_path, "asp", COUNTS, KILLS):
        assert digits.split() == ["1"] * BATCHES


def test_a_snapshot_with_keys_is_completed_though_the_broker_was_killed_in_the_midst_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys, snaps = Keys(tmp_path / "keys"), str(tmp_path / "snaps")
    keys.make("node", "server,worker,admin")
    monkeypatch.setenv("ZKV_KEYS", keys.folder("node"))
    extra = ("--keys", keys.folder("head"), "--snapshot-dir", snaps)
    script = program(tmp_path, TRAINS)
    numbers = (str(BATCHES), str(EVERY))
    with cluster(tmp_path, "bsp", *extra) as (address, lives, servers), ExitStack() as stack:
        env = {"ZKV_BROKER": address}
        run = stack.enter_context(launched("run", "-n", "2", script, *numbers, env=env))
        run.line(f"at {EVERY - 1}$")
        # Which therefore writes nothing.
        os.kill(servers[1].process.pid, signal.SIGSTOP)
        asks = stack.enter_context(launched("snapshot", "--broker", address))
        deadline = time.monotonic() + PATIENCE_S
        while ask_status(address, PATIENCE_S)["snapshots"]["taking"] is None:
            assert time.monotonic() < deadline
        os.kill(lives[-1].process.pid, signal.SIGKILL)
        lives[-1].process.wait()
        stack.enter_context(broker(address, tmp_path, "bsp", *extra))
        os.kill(servers[1].process.pid, signal.SIGCONT)
        name = asks.line(r"snaps/(zkv-\S+): version").group(1)
        assert sf.chosen(snaps, whole=True)[1].name == name
        assert run.end() == 0, run.text


def test_a_broker_that_cannot_go_on_says_why_in_one_line(tmp_path: Path) -> None:
    address = free_address()
    with broker(address, tmp_path, "bsp") as one, launched("server", "--broker", address) as server:
        server.line("is in")
        os.kill(one.process.pid, signal.SIGKILL)
        one.process.wait()
        words = ("broker", "--bind", address, "--servers", "2", "--workers", "2")
        journal = ("--journal", str(tmp_path / "journal"))
        with launched(*words, "--policy", "asp", *journal) as other:
            assert other.end() == 1
            assert "policy was 'bsp' and is 'asp'" in other.text
            assert "Traceback" not in other.text
        with broker(address, tmp_path, "bsp") as again:
            assert "going on at version 0" in again.text
            server.line("goes on where it was")
            with launched(*words, "--bind", free_address(), *journal) as second:
                assert second.end() == 1
                assert "another broker that is running, or was stopped" in second.text


def test_without_being_told_a_broker_has_a_journal_for_its_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    address = free_address()
    port = address.rpartition(":")[2]
    with launched("broker", "--bind", address) as one:
        one.line("broker at")
        (folder,) = (tmp_path / "zkv" / "brokers").iterdir()
        assert folder.name.endswith(f"-127.0.0.1-{port}")
        assert (folder / "journal").stat().st_mode & 0o777 == 0o600
        os.kill(one.process.pid, signal.SIGTERM)
        assert one.end() == 128 + signal.SIGTERM
    # Nobody trained, so there is nothing to go on with.
    assert not (folder / "journal").exists()
    for extra in (("--bind", address, "--journal", "none"), ("--bind", "tcp://127.0.0.1:0")):
        with launched("broker", *extra) as other:
            other.line("broker at")
            assert [path.name for path in folder.iterdir()] == ["lock"]
            assert len(list((tmp_path / "zkv" / "brokers").iterdir())) == 1


def test_a_home_that_cannot_be_written_costs_the_journal_and_a_warning(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    env = {"XDG_STATE_HOME": str(tmp_path / "file")}
    with launched("broker", "--bind", free_address(), env=env) as one:
        one.line("if this broker dies, its run ends with it")
        one.line("broker at")
