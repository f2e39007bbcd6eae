"""The options that set settings: each is declared once, with its help and the key that it sets.

A command names the options of each section that it takes, and gets what was typed as flags.
Defaults are the settings' own.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

Flags = dict[tuple[str, str], Any]


@dataclass(frozen=True)
class Setting:
    """An option that sets the key `key` of one section, or of several. Not given: None."""

    key: str
    kind: Any
    names: tuple[str, ...]
    help: str

    def parameter(self) -> inspect.Parameter:
        """Return the parameter that Typer reads."""
        return inspect.Parameter(
            self.key,
            inspect.Parameter.KEYWORD_ONLY,
            default=typer.Option(None, *self.names, help=self.help),
            annotation=self.kind | None,
        )


def sets(**sections: Sequence[Setting]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the options of these sections; it gets `flags`: (section, key) to value."""
    keys: dict[str, list[tuple[str, str]]] = {}
    settings: dict[str, Setting] = {}
    for section, some in sections.items():
        for one in some:
            settings[one.key] = one
            keys.setdefault(one.key, []).append((section, one.key))

    def with_options(body: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(body)
        def command(**given: Any) -> None:
            flags = {place: given[key] for key, places in keys.items() for place in places}
            body(flags=flags, **{name: one for name, one in given.items() if name not in keys})

        own = [
            one.replace(kind=inspect.Parameter.KEYWORD_ONLY)
            for name, one in inspect.signature(body, eval_str=True).parameters.items()
            if name != "flags"
        ]
        parameters = [*own, *(one.parameter() for one in settings.values())]
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {one.name: one.annotation for one in parameters}
        return command

    return with_options


Config = Annotated[
    Path | None,
    typer.Option("--config", help="Settings as TOML (default: ./zkv.toml if there is one)."),
]
LOG = (
    Setting("format", str, ("--log-format",), "text or json (default: text)."),
    Setting("level", str, ("--log-level",), "debug, info, warning or error (default: info)."),
)

Command = Annotated[
    list[str],
    typer.Argument(metavar="COMMAND...", help="A .py file or a program, and its arguments."),
]
Count = Annotated[
    int, typer.Option("-n", "--count", min=1, max=65_535, help="How many workers to start.")
]
FirstRank = Annotated[int, typer.Option(min=0, help="RANK of the first worker of this machine.")]
World = Annotated[int | None, typer.Option(min=1, help="WORLD_SIZE (default: first rank + count).")]
Report = Annotated[
    bool,
    typer.Option("--report", help="End with a table of what each worker's time has gone into."),
]
AsJson = Annotated[
    bool, typer.Option("--json", help="End with that report as JSON, alone on standard output.")
]
ReportDir = Annotated[
    Path | None, typer.Option(help="Folder that workers find in ZKV_REPORT, for files that stay.")
]

JOIN = Setting(
    "broker", str, ("--broker",), "The broker's address, tcp://HOST:PORT (default: ZKV_BROKER)."
)
ASKED = Setting(
    "broker",
    str,
    ("--broker",),
    "The broker's address (default: ZKV_BROKER, else this machine's).",
)
JOIN_OR_START = Setting(
    "broker", str, ("--broker",), "Join this broker (or ZKV_BROKER's) instead of starting one."
)

BROKER_BIND = Setting("bind", str, ("--bind",), "Where the broker listens; port 0 is any free one.")
SERVER_BIND = Setting(
    "bind", str, ("--bind",), "Where it takes data (default: tcp://127.0.0.1:0, a free port)."
)
DATA_BIND = Setting(
    "data_bind", str, ("--data-bind",), "Where route broker takes data (default: a port higher)."
)
ADVERTISE = Setting(
    "advertise", str, ("--advertise",), "The host or address that others reach this one at."
)
KEYS = Setting(
    "keys_folder",
    str,
    ("--keys",),
    "The keys folder (default: ZKV_KEYS, else ~/.config/zkv/keys where keys are needed).",
)
INSECURE = Setting(
    "insecure",
    bool,
    ("--insecure",),
    "Do without keys where other machines are reached: traffic is neither encrypted nor "
    "authenticated.",
)
ASKING = (ASKED, KEYS, INSECURE)
"""What a command that asks a broker takes."""
NAME = Setting("name", str, ("--name",), "Its name in messages (default: host and pid).")

SERVERS = Setting("servers", int, ("--servers",), "How many servers hold the model (default: 1).")
WORKERS = Setting(
    "workers", int, ("--workers",), "No first batch begins before so many workers are here."
)
JOURNAL = Setting(
    "journal",
    str,
    ("--journal",),
    "Folder of the journal by which this broker goes on if it is started again; none: it cannot "
    "(default: one in ~/.local/state/zkv for each address with a port).",
)
RECORD = Setting(
    "record",
    str,
    ("--record",),
    "Folder in which all that is heard is written down, for zkv replay, and for "
    "zkv simulate --trace.",
)
TRAINING = (
    Setting(
        "policy",
        str,
        ("--policy",),
        "When contributions become an update: bsp, asp, ssp:2, k-bsp:2, ...",
    ),
    Setting(
        "optimizer",
        str,
        ("--optimizer",),
        "What servers do with gradients, such as momentum:lr=0.05.",
    ),
    Setting(
        "staleness",
        str,
        ("--staleness",),
        "What happens to gradients that are some updates old: none, scale, dc:0.04, drop:5.",
    ),
    Setting(
        "codec",
        str,
        ("--codec",),
        "How gradients are compressed: none, fp16, int8, topk:0.01+int8+ef, ...;*.bias=none.",
    ),
    Setting(
        "codec_down",
        str,
        ("--codec-down",),
        "How parameters are compressed on their way to workers: none, fp16, int8, ... (no +ef).",
    ),
    Setting(
        "block_bytes",
        str,
        ("--block-bytes",),
        "Size of the blocks that keys are cut into, such as 256KiB; 0: by the link's measured "
        "speed (default).",
    ),
    Setting(
        "placement",
        str,
        ("--placement",),
        "Which server a block goes to: by_size (default), by_hash, by_load:emb.*=40, and limits, "
        "as in by_size;pin:emb.*=0;bytes=1GiB.",
    ),
    Setting(
        "replicas",
        int,
        ("--replicas",),
        "Live copies of each block on other servers: 0 (default), or 1: a run goes on if a server "
        "dies, and loses nothing.",
    ),
    Setting(
        "topology",
        str,
        ("--topology",),
        "How gradients come together: servers (default), one-server, hierarchical (the workers of "
        "a host add theirs up first) or ring (workers pass sums on to each other).",
    ),
    Setting(
        "min_workers",
        int,
        ("--min-workers",),
        "With fewer workers, lost ones missing, no batch begins.",
    ),
    Setting(
        "on_short",
        str,
        ("--on-short",),
        "When a lost worker makes it too few: wait (default) or fail.",
    ),
)
"""What a broker is told of the training."""

PORT_LIMITS = (
    Setting(
        "max_connections",
        int,
        ("--max-connections",),
        "Connections that a port bears (default: 16384).",
    ),
    Setting(
        "max_rate",
        int,
        ("--max-rate",),
        "Messages in a second of one connection; those above are dropped, and sent again "
        "(default: 20000).",
    ),
)
LIMITS = (
    *PORT_LIMITS,
    Setting("max_members", int, ("--max-members",), "Workers and servers in all (default: 4096)."),
    Setting(
        "norm_limit",
        float,
        ("--norm-limit",),
        "The norm that one worker's gradient may have, over all keys of the model (default: any).",
    ),
    Setting(
        "norm_action",
        str,
        ("--norm-action",),
        "What becomes of one above it: refuse (default), clip, or quarantine (refused, and after "
        "three its worker is put out).",
    ),
    Setting("max_keys", int, ("--max-keys",), "Keys and tables in all (default: 1000000)."),
)
"""What a broker bears of whoever is let in."""
SNAPSHOTS = (
    Setting(
        "snapshot_dir",
        str,
        ("--snapshot-dir",),
        "Where snapshots go, and one at the end: a folder that all servers share, or an URL such "
        "as s3://bucket/run.",
    ),
    Setting(
        "snapshot_every",
        str,
        ("--snapshot-every",),
        "How often one is taken: 300s, 5min, 1000updates, ... (default: when asked for).",
    ),
    Setting(
        "restore",
        str,
        ("--restore",),
        "Begin from this snapshot, or from the newest one in this folder.",
    ),
    Setting(
        "restore_whole",
        bool,
        ("--restore-whole",),
        "Read all files first, and begin from the newest snapshot of which every byte is right.",
    ),
)

LOST = (
    Setting(
        "worker_lost_s",
        float,
        ("--worker-lost-s", "--worker-lost"),
        "Silence that makes a worker gone, in seconds.",
    ),
    Setting(
        "server_lost_s",
        float,
        ("--server-lost-s", "--server-lost"),
        "Silence that makes a server lost, in seconds.",
    ),
    Setting(
        "beat_s",
        str,
        ("--beat-s", "--beat"),
        "How often everybody says that it is alive: 0.5s (default), 50ms, ...; all are told.",
    ),
    Setting(
        "server_back_s",
        float,
        ("--server-back-s", "--server-back"),
        "How long another server is waited for in the place of a lost one, in seconds, before all "
        "go back to the last snapshot on those that are left.",
    ),
)
BROKER_LOST = Setting(
    "broker_lost_s", float, ("--broker-lost",), "Silence that makes the broker lost, in seconds."
)
CONNECT_TIMEOUT = Setting(
    "connect_timeout_s",
    float,
    ("--connect-timeout",),
    "How long to wait for the broker, in seconds.",
)
BUDGET = Setting(
    "budget", str, ("--budget",), "Room for contributions that wait, such as 2GiB; 0: no limit."
)
SHARED = Setting(
    "shared",
    str,
    ("--shared",),
    "Memory for payloads to workers of this machine (default: 4GiB; 0: sockets only).",
)
DATA_SOCKETS = (
    Setting(
        "io_threads",
        int,
        ("--io-threads",),
        "ZeroMQ's threads that move bytes to and from the kernel (default: 1).",
    ),
    Setting(
        "socket_buffer",
        str,
        ("--socket-buffer",),
        "Buffers that data connections ask of the system, each way, such as 1MiB; 0: as it likes "
        "(default).",
    ),
)
"""How data moves through sockets: `zkv bench` measures it."""
LOOP = Setting("loop", str, ("--loop",), "Event loop: auto, asyncio or uvloop (default: auto).")

RUN = (
    Setting("grace_s", float, ("--grace",), "Seconds that workers may go on once one has failed."),
    Setting(
        "narrate_after_s",
        float,
        ("--narrate-after",),
        "Seconds of a wait after which a worker logs why it waits, then every 5 s "
        "(default: ZKV_NARRATE_AFTER_S, else 2).",
    ),
    Setting(
        "stall_timeout_s",
        float,
        ("--stall-timeout",),
        "Seconds after which a wait is an error that names who is missing "
        "(default: ZKV_WAIT_TIMEOUT_S, else 600).",
    ),
)

JOB: dict[str, Sequence[Setting]] = {
    "join": (JOIN_OR_START, KEYS, INSECURE),
    "run": (*RUN, *DATA_SOCKETS),
    "broker": (
        *(SERVERS, *TRAINING, *SNAPSHOTS, RECORD, BROKER_BIND, ADVERTISE),
        *(INSECURE, *DATA_SOCKETS),
    ),
    "server": DATA_SOCKETS,
    "log": LOG,
}
"""What a command that runs workers takes."""

SERVER: dict[str, Sequence[Setting]] = {
    "join": (JOIN, KEYS),
    "server": (
        *(SERVER_BIND, ADVERTISE, NAME, BUDGET, SHARED, CONNECT_TIMEOUT, BROKER_LOST),
        *(RECORD, INSECURE, *PORT_LIMITS, *DATA_SOCKETS, LOOP),
    ),
    "log": LOG,
}
"""What a server is started with."""
