"""A cluster on this machine: a broker and its servers as child processes.

Starts them in order, since servers must be told the broker's real port, and says what went wrong in
the child's own words. Knows processes and their printed lines, but no sockets and no workers.
"""

from __future__ import annotations

import queue
import re
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from zkv import control as c
from zkv.errors import ClusterNotReady, ConfigError, ZkvError
from zkv_cli.ask import TOKEN, ask, ask_status
from zkv_cli.children import Child, Children, Ended, Event, Line, Signalled
from zkv_cli.exits import FAILED, MISUSED, SIGNAL_BASE, CommandFailed, say
from zkv_cli.guard import LIFELINE
from zkv_cli.settings import Section, Settings
from zkv_net.sockets import is_loopback, join_address, split_address

START_TIMEOUT_S = 60.0
SERVER_GRACE_S = 1.5
BROKER_GRACE_S = 1.5
REVIVE_MAX, REVIVE_S = 3, 60.0
"""A lost server is started again so many times within so many seconds."""
STATUS_TIMEOUT_S = 1.0
ALIVE = {LIFELINE: "stdin", "PYTHONUNBUFFERED": "1"}
LAST_SNAPSHOT_S = 20.0
"""How long the last snapshot may take."""
BROKER_AT = re.compile(r"broker at (tcp://\S+)")
SERVER_IN = re.compile(r"server (\d+) of \d+ is in")
OWN_WORDS = re.compile(r"zkv \w+: error: ")

Events = queue.SimpleQueue[Event]
"""Events of children and signals. Its `put` may be called from a signal handler."""


@dataclass(slots=True)
class Cluster:
    """A broker and servers that run. `servers` are by the index that the broker gave them."""

    address: str
    broker: Child
    servers: list[Child]
    saves: bool = False
    """Whether a last snapshot is taken before it ends."""
    command: list[str] = field(default_factory=list)
    """What starts a server."""
    revived: list[float] = field(default_factory=list)
    """When servers were started again: seconds of the monotonic clock."""


def join_commands(address: str, *, insecure: bool) -> tuple[str, str]:
    """Return the commands that a server and the workers of another machine type."""
    here = is_loopback(split_address(address)[0])
    wide = "" if here else " --bind tcp://0.0.0.0:0"
    open_ = " --insecure" if insecure and not here else ""
    server = f"zkv server --broker {address}{wide}{open_}"
    return server, f"zkv run --broker {address}{open_} -n 1 train.py"


def command_line(role: str, section: Section, extra: Mapping[str, str]) -> list[str]:
    """Return the command that starts a role with these settings, all of them as flags."""
    command = [sys.executable, "-m", "zkv_cli", role]
    for name, value in section.model_dump().items():
        if value is True:
            command.append(f"--{name.replace('_', '-')}")
        elif value not in (None, False, ""):
            command.append(f"--{name.removesuffix('_s').replace('_', '-')}={value}")
    return command + [f"--{name}={value}" for name, value in extra.items()]


def drained(child: Child, cluster: Cluster | None) -> bool:
    """Return whether a child is a server that has ended as it was drained: with 0, which no signal
    and no error gives."""
    return cluster is not None and child in cluster.servers and child.code == 0


def start(
    children: Children,
    events: Events,
    settings: Settings,
    *,
    quiet: bool = False,
    timeout_s: float = START_TIMEOUT_S,
) -> Cluster:
    """Start a broker and its servers, wait until all are in; `quiet` forwards none of their words.

    Raises:
        ClusterNotReady: not all were in within `timeout_s`.
        ConfigError: a child has refused its settings (a port in use, for instance).
        CommandFailed: a child ended, or a signal asked to stop.
    """
    log: dict[str, str] = {"log-format": settings.log.format, "log-level": settings.log.level}
    section = settings.broker
    if section.journal == "auto":
        # This cluster ends with its broker: nobody starts that again.
        section = section.model_copy(update={"journal": "none"})
    broker = children.start("broker", command_line("broker", section, log), ALIVE)
    until = (time.monotonic() + timeout_s, timeout_s)
    address = _awaited(events, until, broker, BROKER_AT, quiet)[1].group(1)
    command = command_line("server", _beside(address, settings), log | {"broker": address})
    wanted = settings.broker.servers
    started = [children.start("server", command, ALIVE) for _ in range(wanted)]
    servers: dict[int, Child] = {}
    while len(servers) < wanted:
        child, match = _awaited(events, until, None, SERVER_IN, quiet)
        index = int(match.group(1))
        child.label = f"server {index}"
        servers[index] = child
    assert set(servers.values()) == set(started)
    here = [servers[index] for index in sorted(servers)]
    return Cluster(address, broker, here, bool(settings.broker.snapshot_dir), command)


def start_server(
    children: Children, events: Events, cluster: Cluster, timeout_s: float = START_TIMEOUT_S
) -> Child:
    """Start a server in the place of a lost one, and wait until it is in.

    Raises:
        ClusterNotReady: it was not within `timeout_s`.
        ConfigError, CommandFailed: it has ended; its last words are in the text.
    """
    child = children.start("server", cluster.command, ALIVE)
    until = (time.monotonic() + timeout_s, timeout_s)
    child.label = f"server {_awaited(events, until, child, SERVER_IN, True)[1].group(1)}"
    lost = [at for at, one in enumerate(cluster.servers) if one.gone]
    at = lost[0] if lost else len(cluster.servers)
    cluster.servers[at : at + 1] = [child]
    return child


def revived(children: Children, cluster: Cluster | None, dead: Child) -> Child | None:
    """Start a server again that was lost, if the cluster can go on with another one (it has copies,
    or can go back to a snapshot), and that has not happened too often; return it, or None."""
    if cluster is None or dead not in cluster.servers or cluster.broker.gone:
        return None
    now = time.monotonic()
    cluster.revived = [at for at in cluster.revived if now - at < REVIVE_S]
    if len(cluster.revived) >= REVIVE_MAX or not _takes_another(cluster.address):
        return None
    cluster.revived.append(now)
    child = children.start(dead.label, cluster.command, ALIVE)
    cluster.servers[cluster.servers.index(dead)] = child
    return child


def _takes_another(address: str) -> bool:
    try:
        told = ask_status(address, STATUS_TIMEOUT_S)
        goes_back, copies = told["snapshots"]["gone_back"], told["replicas"]
        return not told["failed"] and bool(goes_back["can_go_back_to"] or copies["standing_by"])
    except ZkvError:
        return False


def _beside(address: str, settings: Settings) -> Section:
    """The settings of servers beside a broker: reachable from wherever it is reachable from."""
    section = settings.server
    if settings.broker.record and not section.record:
        section = section.model_copy(update={"record": settings.broker.record})
    host, _ = split_address(address)
    if is_loopback(host) or "bind" in section.model_fields_set:
        return section
    bound, _ = split_address(settings.broker.bind)
    changes: dict[str, object] = {
        "bind": join_address(bound, 0),
        "insecure": settings.broker.insecure,
    }
    if section.advertise is None:
        changes["advertise"] = host
    return section.model_copy(update=changes)


def _awaited(
    events: Events,
    until: tuple[float, float],
    child: Child | None,
    pattern: re.Pattern[str],
    quiet: bool,
) -> tuple[Child, re.Match[str]]:
    """Wait until a child (this one, if given) prints a line that begins with `pattern`; `until` is
    the deadline, and how many seconds there were up to it."""
    deadline, limit_s = until
    while True:
        try:
            event = events.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            raise ClusterNotReady(f"the cluster did not come up within {limit_s:.0f} s") from None
        match event:
            case Line(said_by, "stdout", text) if child in (None, said_by):
                found = pattern.match(text)
                if found:
                    return said_by, found
            case Line(_, "stderr", text) if not (quiet or OWN_WORDS.match(text)):
                forward(event)
            case Ended(ended) if child in (None, ended):
                raise died(ended)
            case Signalled(number):
                raise CommandFailed("", SIGNAL_BASE + number)


def died(child: Child) -> Exception:
    """Return the error for a child that ended during the start, in its own words."""
    words = [line for line in child.tail if OWN_WORDS.match(line)]
    if child.code == MISUSED and words:
        at = list(child.tail).index(words[-1])
        return ConfigError("\n".join([OWN_WORDS.sub("", words[-1]), *list(child.tail)[at + 1 :]]))
    return CommandFailed(child.obituary(), FAILED)


def forward(event: Line) -> None:
    """Pass on what a child of ours says to its standard error; JSON stays JSON."""
    text = event.text if event.text.startswith("{") else f"[{event.child.label}] {event.text}"
    say(text, error=True)


def stop(children: Children, cluster: Cluster | None) -> None:
    """End servers, then the broker (which tells the workers of it), in bounded time; first take a
    last snapshot, if there is a folder for it."""
    if cluster is not None and cluster.saves and not cluster.broker.gone:
        save(cluster.address)
    if cluster is not None:
        children.stop(cluster.servers, SERVER_GRACE_S)
    children.stop(children.all, BROKER_GRACE_S)


def save(address: str) -> None:
    """Take a last snapshot, in bounded time; say if there is none."""
    try:
        ask(address, c.TakeSnapshot(TOKEN), LAST_SNAPSHOT_S)
    except ZkvError as error:
        say(f"zkv: no last snapshot was taken: {error}", error=True)


def signals_to(events: Events, children: Children) -> None:
    """Turn SIGINT, SIGTERM and SIGHUP into events; the second one kills all children at once."""
    seen: list[int] = []

    def received(number: int, frame: object) -> None:
        if seen:
            children.kill()
        seen.append(number)
        events.put(Signalled(number))

    for name in ("SIGINT", "SIGTERM", "SIGHUP"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), received)
