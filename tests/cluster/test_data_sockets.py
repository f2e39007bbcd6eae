"""I/O threads and buffers of data connections: where they are set, and that no bit changes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq
from crew import crew, end
from harness import cluster

from zkv.errors import ConfigError
from zkv_brokers.broker import BrokerConfig
from zkv_workers.model import session_config

BUFFER = 96 * 1024
WHERE = {"io_threads": 2, "socket_bytes": BUFFER}


def buffers(socket: zmq.Socket[bytes]) -> tuple[int, int]:
    """What its connections ask for; -1: the system decides."""
    return int(socket.getsockopt(zmq.SNDBUF)), int(socket.getsockopt(zmq.RCVBUF))


def found(made: Any, workers: Any) -> dict[str, Any]:
    """I/O threads of each process, and buffers of each kind of socket."""
    broker, server, driver = made.broker, made.servers[0], workers[0]._driver
    contexts = {"broker": broker._context, "server": server._context, "worker": driver._context}
    sockets = {
        "broker's control": broker._control.socket,
        "broker's front": broker._relay._front.socket,
        "broker's backs": broker._relay._backs[0].socket,
        "server's control": server._control.socket,
        "server's data": server._data.socket,
        "worker's control": driver._control.socket,
        "worker's data": driver._data[0].socket,
    }
    threads = {who: context.get(zmq.IO_THREADS) for who, context in contexts.items()}
    return threads | {what: buffers(socket) for what, socket in sockets.items()}


@pytest.mark.parametrize("route", ["direct", "broker"])
async def test_they_are_of_data_connections_in_every_process(route: str) -> None:
    values = []
    for options in ({}, WHERE):
        params = {"w": np.zeros(200_000, np.float32)}
        at = {"route": route, "server_options": options, **options}
        async with cluster(1, **at) as made, crew(made, 1, params, shared_bytes=0, **options) as w:
            (worker,) = w
            batch = await worker.batch().__aenter__()
            batch.push("w", np.ones(200_000, np.float32))
            await end(batch)
            assert await batch.wait() == "committed"
            values.append((await worker.pull("w")).tobytes())
            asked = found(made, w)
        threads, data = (2, (BUFFER, BUFFER)) if options else (1, (-1, -1))
        assert asked == {
            **dict.fromkeys(("broker", "server", "worker"), threads),
            **dict.fromkeys(("broker's front", "broker's backs"), data),
            **dict.fromkeys(("server's data", "worker's data"), data),
            **{f"{who}'s control": (-1, -1) for who in ("broker", "server", "worker")},
        }
    assert values[0] == values[1]


def test_nothing_is_asked_of_the_system_by_default() -> None:
    config, _ = session_config("tcp://127.0.0.1:1")
    assert (config.io_threads, config.socket_bytes) == (1, 0)
    fields = BrokerConfig.__dataclass_fields__
    assert (fields["io_threads"].default, fields["socket_bytes"].default) == (1, 0)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"io_threads": 0}, "io_threads=0 is no int from 1 to 64"),
        ({"io_threads": 65}, "io_threads=65 is no int from 1 to 64"),
        ({"io_threads": True}, "io_threads=True is no int"),
        ({"socket_bytes": -1}, "socket_bytes=-1 is no int from 0 to 1073741824"),
        ({"socket_bytes": 2**31}, "socket_bytes=2147483648 is no int"),
        ({"socket_bytes": "1MiB"}, "socket_bytes='1MiB' is no int"),
    ],
)
def test_a_worker_refuses_what_is_none(options: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        session_config("tcp://127.0.0.1:1", **options)


def test_a_worker_hears_of_them_by_its_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZKV_IO_THREADS", "3")
    monkeypatch.setenv("ZKV_SOCKET_BYTES", "4096")
    config, _ = session_config("tcp://127.0.0.1:1")
    assert (config.io_threads, config.socket_bytes) == (3, 4096)
    config, _ = session_config("tcp://127.0.0.1:1", io_threads=1, socket_bytes=0)
    assert (config.io_threads, config.socket_bytes) == (1, 0)
    monkeypatch.setenv("ZKV_IO_THREADS", "many")
    with pytest.raises(ConfigError, match="ZKV_IO_THREADS='many' is not a number"):
        session_config("tcp://127.0.0.1:1")


@pytest.mark.cluster
@pytest.mark.skipif(not Path("/proc/self/cmdline").is_file(), reason="needs /proc")
def test_a_run_tells_its_workers_and_its_cluster(tmp_path: Path) -> None:
    program = tmp_path / "tell.py"
    program.write_text(
        "import os, zkv\n"
        "with zkv.connect(os.environ['ZKV_BROKER']) as worker:\n"
        "    pid = worker.status()['servers'][0]['pid']\n"
        "    line = open(f'/proc/{pid}/cmdline').read().split('\\0')\n"
        "    print(os.environ['ZKV_IO_THREADS'], os.environ['ZKV_SOCKET_BYTES'])\n"
        "    print(sorted(word for word in line if 'io-' in word or 'socket' in word))\n"
    )
    flags = ("--io-threads", "2", "--socket-buffer", "96KiB")
    command = [sys.executable, "-m", "zkv_cli", "run", *flags, str(program)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=50, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines() == ["2 98304", "['--io-threads=2', '--socket-buffer=98304']"]
