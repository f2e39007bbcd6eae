"""Commands that ask a cluster or change it, and `zkv.local`, with real processes."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack

import numpy as np
import pytest
from processes import free_address

import zkv
from zkv.errors import ConfigError
from zkv_cli.export import key_of, write_file
from zkv_cli.local import LocalCluster

pytestmark = pytest.mark.cluster

PATIENCE_S = 30.0
DEAD_END_S = 6.0
"""A silent broker is given up after 1.5 s, sockets linger for 0.5 s; the rest is a slow start."""


def command(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run `zkv` to its end; no settings but these."""
    kept = {name: text for name, text in os.environ.items() if not name.startswith("ZKV_")}
    return subprocess.run(
        [sys.executable, "-m", "zkv_cli", *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        env=kept | variables,
        check=False,
    )


@pytest.fixture
def sgd() -> Iterator[LocalCluster]:
    with zkv.local(servers=2, optimizer="sgd:lr=0.1") as cluster:
        yield cluster


# --- status, set, export ---------------------------------------------------------------------


def test_status_tells_a_program_and_a_person(sgd):
    with sgd.connect(name="ada", rank=0) as worker:
        worker.init({"w": np.zeros((2, 3), np.float32)})
        plain = command("status", "--json", "--broker", sgd.address)
        assert plain.returncode == 0
        told = json.loads(plain.stdout)
        assert told["broker"] == sgd.address
        assert (told["policy"], told["version"], told["keys"]) == ("bsp", 0, 1)
        assert [server["pid"] for server in told["servers"]] == [one.pid for one in sgd.servers]
        assert [one["name"] for one in told["workers"]] == ["ada"]
        assert told["optimizer"].startswith("sgd:lr=0.1")
        assert sgd.status()["workers"][0]["name"] == "ada"

        text = command("status", ZKV_BROKER=sgd.address)
        assert text.returncode == 0
        assert "servers: 2 of 2" in text.stdout
        assert "workers: 1" in text.stdout
        assert "ada" in text.stdout


def test_status_of_nobody_is_an_error_with_the_address():
    address = free_address()
    result = command("status", "--broker", address, "--timeout", "0.2")
    assert result.returncode == 1
    assert result.stdout == ""
    assert result.stderr == (
        f"zkv status: error: no broker has answered at {address} within 0.2 s; "
        "is it running, and is this the broker's address? "
        f"zkv doctor --broker {address} says what is in the way\n"
    )


def test_a_learning_rate_that_is_set_reaches_every_server(sgd):
    keys = {f"w{n}": np.zeros(5, np.float32) for n in range(6)}
    ones = np.ones(5, np.float32)

    def train(worker: zkv.Worker) -> None:
        with worker.batch() as batch:
            for key in keys:
                batch.push(key, ones)
        assert batch.wait() == "committed"

    with sgd.connect() as worker:
        worker.init(keys)
        train(worker)
        for value in worker.pull().values():
            np.testing.assert_array_equal(value, np.float32(-0.1) * ones)
        result = command("set", "lr=0.01", "--broker", sgd.address)
        assert result.returncode == 0, result.stderr
        # Servers may have made a part of the next update already.
        assert result.stdout == "lr=0.01 from version 2 on\n"
        for total in (-0.2, -0.21):
            train(worker)
            for value in worker.pull().values():
                np.testing.assert_allclose(value, total * ones, rtol=1e-6)
        result = command("set", "policy=ssp:2", "--broker", sgd.address)
        assert result.stdout == "policy=ssp:2 from version 3 on\n", result.stderr
        assert sgd.status()["policy"] == "ssp:2"


def test_wrong_changes_change_nothing(sgd):
    result = command("set", "lr=0.01", "policy=bps", "momentum=1", "--broker", sgd.address)
    assert result.returncode == 2
    assert "2 mistakes" in result.stderr
    assert "lr=0.1" in sgd.status()["optimizer"]


def test_a_whole_version_is_exported_and_read_back(sgd, tmp_path):
    from safetensors import safe_open
    from safetensors.numpy import load_file

    file = tmp_path / "model.safetensors"
    params = {
        "layer.weight": np.arange(6, dtype=np.float32).reshape(2, 3),
        "scale": np.array(3.0),
        "nothing": np.zeros((0, 4), np.float16),
        7: np.array([1, 2], np.int64),
        "int:7": np.array([9.0], np.float32),
    }
    result = command("export", str(file), "--broker", sgd.address, "--timeout", "10")
    assert result.returncode == 1
    assert f"zkv export: error: the cluster at {sgd.address} has no model yet" in result.stderr
    with sgd.connect() as worker:
        worker.init(params)
        with worker.batch() as batch:
            batch.push("scale", np.array(10.0))
        batch.wait()
        result = command("export", str(file), "--broker", sgd.address)
        assert result.returncode == 0, result.stderr
        assert result.stdout == f"{file}: version 1, 5 keys, {file.stat().st_size} bytes\n"
        read = {key_of(name): value for name, value in load_file(file).items()}
        assert set(read) == set(params)
        for key, value in {**params, "scale": np.array(2.0)}.items():
            assert (read[key].dtype, read[key].shape) == (value.dtype, value.shape)
            np.testing.assert_array_equal(read[key], value)
    with safe_open(file, "numpy") as opened:
        assert opened.metadata() == {"zkv_version": zkv.__version__, "model_version": "1"}
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


def test_a_model_that_cannot_be_written_leaves_the_old_file(tmp_path, monkeypatch):
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"old")
    bfloat16 = pytest.importorskip("ml_dtypes").bfloat16
    with pytest.raises(TypeError):
        write_file(file, {"w": np.zeros(1)}, {"version": 1})  # type: ignore[dict-item]
    assert file.read_bytes() == b"old"
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
    write_file(file, {"w": np.ones((2, 2), bfloat16)[:, :1]}, {})
    assert b'"dtype":"BF16","shape":[2,1]' in file.read_bytes()


# --- use and misuse --------------------------------------------------------------------------


def test_help_has_the_commands_the_precedence_and_the_exit_codes():
    result = command("--help")
    assert result.returncode == 0
    text = " ".join(result.stdout.split())
    for word in ("broker", "server", "up", "run", "status", "set", "export", "bench"):
        assert f" {word} " in text
    assert "flags win over ZKV_SECTION__KEY variables" in text
    assert "2 wrong use or configuration" in text
    assert command("--version").stdout == f"zkv {zkv.__version__}\n"


def test_three_mistakes_are_told_at_once_and_end_with_2(tmp_path):
    file = tmp_path / "zkv.toml"
    file.write_text('[broker]\npolicy = "bps"\nbnid = "x"\n[server]\nbudget = "much"\n')
    for name in ("broker", "up"):
        result = command(name, "--config", str(file))
        assert result.returncode == 2
        assert result.stdout == ""
        assert result.stderr.startswith(f"zkv {name}: error: 3 mistakes in the configuration:\n")
        for place in (
            "line 2, [broker] policy",
            "line 3, [broker] bnid",
            "line 5, [server] budget",
        ):
            assert f"{file}, {place}: " in result.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["broker", "--bind", "tcp://0.0.0.0:0"], "neither encrypted nor authenticated"),
        (["server", "--broker", "tcp://no.such.host.invalid:1"], "cannot be resolved"),
        (["server"], "no broker is named"),
        (["status", "--broker", "10.0.0.2:5555"], "does not begin with tcp://"),
        (["up", "--servers", "0"], "--servers: "),
        (["run", "-n", "0", "train.py"], "-n"),
        (["up", "--serverz", "2"], "--serverz"),
    ],
)
def test_misuse_is_one_message_and_exit_code_2(arguments, words):
    result = command(*arguments)
    assert result.returncode == 2
    assert words in result.stderr
    assert "Traceback" not in result.stderr
    assert result.stdout == ""


def test_one_server_too_many_is_refused_in_the_brokers_words():
    with zkv.local() as cluster:
        result = command("server", "--broker", cluster.address, "--log-format", "json")
        assert result.returncode == 1
        *logged, last = result.stderr.splitlines()
        assert all(json.loads(line)["logger"].startswith("zkv") for line in logged)
        assert last.startswith("zkv server: error: all 1 servers of this broker are here already")


# --- zkv.local -------------------------------------------------------------------------------


async def test_local_works_where_an_event_loop_runs():
    with zkv.local(servers=2, workers=2) as cluster:
        await asyncio.sleep(0)
        with cluster.connect(rank=0) as one, cluster.connect(rank=1) as other:
            for worker in (one, other):
                worker.init({"w": np.zeros(2)}, plain=True)
            pushes = [worker.push("w", np.ones(2)) for worker in (one, other)]
            assert [push.result(PATIENCE_S) for push in pushes] == ["committed", "committed"]
            np.testing.assert_array_equal(other.pull("w"), [2.0, 2.0])
        processes = cluster.processes
        assert [one.label for one in processes] == ["broker", "server 0", "server 1"]
    assert [one.code for one in processes] == [143, 143, 143]
    cluster.stop()


def test_local_says_what_is_wrong_before_or_in_the_words_of_the_child():
    with pytest.raises(ConfigError, match="2 mistakes") as caught:
        zkv.local(servers=0, policy="bps")
    assert "bsp" in str(caught.value)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        bind = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ConfigError, match=f"cannot bind {bind}: the port is in use"):
            zkv.local(bind=bind).start()


def train_for_ever(worker: zkv.Worker) -> None:
    worker.barrier()
    while True:
        with worker.batch() as batch:
            for n in range(4):
                batch.push(f"w{n}", np.ones(3))


def test_local_server_that_crashes_is_named_to_the_workers():
    with zkv.local(servers=2, server_lost_s=0.8) as cluster, cluster.connect() as worker:
        worker.init({f"w{n}": np.zeros(3) for n in range(4)})
        victim = cluster.kill_server(1, signal.SIGKILL)
        assert victim.code == 137
        with pytest.raises(zkv.errors.ServerLost, match=r"server 1 .*is lost") as caught:
            train_for_ever(worker)
        assert str(victim.pid) in str(caught.value)
    # A worker may hear of it before the broker's line was read: all are when it has ended.
    assert "is lost" in cluster.logs()


DEAD = """
import sys, numpy as np, zkv
worker = zkv.connect()
worker.init({"w": np.zeros(2_500_000, np.float32)}, plain=True)
print("ready", flush=True)
sys.stdin.readline()
worker.push("w", np.ones(2_500_000, np.float32))
print("pushed", flush=True)
"""


ENDINGS = [
    ("worker.close()", 0, ""),
    ("raise LookupError('my own')", 1, "LookupError: my own"),
    ("worker.pull('w')", -signal.SIGINT, "KeyboardInterrupt"),
]


def test_a_worker_whose_cluster_is_dead_ends_all_the_same():
    """D35: 10 MB are on their way to nobody; what holds the process up is bounded."""
    with ExitStack() as stack:
        cluster = stack.enter_context(zkv.local())
        processes = []
        for rank, (ending, _, _) in enumerate(ENDINGS):
            process = subprocess.Popen(
                [sys.executable, "-c", DEAD + ending],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=os.environ | {"ZKV_BROKER": cluster.address, "RANK": str(rank)},
            )
            stack.callback(process.kill)
            processes.append(process)
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        for one in cluster.processes:
            one.kill()
            assert one.ended.wait(PATIENCE_S)
        for process, (_, code, _) in zip(processes, ENDINGS, strict=True):
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write("\n")
            process.stdin.flush()
            assert process.stdout.readline() == "pushed\n"
            if code == -signal.SIGINT:
                process.send_signal(signal.SIGINT)
        for process, (_, code, word) in zip(processes, ENDINGS, strict=True):
            _, said = process.communicate(timeout=DEAD_END_S)
            assert process.returncode == code, said
            assert word in said


LAZY = """
import sys, numpy as np, zkv
with zkv.connect() as worker:
    before = set(sys.modules)
    worker.init({"w": np.zeros(2_500_000, np.float32)})
    worker.init({"p": np.zeros(2_500_000, np.float32)}, plain=True)
    with worker.batch() as batch:
        batch.push("w", np.ones_like(batch.params["w"]))
    batch.wait()
    worker.pushpull("p", np.ones(2_500_000, np.float32))
    worker.stats()
    print(*sorted(set(sys.modules) - before))
"""


def test_a_worker_imports_nothing_once_it_has_connected():
    """An import in the I/O thread delays the first push and spoils an interrupt's exit code."""
    with zkv.local() as cluster:
        done = subprocess.run(
            [sys.executable, "-c", LAZY],
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            env=os.environ | {"ZKV_BROKER": cluster.address},
        )
    assert (done.returncode, done.stdout.split()) == (0, []), done.stdout + done.stderr


def test_connecting_to_a_free_address_is_bounded_and_named():
    address = free_address()
    with pytest.raises(zkv.errors.ClusterNotReady, match=address):
        zkv.connect(address, connect_timeout_s=0.3)
