"""`zkv.local`: a small cluster of real processes beside a test or a notebook."""

from __future__ import annotations

import queue
import signal
from types import TracebackType
from typing import TYPE_CHECKING, Any, Unpack

from zkv.control import GoBack, TakeSnapshot
from zkv_cli import cluster as c
from zkv_cli.ask import TOKEN, ask, ask_status
from zkv_cli.children import Child, Children, Event, wait_for
from zkv_cli.settings import Settings, load

if TYPE_CHECKING:
    from zkv.codecs import Chosen
    from zkv_workers.blocking import Worker
    from zkv_workers.model import ConnectOptions

DEATH_TIMEOUT_S = 10.0
OF_BROKER = (
    *("bind", "servers", "policy", "workers", "optimizer", "staleness", "placement", "topology"),
    *("replicas", "snapshot_dir", "snapshot_every", "restore", "worker_lost_s", "server_lost_s"),
    *("server_back_s", "loop"),
)
"""What `local` takes that the broker's settings have under the same name."""


class LocalCluster:
    """A broker and servers on this machine; made by `zkv.local`, a context manager."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._events: c.Events = queue.SimpleQueue()
        self._children = Children(self._notified)
        self._starting = True
        self._cluster: c.Cluster | None = None

    def _notified(self, event: Event) -> None:
        if self._starting:
            self._events.put(event)

    def start(self) -> LocalCluster:
        """Start the processes and wait until all servers are in (entering the block does it).

        Raises:
            ConfigError: a setting is wrong, or a port is in use.
            ZkvError: a process ended during its start; its last words are in the text.
        """
        try:
            self._cluster = c.start(self._children, self._events, self._settings, quiet=True)
        except BaseException:
            self._children.kill()
            wait_for(self._children.all, DEATH_TIMEOUT_S)
            raise
        finally:
            self._starting = False
        return self

    def stop(self) -> None:
        """End all processes, in under 5 seconds (leaving the block does it)."""
        c.stop(self._children, self._cluster)

    def __enter__(self) -> LocalCluster:
        return self if self._cluster is not None else self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    @property
    def _running(self) -> c.Cluster:
        if self._cluster is None:
            raise RuntimeError("use the cluster inside its block: `with zkv.local() as cluster:`")
        return self._cluster

    @property
    def address(self) -> str:
        """The broker's address: what workers connect to."""
        return self._running.address

    @property
    def broker(self) -> Child:
        """The broker's process."""
        return self._running.broker

    @property
    def servers(self) -> list[Child]:
        """The servers' processes, by the index that the broker gave them."""
        return self._running.servers

    @property
    def processes(self) -> list[Child]:
        """All processes, the broker first; each has `label`, `pid`, `code`, `ended`, `tail`."""
        return [self.broker, *self.servers]

    def connect(self, **options: Unpack[ConnectOptions]) -> Worker:
        """Return a worker of this cluster, as `zkv.connect(address, **options)` does."""
        from zkv_workers.blocking import connect

        return connect(self.address, **options)

    def status(self, timeout_s: float = 5.0) -> dict[str, Any]:
        """Return how the cluster stands, as `zkv status --json` prints it."""
        return ask_status(self.address, timeout_s)

    def snapshot(self, timeout_s: float = 60.0) -> str:
        """Take a snapshot, as `zkv snapshot` does; return where it is, for `zkv.local(restore=…)`.

        Raises:
            Refused: the cluster has no `snapshot_dir`, or it could not be written; the text says
                why.
        """
        told = ask(self.address, TakeSnapshot(TOKEN), timeout_s)
        return f"{told['url']}/{told['name']}"

    def logs(self) -> str:
        """Return the last lines that each process said."""
        lines = [f"[{child.label}] {line}" for child in self.processes for line in list(child.tail)]
        return "\n".join(lines)

    def kill_server(self, index: int, number: int = signal.SIGTERM) -> Child:
        """Send a signal to a server and wait until it has ended, if the signal ends it.

        SIGKILL is a crash, SIGSTOP a machine that hangs (and is not waited for), SIGTERM a stop in
        good order.
        """
        return self._signal(self.servers[index], number)

    def start_server(self, timeout_s: float = 60.0) -> Child:
        """Start a server in the place of one that is lost, and wait until it is in: the cluster
        goes back to its last snapshot with it.

        Raises:
            ClusterNotReady: it was not in within `timeout_s`.
            ConfigError, CommandFailed: it was not let in, or has ended; its words are in the text.
        """
        self._starting = True
        try:
            return c.start_server(self._children, self._events, self._running, timeout_s)
        finally:
            self._starting = False

    def restore(self, name: str = "", timeout_s: float = 60.0) -> dict[str, Any]:
        """Have the cluster go back to a snapshot ("": the newest), as `zkv restore` does.

        Raises:
            Refused: the cluster knows no snapshots.
            BadSnapshot: the snapshot is torn, or of another run.
        """
        return dict(ask(self.address, GoBack(TOKEN, name), timeout_s))

    def kill_broker(self, number: int = signal.SIGTERM) -> Child:
        """Send a signal to the broker and wait until it has ended, if the signal ends it."""
        return self._signal(self.broker, number)

    def _signal(self, child: Child, number: int) -> Child:
        child.signal(number)
        ends = [getattr(signal, n, None) for n in ("SIGKILL", "SIGTERM", "SIGINT", "SIGABRT")]
        if number in ends and not child.ended.wait(DEATH_TIMEOUT_S):
            raise RuntimeError(f"{child.label} (pid {child.pid}) goes on after signal {number}")
        return child


def local(
    servers: int = 1,
    *,
    policy: str = "bsp",
    workers: int = 1,
    optimizer: str | None = None,
    staleness: str | None = None,
    codec: str | Chosen | None = None,
    codec_down: str | Chosen | None = None,
    placement: str | None = None,
    topology: str | None = None,
    replicas: int | None = None,
    snapshot_dir: str | None = None,
    snapshot_every: str | None = None,
    restore: str | None = None,
    bind: str = "tcp://127.0.0.1:0",
    budget: str | int | None = None,
    worker_lost_s: float | None = None,
    server_lost_s: float | None = None,
    server_back_s: float | None = None,
    loop: str | None = None,
    log_level: str | None = None,
) -> LocalCluster:
    """Return a cluster of processes on this machine, to be used as a context manager.

    It works in scripts and notebooks. Nothing is left behind, even if this process is killed.

    Args:
        servers: how many servers hold the model.
        policy: when contributions become an update: "bsp", "asp", "ssp:2", ...
        workers: the start line: no first batch begins before so many workers are here.
        staleness: what happens to gradients that are some updates old; None: nothing.
        codec: how gradients are compressed, such as "int8+ef", or a value of `zkv.codecs`.
        codec_down: how parameters are compressed on their way to workers, such as "int8".
        placement: which server a block goes to, such as "by_hash"; None: by size.
        topology: how gradients come together, such as "ring"; None: each goes to the servers.
        replicas: live copies of each block on other servers: 1 goes on when a server dies; None: 0.
        snapshot_dir: where snapshots go, and one at the end: a folder or an URL; None: nowhere.
        snapshot_every: how often one is taken, such as "300s" or "1000updates"; None: when asked.
        restore: the snapshot to begin from, or a folder, whose newest it is then.
        optimizer: what the servers do with gradients, such as "sgd:lr=0.1"; None: the default.
        bind: the broker's address; port 0 is any free one.
        budget: room at each server for contributions that wait, such as "512MiB"; None: no limit.
        worker_lost_s, server_lost_s: seconds of silence that make one lost; None: the default.
        server_back_s: how long a lost server's successor is waited for, before the last snapshot.
        loop, log_level: such as "asyncio" (or "uvloop"), "debug"; None: the default.

    Raises:
        ConfigError: a setting is wrong; all mistakes are named.
    """
    given = dict(locals())
    flags: dict[tuple[str, str], Any] = {("broker", name): given[name] for name in OF_BROKER}
    for name, chosen in (("codec", codec), ("codec_down", codec_down)):
        flags["broker", name] = None if chosen is None else str(chosen)
    flags |= {("server", "loop"): loop, ("server", "budget"): budget, ("log", "level"): log_level}
    return LocalCluster(load(flags))
