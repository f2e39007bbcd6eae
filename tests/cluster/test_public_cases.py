"""What has gone wrong in public for others (D25 and on), each as a named test, here or elsewhere.

Those of keys, tensors and codecs (D01 to D24), of networks (D29 to D34) and of the rest stand with
what they test; their names are in those tests' words.
"""

from __future__ import annotations

import ast
import asyncio
import gc
import os
import signal
import sys
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq
from crew import crew, work
from harness import cluster, until
from processes import Launched

import zkv
from zkv.errors import ConfigError, RolledBack
from zkv_brokers.senders import STRANGER_S
from zkv_cli.settings import load
from zkv_net import loop as net
from zkv_net.sockets import FdSocket, is_loopback, split_address

TESTS = Path(__file__).resolve().parent.parent
HERE = "cluster/test_public_cases.py"
CASES = {
    "D25 one worker dies, the others wait for ever": (
        "cluster/test_elastic_processes.py::test_survivors_go_on_and_the_run_names_who_died",
    ),
    "D26 restart with the same worker name": (
        "cluster/test_elastic_processes.py::"
        "test_a_killed_worker_comes_back_under_its_name_and_a_second_live_one_may_not",
    ),
    "D27 a server dies": (
        f"{HERE}::test_d27_a_server_that_dies_takes_all_back_to_the_snapshot_with_another_one",
        "cluster/test_replicas_live.py::"
        "test_bsp_ends_with_the_bits_of_a_run_in_which_no_server_died",
        "cluster/test_cli.py::test_local_server_that_crashes_is_named_to_the_workers",
    ),
    "D28 busy is taken for dead": (
        f"{HERE}::test_d28_who_computes_is_not_dead_and_who_holds_pythons_lock_is_told_so",
        "cluster/test_stopped.py::test_processes_that_stand_still_for_two_seconds_are_nobody_lost",
    ),
    "D35 exit hangs because of unsent messages": (
        "cluster/test_cli.py::test_a_worker_whose_cluster_is_dead_ends_all_the_same",
    ),
    "D37 no add_reader, no uvloop": (
        f"{HERE}::test_d37_without_uvloop_and_cupy_all_is_done_by_asyncio_and_numpy",
        f"{HERE}::test_d37_a_loop_that_cannot_watch_descriptors_is_named_with_one_that_can",
        f"{HERE}::test_d37_what_a_system_does_not_have_is_not_asked_for",
    ),
    "D39 memory grows in a long run": (
        f"{HERE}::test_d39_pushes_pulls_and_workers_that_come_and_go_leave_nothing",
    ),
    "D43 pickle on an open port": (
        f"{HERE}::test_d43_a_pickle_is_dropped_at_every_port_and_runs_nowhere",
        "test_architecture.py::test_no_bytes_become_code",
        "cluster/test_bad_input.py::test_a_bad_init_is_refused",
        "cluster/test_namespaces.py::test_an_open_bind_must_be_wanted",
    ),
    "D44 different versions on the machines": (
        "cluster/test_bad_input.py::test_another_protocol_version_is_refused_with_both_numbers",
        "cluster/test_bad_input.py::test_a_broker_of_another_version_ends_who_has_dialled_it",
    ),
}


@pytest.mark.source
@pytest.mark.parametrize("case", CASES)
def test_each_case_has_its_tests(case: str) -> None:
    for name in CASES[case]:
        file, _, function = name.partition("::")
        tree = ast.parse((TESTS / file).read_text("utf-8"))
        functions = (ast.FunctionDef, ast.AsyncFunctionDef)
        names = {one.name for one in ast.walk(tree) if isinstance(one, functions)}
        assert function in names, f"{case}: {name}"


# --- D27 -----------------------------------------------------------------------------------------


def train(worker: zkv.Worker, batches: int) -> None:
    for _ in range(batches):
        with worker.batch() as batch:
            for key in ("v", "w"):
                batch.push(key, -np.ones(300_000, np.float32))
    batch.wait()


@pytest.mark.cluster
def test_d27_a_server_that_dies_takes_all_back_to_the_snapshot_with_another_one(
    tmp_path: Path,
) -> None:
    """What docs/failures.md says of it: who trained is told once, and goes on."""
    params = {key: np.zeros(300_000, np.float32) for key in ("v", "w")}
    options: dict[str, Any] = {"servers": 2, "optimizer": "sgd:lr=1", "server_lost_s": 2.0}
    with zkv.local(snapshot_dir=str(tmp_path), **options) as made, made.connect() as worker:
        worker.init(params)
        train(worker, 3)
        made.snapshot()
        train(worker, 2)
        killed = made.kill_server(1, signal.SIGKILL)
        made.start_server()
        with pytest.raises(RolledBack, match=rf"server 1 .*pid {killed.pid}") as told:
            train(worker, 1000)
        assert (told.value.version, told.value.undone) == (3, 2)
        train(worker, 1)
        for value in worker.pull().values():
            np.testing.assert_array_equal(value, np.full(300_000, 4, np.float32))


# --- D28 -----------------------------------------------------------------------------------------

LOST_S = 1.0
BUSY = f"""
import ctypes, logging, sys, time, numpy as np, zkv
logging.basicConfig(format="%(message)s")
def batch(worker):
    with worker.batch() as one:
        one.push("w", -np.ones(3, np.float32))
    return one.wait()
for life in range(2):
    try:
        with zkv.connect(name="busy") as worker:
            worker.init({{"w": np.zeros(3, np.float32)}})
            if life == 0:
                ends = time.monotonic() + 2.5 * {LOST_S}
                while time.monotonic() < ends:
                    sum(range(1000))
                print("computed:", batch(worker), flush=True)
                ctypes.PyDLL(None).usleep(int(2.5e6 * {LOST_S}))
            print("came back:", batch(worker), flush=True)
            break
    except zkv.errors.Evicted as error:
        print("evicted:", error, flush=True)
"""


@pytest.mark.cluster
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux's signals and C library")
def test_d28_who_computes_is_not_dead_and_who_holds_pythons_lock_is_told_so() -> None:
    """A worker's heartbeats come from a thread of its own. While code in C keeps Python's lock,
    nothing can be sent: `worker_lost_s` decides, it is said why, and the worker may come again."""
    with zkv.local(worker_lost_s=LOST_S, optimizer="sgd:lr=1") as made:
        one = Launched(sys.executable, "-c", BUSY, env={"ZKV_BROKER": made.address})
        try:
            one.line("^computed: committed")
            assert "is gone" not in made.logs()
            one.line("^evicted: ")
            one.line("^came back: committed")
            assert one.end() == 0
        finally:
            one.process.kill()
            one.process.wait()
        assert "is gone: nothing was heard of it for" in made.logs()


@pytest.mark.one_loop
async def test_d28_a_server_that_is_busy_costs_no_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers are judged by what the broker hears of them, whatever a server does meanwhile."""
    async with (
        cluster(1, optimizer="sgd:lr=1", worker_lost_s=LOST_S) as made,
        crew(made, 2) as workers,
    ):
        hub = made.broker.router.hub
        held: list[Any] = []
        server = made.servers[0]
        # It takes nothing in and answers nothing, for so long as its loop would be busy.
        monkeypatch.setattr(server._data, "_handle", held.append)
        batches = await asyncio.gather(*(work(worker) for worker in workers))
        began = hub.now
        await until(lambda: hub.now - began > 2 * LOST_S, what="twice the patience")
        assert len(made.broker.router.members.training()) == 2
        monkeypatch.undo()
        for frames in held:
            server._data._handle(frames)
        assert [await batch.wait() for batch in batches] == ["committed"] * 2


# --- D37 -----------------------------------------------------------------------------------------

WITHOUT = """
import asyncio, sys
for name in ("uvloop", "cupy", "numba"):
    sys.modules[name] = None
import numpy as np
from harness import cluster
from zkv_net import loop as net

async def main():
    assert type(asyncio.get_running_loop()).__module__.startswith("asyncio.")
    async with cluster(1, optimizer="sgd:lr=1", codec="int8") as made, made.worker(0) as worker:
        await worker.init({"w": np.zeros(30_000, np.float32)})
        async with worker.batch() as batch:
            batch.push("w", -np.ones(30_000, np.float32))
        print(await batch.wait(), (await worker.pull("w"))[0])

net.run(main)
"""


@pytest.mark.cluster
def test_d37_without_uvloop_and_cupy_all_is_done_by_asyncio_and_numpy() -> None:
    env = {"PYTHONPATH": os.pathsep.join(sys.path), "ZKV_LOOP": "auto"}
    one = Launched(sys.executable, "-W", "error", "-c", WITHOUT, env=env)
    assert one.end() == 0, one.text
    assert "committed 1.0" in one.said


def test_d37_a_loop_that_cannot_watch_descriptors_is_named_with_one_that_can() -> None:
    class OfWindows(asyncio.SelectorEventLoop):
        def add_reader(self, fd: Any, callback: Any, *args: Any) -> None:
            asyncio.AbstractEventLoop.add_reader(self, fd, callback, *args)

        # asyncio's own pipe to itself.
        def _add_reader(self, fd: Any, callback: Any, *args: Any) -> Any:
            return super()._add_reader(fd, callback, *args)

    async def main() -> None:
        named = pytest.raises(ConfigError, match=r"OfWindows cannot .*SelectorEventLoop")
        with zmq.Context() as context, context.socket(zmq.DEALER) as one, named:
            FdSocket(one, lambda frames: None)

    with asyncio.Runner(loop_factory=OfWindows) as runner:
        runner.run(main())


@pytest.mark.source
def test_d37_what_a_system_does_not_have_is_not_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    about = tomllib.loads((TESTS.parent / "pyproject.toml").read_text("utf-8"))["project"]
    uvloop = [one for one in about["dependencies"] if one.startswith("uvloop")]
    assert [one.partition("; ")[2] for one in uvloop] == ["sys_platform != 'win32'"]
    assert not [one for one in about["dependencies"] if one.startswith(("cupy", "numba"))]
    monkeypatch.setitem(sys.modules, "uvloop", None)
    assert net.loop_factory("auto") is asyncio.SelectorEventLoop
    with pytest.raises(ConfigError, match="pip install uvloop, or use asyncio"):
        net.loop_factory("uvloop")


# --- D39 -----------------------------------------------------------------------------------------

GROWTH_MAX = 20 * 2**20


def resident() -> int:
    """Bytes of memory that this process has."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.one_loop
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="memory is read from /proc")
@pytest.mark.parametrize(
    ("pushes", "lives"), [(400, 40), pytest.param(20_000, 2_000, marks=pytest.mark.slow)]
)
@pytest.mark.timeout(1200)
async def test_d39_pushes_pulls_and_workers_that_come_and_go_leave_nothing(
    pushes: int, lives: int
) -> None:
    """Of 100 KB each. Members of before are forgotten everywhere."""
    value = np.ones(25_000, np.float32)
    async with cluster(1, optimizer="sgd:lr=1") as made, made.worker(0) as worker:
        router, server = made.broker.router, made.servers[0]

        async def a_while(pushes: int, lives: int) -> None:
            for _ in range(pushes):
                await worker.push("k", value)
                await worker.pull("k")
            for number in range(lives):
                async with made.worker(name=f"guest-{number}", observer=True) as guest:
                    await guest.pull("k")
            await until(lambda: len(router.members.workers) == 1, what="the guests' leave")

        await worker.init({"k": np.zeros(25_000, np.float32)}, plain=True)
        await a_while(pushes // 2, lives // 2)
        peers, before = len(router.hub.peers()), resident()
        await a_while(pushes, lives)
        assert resident() - before < GROWTH_MAX
        await until(lambda: len(router.hub.peers()) <= peers, what="links of guests that are gone")
        assert len(server.shard.members) == 1
        # Who only reads is no member at a server, so that its route is kept for a while.
        for later_s in (0.0, 2 * STRANGER_S):
            server._senders.forget_those_gone(server.shard.members, server._now() + later_s)
        assert len(server._senders.routes) == 1
        assert len(server.shard.contributions.open) == 0
        assert len(server.shard.grants._open) == 0


# --- D43 -----------------------------------------------------------------------------------------


def pickled(target: Path) -> bytes:
    """A pickle that makes a file where it is read: `os.system("touch ...")`, in protocol 0."""
    return f"cposix\nsystem\n(S'touch {target}'\ntR.".encode()


@pytest.mark.one_loop
async def test_d43_a_pickle_is_dropped_at_every_port_and_runs_nowhere(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    target = tmp_path / "made"
    evil = pickled(target)
    async with cluster(1, optimizer="sgd:lr=1") as made, crew(made, 1) as (worker,):
        ports = (made.address, made.broker.data_address, made.servers[0].address)
        with zmq.Context() as context:
            for address in ports:
                with context.socket(zmq.DEALER) as one:
                    one.setsockopt(zmq.LINGER, 500)
                    one.connect(address)
                    for frames in ([evil], [b"", evil], [b"", evil, evil]):
                        one.send_multipart(frames)
        await until(lambda: caplog.text.count("dropped") >= len(ports), what="words of each port")
        batch = await work(worker)
        assert await batch.wait() == "committed"
        for value in (np.array([print], object), [evil]):
            with pytest.raises((TypeError, ValueError)):
                await worker.init({"x": value})
    assert not target.exists()
    settings = load({})
    for bind in (settings.broker.bind, settings.server.bind):
        assert is_loopback(split_address(bind)[0])
