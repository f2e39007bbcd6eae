"""The broker and the server as processes: what they print, and how they end."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import signal
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zkv.errors import ConfigError, ZkvError
from zkv.limits import Limits
from zkv.policy import policy
from zkv_cli.cluster import join_commands
from zkv_cli.exits import INTERRUPTED, SIGNAL_BASE, say
from zkv_cli.guard import watch_lifeline
from zkv_cli.settings import BrokerSection, ServerSection, Settings
from zkv_net import descriptors, tracing
from zkv_net import loop as net
from zkv_net.safety import warn_open
from zkv_net.sockets import is_loopback, split_address
from zkv_net.storage import absolute, folder
from zkv_net.watchdog import Watchdog

if TYPE_CHECKING:
    from zkv_brokers.broker import BrokerConfig
    from zkv_brokers.server import ServerConfig

log = logging.getLogger("zkv.cli")


def recording(folder: str, role: str) -> Path | None:
    """Return the file in which this process is recorded; None if it is not."""
    if not folder:
        return None
    made = Path(folder)
    made.mkdir(parents=True, exist_ok=True)
    return made / f"{role}-{os.getpid()}.rec"


def journal_folder(text: str, bind: str) -> Path | None:
    """Return the folder of a broker's journal; None if it has none.

    "none", or "auto" with a bind to any free port: nobody could start it again on its address.
    "auto" is a folder for each machine and address, so that who starts a broker again where it was
    need not think of it.
    """
    host, port = split_address(bind)
    nobody = port in ("0", "*") or sys.platform == "win32"
    if text == "none" or (text == "auto" and nobody):
        return None
    if text != "auto":
        return Path(text)
    state = os.environ.get("XDG_STATE_HOME", "")
    base = Path(state) if Path(state).is_absolute() else Path.home() / ".local" / "state"
    # A home may be shared by machines; and a name of a host is no path.
    name = re.sub(r"[^0-9A-Za-z.-]", "_", f"{net.host_name()}-{host}-{port}")
    folder = base / "zkv" / "brokers" / name
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        writable = os.access(folder, os.W_OK)
    except OSError:
        writable = False
    if not writable:
        log.warning(
            "%s cannot be written: if this broker dies, its run ends with it (--journal DIR names "
            "another folder, --journal none says that this is meant)",
            folder,
        )
    return folder if writable else None


def broker_config(section: BrokerSection) -> BrokerConfig:
    """Return what the broker's driver takes."""
    from zkv_brokers.broker import BrokerConfig

    if section.snapshot_dir:
        folder(section.snapshot_dir)  # What it needs is said before anybody trains.
    elif section.snapshot_every:
        raise ConfigError("--snapshot-every: snapshots go somewhere: give --snapshot-dir too")
    if section.replicas and section.servers <= section.replicas:
        raise ConfigError(
            f"--replicas {section.replicas}: copies are on other servers, and there is "
            f"{section.servers}; give --servers {section.replicas + 1} or more"
        )
    return BrokerConfig(
        policy=policy(section.policy),
        bind=section.bind,
        data_bind=section.data_bind,
        advertise=section.advertise,
        servers=section.servers,
        workers=section.workers,
        min_workers=section.min_workers,
        on_short=section.on_short,
        optimizer=section.optimizer,
        staleness=section.staleness,
        codec=section.codec,
        codec_down=section.codec_down,
        block_bytes=section.block_bytes,
        placement=section.placement,
        replicas=section.replicas,
        topology=section.topology,
        # Servers are told of it, and may have been started elsewhere.
        snapshot_dir=absolute(section.snapshot_dir),
        snapshot_every=section.snapshot_every,
        restore=absolute(section.restore),
        restore_whole=section.restore_whole,
        journal=journal_folder(section.journal, section.bind),
        record=recording(section.record, "broker"),
        trace=os.environ.get(tracing.VARIABLE, ""),
        insecure=section.insecure,
        norm_limit=section.norm_limit,
        norm_action=section.norm_action,
        # More would be accepted by the kernel, and never answered.
        max_members=min(section.max_members, descriptors.room()),
        max_keys=section.max_keys,
        limits=Limits(section.max_connections, section.max_rate),
        worker_lost_s=section.worker_lost_s,
        server_lost_s=section.server_lost_s,
        beat_s=section.beat_s,
        server_back_s=section.server_back_s,
        io_threads=section.io_threads,
        socket_bytes=section.socket_buffer,
    )


def server_config(section: ServerSection, broker: str, *, joins: bool = False) -> ServerConfig:
    """Return what the server's driver takes; `joins`: it is one more for a cluster that runs."""
    from zkv_brokers.server import ServerConfig

    return ServerConfig(
        broker=broker,
        bind=section.bind,
        advertise=section.advertise,
        name=section.name,
        record=recording(section.record, "server"),
        trace=os.environ.get(tracing.VARIABLE, ""),
        budget_bytes=section.budget,
        shared_bytes=section.shared,
        io_threads=section.io_threads,
        socket_bytes=section.socket_buffer,
        connect_timeout_s=section.connect_timeout_s,
        broker_lost_s=section.broker_lost_s,
        insecure=section.insecure,
        limits=Limits(section.max_connections, section.max_rate),
        joins=joins,
    )


def run_broker(settings: Settings) -> int:
    """Run a broker until a signal ends it; return the exit code."""
    # A server does not need the router, nor a broker the shard: each starts quicker alone.
    from zkv_brokers.broker import Broker

    watch_lifeline()

    section = settings.broker
    asked = section.servers + max(section.workers, section.min_workers)
    if "max_members" in section.model_fields_set:
        asked = max(asked, section.max_members)
    descriptors.claim(asked)

    async def main() -> int:
        broker = Broker(broker_config(section))
        broker.start()
        ending = _Ending(broker.stop)
        _warn_if_open(section.insecure, broker.address)
        server, worker = join_commands(broker.address, insecure=section.insecure)
        say(f"broker at {broker.address} | a server joins with: {server} | workers with: {worker}")
        return await _served(broker, ending)

    return _run(main, section.loop)


def run_server(settings: Settings, broker: str, *, joins: bool = False) -> int:
    """Run a server until a signal ends it, or an error, or it is drained; return the exit code.

    `joins`: it is one more for a cluster that runs.
    """
    from zkv_brokers.server import Server
    from zkv_net import heap

    heap.keep()
    watch_lifeline()
    # It learns how many workers there are when they come: the broker and one of them, at least.
    descriptors.claim(2)

    async def main() -> int:
        server = Server(server_config(settings.server, broker, joins=joins))
        server.on_welcome = lambda index, servers: say(f"server {index} of {servers} is in")
        server.start()
        ending = _Ending(server.stop)
        _warn_if_open(settings.server.insecure, server.address)
        say(f"server at {server.address} | its broker: {broker}")
        return await _served(server, ending)

    return _run(main, settings.server.loop)


def _warn_if_open(insecure: bool, address: str) -> None:
    if insecure and not is_loopback(split_address(address)[0]):
        warn_open([address])


class _Ending:
    """Ends a role in good order at a signal, and remembers the exit code that tells of it."""

    def __init__(self, stop: Callable[[str], None]) -> None:
        self._stop = stop
        self.code = 0
        net.on_stop_signals(self._received)

    def _received(self, name: str) -> None:
        self.code = SIGNAL_BASE + signal.Signals[name]
        self._stop(name)


async def _served(role: Any, ending: _Ending) -> int:
    """Serve until the end, and return the exit code.

    Who was told to end has ended well, though it may have heard in the same moment that another
    one, told so too, is gone.
    """
    try:
        with Watchdog(log):
            await role.serve()
    except ZkvError:
        # The signal's callback may be due in the loop's next turn.
        await asyncio.sleep(0)
        if not ending.code:
            raise
    finally:
        role.close()
    return ending.code


def _run(main: Callable[[], Coroutine[Any, Any, int]], loop: str) -> int:
    try:
        return net.run(main, loop)
    except KeyboardInterrupt:
        # Only where an event loop cannot take signals over.
        return INTERRUPTED
