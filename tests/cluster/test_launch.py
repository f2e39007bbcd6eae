"""Processes of `zkv up` and `zkv run`: how they start, fail and end, and that nothing stays.

Every launcher gets a session of its own. Its children are groups of their own within it, so that
"nothing is left" is a statement about the whole session.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
from processes import all_ended, free_address, launched, program

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="sessions are read from /proc"),
]

END_S = 5.0
"""What a signal may take until nothing is left: a promise of the commands."""

WAITS = """
import sys, zkv
with zkv.connect() as worker:
    print("ready", worker.rank, flush=True)
    if worker.rank == 0:
        worker.init({"w": __import__("numpy").zeros(4)})
    worker.barrier()
    for _ in range(10**9):
        worker.barrier()
"""
STUBBORN = """
import signal
for name in ("SIGINT", "SIGTERM", "SIGHUP"):
    signal.signal(getattr(signal, name), signal.SIG_IGN)
print("ready 0", flush=True)
while True:
    signal.pause()
"""


# --- ending ----------------------------------------------------------------------------------


def test_a_signal_ends_up_and_the_port_is_free_at_once():
    """D38: nothing is left of broker and servers, and the next `up` has the same ports."""
    bind = free_address()
    for number, code in ((signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)):
        with launched("up", "--servers", "2", "--bind", bind) as up:
            up.line(r"2 servers are in; policy bsp; broker at " + re.escape(bind))
            up.line("join from this machine: zkv run --broker " + re.escape(bind))
            up.line("join from another machine: not possible.*--bind.*--insecure")
            pids = up.session()
            assert len(pids) == 4
            up.process.send_signal(number)
            if number == signal.SIGKILL:
                assert all_ended(pids, END_S)
            assert up.end(END_S) == code
            assert up.session() == []
            assert "Traceback" not in up.text
    with launched("broker", "--bind", bind) as broker:
        broker.line(f"broker at {re.escape(bind)}")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_reaches_the_workers_and_ends_a_run(tmp_path, number, code):
    """D38: broker, servers and workers end with the launcher that was told to."""
    script = program(tmp_path, WAITS)
    with launched("run", "-n", "2", "--servers", "2", script) as run:
        run.line(r"\[worker [01]\] ready")
        run.line(r"\[worker [01]\] ready")
        run.process.send_signal(number)
        assert run.end(END_S) == code
        assert run.session() == []
        # Only SIGINT has a handler in Python; it raises inside the blocking call.
        assert ("KeyboardInterrupt" in run.text) == (number == signal.SIGINT)


def test_a_launcher_that_is_killed_leaves_nothing(tmp_path):
    """D38: SIGKILL gives the launcher no chance to tell its children; they end all the same."""
    script = program(tmp_path, WAITS)
    with launched("run", "-n", "2", "--servers", "2", script) as run:
        run.line(r"\[worker [01]\] ready")
        run.line(r"\[worker [01]\] ready")
        pids = run.session()
        assert len(pids) == 8  # launcher, broker, 2 servers, and 2 workers with a guard each
        run.process.kill()
        assert all_ended(pids, END_S)
        assert run.session() == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_worker_that_does_not_listen_is_ended_too(tmp_path, number):
    script = program(tmp_path, STUBBORN)
    with launched("run", script) as run:
        run.line("ready 0")
        pids = run.session()
        run.process.send_signal(number)
        if number == signal.SIGINT:
            assert run.end(END_S) == 130
        assert all_ended(pids, END_S)
        assert run.session() == []


# --- failing ---------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["up", "broker", "run"])
def test_a_port_in_use_is_named_before_anything_else_starts(command, tmp_path):
    """D29: the address and "in use", an exit code, and nothing half started."""
    script = program(tmp_path, "print('never')")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        bind = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        arguments = [command, "--bind", bind, *([script] if command == "run" else [])]
        with launched(*arguments) as one:
            assert one.end() == 2
            assert f"zkv {command}: error: cannot bind {bind}: the port is in use" in one.text
            assert "Traceback" not in one.text
            assert "never" not in one.text
            assert one.session() == []


def test_two_jobs_run_side_by_side(tmp_path):
    """D29: port 0 takes any two that are free."""
    script = program(
        tmp_path,
        "import sys, numpy as np, zkv\n"
        "with zkv.connect() as worker:\n"
        "    worker.init({'w': np.zeros(1)}, plain=True)\n"
        "    print('sum', worker.pushpull('w', np.full(1, float(sys.argv[1]))))\n",
    )
    with (
        launched("run", "-n", "2", script, "1") as one,
        launched("run", "-n", "2", script, "10") as other,
    ):
        assert (one.end(), other.end()) == (0, 0)
        assert one.text.count(r"sum [2.]") == 2
        assert other.text.count(r"sum [20.]") == 2
        assert re.search(r"^\[worker 0\] sum", one.text, re.MULTILINE)


def test_a_failing_worker_is_named_and_gives_the_exit_code(tmp_path):
    script = program(
        tmp_path,
        WAITS.replace(
            "    for _", "    if worker.rank == 1: print('bad luck'), sys.exit(7)\n    for _"
        ),
    )
    with launched("run", "-n", "3", "--grace", "0.2", script) as run:
        run.line(r"zkv run: worker 1 \(pid \d+\) ended with exit code 7; its last lines:")
        run.line(r"^    bad luck")
        run.line("zkv run: stopping worker 0, worker 2")
        assert run.end(END_S) == 7
        assert run.session() == []


def test_a_worker_that_is_killed_is_named_with_the_signal():
    kill = "import os, signal; print('x', flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    with launched("run", "-n", "2", sys.executable, "-c", kill) as run:
        run.line(r"zkv run: worker \d \(pid \d+\) was ended by SIGKILL \(exit code 137\)")
        assert run.end() == 137


@pytest.mark.parametrize("command", ["absent.py", "no-such-program"])
def test_a_command_that_is_not_there_starts_nothing(command):
    with launched("run", command) as run:
        assert run.end() == 2
        assert re.search(f"zkv run: error: {re.escape(command)}: there is no such", run.text)


def test_a_server_that_dies_ends_up_and_is_named():
    with launched("up", "--servers", "2", "--server-lost", "1") as up:
        up.line("2 servers are in")
        match = next(
            found
            for line in up.said
            if (found := re.search(r"server 1 .*pid (\d+)\) is here", line))
        )
        os.kill(int(match[1]), signal.SIGKILL)
        up.line(rf"zkv up: server 1 \(pid {match[1]}\) was ended by SIGKILL \(exit code 137\)")
        up.line(r"\[broker\].*server 1 .*is lost")
        assert up.end(END_S) == 1
        assert up.session() == []


def test_a_broker_that_dies_ends_the_run(tmp_path):
    script = program(tmp_path, STUBBORN)
    with launched("run", "-n", "2", "--log-level", "info", "--grace", "0.2", script) as run:
        run.line(r"\[worker \d\] ready")
        broker = next(
            int(pid.name)
            for pid in map(Path, (f"/proc/{p}" for p in run.session()))
            if b"\0broker\0" in (pid / "cmdline").read_bytes()
        )
        os.kill(broker, signal.SIGKILL)
        run.line(r"zkv run: broker \(pid \d+\) was ended by SIGKILL")
        assert run.end(3 * END_S) == 1
        assert run.session() == []


# --- starting --------------------------------------------------------------------------------


def test_the_order_of_the_start_does_not_matter(tmp_path):
    """D32: worker, a broker that dies, server, broker: each says whom it waits for; all come in."""
    address = free_address()
    script = program(
        tmp_path,
        "import logging, zkv\n"
        "logging.basicConfig(level='INFO')\n"
        "with zkv.connect(rank=0) as worker:\n"
        "    print('joined', worker.world, flush=True)\n",
    )
    with launched("run", "--broker", address, script) as worker, ExitStack() as stack:
        worker.line(f"waiting for broker.*{re.escape(address)}")
        with launched("broker", "--bind", address) as lost:
            lost.line("broker at ")
            worker.line("waiting for server 1 of 1: nothing has announced itself at")
            lost.process.kill()
            lost.end(END_S)
        server = stack.enter_context(launched("server", "--broker", address))
        server.line(f"waiting for broker: nothing has answered at {re.escape(address)}")
        with launched("broker", "--bind", address) as broker:
            said = broker.line(
                r"broker at (\S+) \| a server joins with: (.*) \| workers with: (.*)"
            )
            assert said[1] == address
            assert said[2] == f"zkv server --broker {address}"
            assert said[3].startswith(f"zkv run --broker {address}")
            server.line("server 0 of 1 is in")
            worker.line("joined 1")
            assert worker.end() == 0
            server.process.send_signal(signal.SIGTERM)
            assert server.end(END_S) == 143
            broker.process.send_signal(signal.SIGINT)
            assert broker.end(END_S) == 130


def test_a_server_gives_up_on_a_broker_that_is_not_there():
    address = free_address()
    with launched("server", "--broker", address, "--connect-timeout", "0.3") as server:
        assert server.end() == 1
        assert "zkv server: error: waiting for broker: nothing has answered" in server.text
        assert address in server.text
        assert "Traceback" not in server.text
