"""Processes that are short of something for real: room on a disk, descriptors, memory.

Disks are small tmpfs in a mount namespace that a process holds; limits are set while the processes
run.
"""

from __future__ import annotations

import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from processes import PATIENCE_S, Launched, free_address, program

from zkv.control import TakeSnapshot
from zkv.errors import Refused
from zkv_cli.ask import TOKEN, ask
from zkv_net import snapshot_folder as sf

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux's limits"),
    pytest.mark.skipif(not shutil.which("nsenter"), reason="disks in a namespace (util-linux)"),
]
ZKV = [sys.executable, "-m", "zkv_cli"]
MIB = 1 << 20
ELEMENTS = 90_000
"""Of the model: two snapshots of it fit into a MiB, and three do not."""
TRAINS = """
import logging, signal, sys, numpy as np, zkv
logging.basicConfig(format="%(message)s")
size, told, ends, grows = int(sys.argv[2]), [], [], []
signal.signal(signal.SIGUSR1, lambda *_: ends.append(True))
signal.signal(signal.SIGUSR2, lambda *_: grows.append(True))
while not ends:
    try:
        with zkv.connect(sys.argv[1], name="w", broker_lost_s=60.0) as worker:
            worker.init({"w": np.zeros(size, np.float32)}, rule="sgd:lr=1")
            while not ends:
                if grows:
                    grows.clear()
                    worker.init({"huge": np.zeros(100 << 20, np.float32)})
                with worker.batch() as batch:
                    batch.push("w", -np.ones(size, np.float32))
                told.append(batch.wait())
                print("at", len(told), flush=True)
            w = worker.pull("w")
    except zkv.errors.PushRefused as error:
        print("refused:", error, flush=True)
print("ended", told.count("committed"), len(told), w.min(), w.max(), flush=True)
"""


class Disks:
    """Mounts of a process that holds them; `path` is where this process sees one."""

    def __init__(self, pid: int, root: Path) -> None:
        self._pid, self._root = pid, root

    def inside(self, *command: str) -> list[str]:
        return ["nsenter", f"--target={self._pid}", "--mount", "--", *command]

    def path(self, name: str) -> Path:
        return Path(f"/proc/{self._pid}/root{self._root}/{name}")

    def remount(self, name: str, how: str) -> None:
        command = self.inside("mount", "-o", f"remount,{how}", f"{self._root}/{name}")
        subprocess.run(command, check=True, capture_output=True)

    def fill(self, name: str) -> Path:
        """Take what room there is."""
        filler = self.path(name) / "filler"
        with pytest.raises(OSError, match="No space left"):
            filler.write_bytes(bytes(2 * MIB))
        return filler


@contextmanager
def disks(root: Path, *names: str) -> Iterator[Disks]:
    """Disks of a MiB each in a folder."""
    mounts = "".join(
        f"mkdir -m 700 {n}; mount -t tmpfs -o size=1m,mode=700 {n} {n};" for n in names
    )
    holder = subprocess.Popen(
        ["unshare", "--mount", "--", "sh", "-ec", f"cd {root}; {mounts} echo ready; exec cat"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert holder.stdout is not None
        if holder.stdout.readline() != "ready\n":
            pytest.skip(f"no mounts here: {holder.communicate()[1]}")
        yield Disks(holder.pid, root)
    finally:
        holder.kill()
        holder.communicate()


def goes_on(worker: Launched) -> None:
    for _ in range(3):
        worker.line(r"^at \d+")


def take_snapshot(address: str) -> None:
    ask(address, TakeSnapshot(TOKEN), PATIENCE_S)


def newest(disk: Disks) -> str:
    """The newest snapshot, every byte of which is as it was written."""
    return sf.chosen(str(disk.path("snaps")), whole=True)[1].name


@contextmanager
def crowd(address: str, count: int) -> Iterator[None]:
    """So many connections to a broker's port that never say anything."""
    with ExitStack() as stack:
        for _ in range(count):
            one = stack.enter_context(socket.socket())
            one.setblocking(False)
            one.connect_ex(("127.0.0.1", int(address.rpartition(":")[2])))
        yield


class Roles:
    """A broker with its journal and snapshots on small disks, a server without shared memory, and a
    worker that trains all the time."""

    def __init__(self, stack: ExitStack, disk: Disks, folder: Path) -> None:
        self._stack, self._disk, self._folder = stack, disk, folder
        self.address = free_address()
        self.broker = self.start_broker()
        told = ("--broker", self.address, "--broker-lost", "60", "--shared", "0")
        self.server = self._start(*ZKV, "server", *told)
        self.server.line("is in")
        script = program(folder, TRAINS)
        self.worker = self._start(sys.executable, script, self.address, str(ELEMENTS))
        goes_on(self.worker)

    def _start(self, *command: str) -> Launched:
        one = Launched(*self._disk.inside(*command))
        self._stack.callback(one.process.wait, PATIENCE_S)
        self._stack.callback(one.process.kill)
        return one

    def start_broker(self) -> Launched:
        where = ("--journal", f"{self._folder}/journal", "--snapshot-dir", f"{self._folder}/snaps")
        self.broker = self._start(*ZKV, "broker", "--bind", self.address, *where)
        self.broker.line("broker at")
        return self.broker


def test_a_cluster_that_is_short_of_disk_descriptors_and_memory_loses_nothing(
    tmp_path: Path,
) -> None:
    """Rows 17, 19 and 20, in one cluster, which trains all the time."""
    with disks(tmp_path, "journal", "snaps") as disk, ExitStack() as stack:
        made = Roles(stack, disk, tmp_path)
        row_17_snapshots_that_a_disk_has_no_room_for(made, disk)
        row_19_no_descriptor_is_left(made)
        row_20_a_model_that_there_is_no_memory_for(made)
        row_17_a_journal_that_a_disk_has_no_room_for(made, disk)
        os.kill(made.worker.process.pid, signal.SIGUSR1)
        committed, batches, low, high = made.worker.line("ended (.*)")[1].split()
        assert committed == batches
        assert float(low) == float(high) == int(committed)
        assert made.worker.end() == 0


def row_17_snapshots_that_a_disk_has_no_room_for(made: Roles, disk: Disks) -> None:
    """The older ones are whole, training goes on, and one succeeds when there is room."""
    for _ in range(2):
        take_snapshot(made.address)
    before = newest(disk)
    for state, why in (("rw", "No space left on device"), ("ro", "Read-only file system")):
        disk.remount("snaps", state)
        with pytest.raises(Refused, match=f"server 0 .*could not write its part: .*{why}"):
            take_snapshot(made.address)
        assert newest(disk) == before
        goes_on(made.worker)
    disk.remount("snaps", "rw,size=3m")
    take_snapshot(made.address)
    assert newest(disk) != before


def row_19_no_descriptor_is_left(made: Roles) -> None:
    """Who is here goes on; who comes is answered when there are some again."""
    pid = made.broker.process.pid
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (256, 256))
    with crowd(made.address, 300):
        goes_on(made.worker)
        made.broker.line("of at most 256")
        assert len(os.listdir(f"/proc/{pid}/fd")) == 256
        goes_on(made.worker)
    take_snapshot(made.address)


def row_20_a_model_that_there_is_no_memory_for(made: Roles) -> None:
    """Its worker is refused, and may come again; the server goes on."""
    pid = made.server.process.pid
    has = int(Path(f"/proc/{pid}/statm").read_text().split()[0]) * resource.getpagesize()
    resource.prlimit(pid, resource.RLIMIT_AS, (has + 100 * MIB, has + 100 * MIB))
    os.kill(made.worker.process.pid, signal.SIGUSR2)
    made.worker.line("refused: .*no memory left")
    goes_on(made.worker)
    assert made.server.process.poll() is None


def row_17_a_journal_that_a_disk_has_no_room_for(made: Roles, disk: Disks) -> None:
    """The broker ends rather than promise what it may forget, and goes on when there is room."""
    filler = disk.fill("journal")
    assert made.broker.end() == 1
    assert "could not be written: [Errno 28] No space left on device" in made.broker.text
    assert "make room and start it again on the same address" in made.broker.text
    assert "Traceback" not in made.broker.text
    filler.unlink()
    made.start_broker()
    goes_on(made.worker)
