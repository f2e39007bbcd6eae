"""The options that several commands have, with their help. Defaults are the settings' own."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Option = typer.Option

Config = Annotated[
    Path | None, Option("--config", help="Settings as TOML (default: ./zkv.toml if there is one).")
]
LogFormat = Annotated[str | None, Option("--log-format", help="text or json (default: text).")]
LogLevel = Annotated[
    str | None, Option("--log-level", help="debug, info, warning or error (default: info).")
]
Join = Annotated[
    str | None,
    Option("--broker", help="The broker's address, tcp://HOST:PORT (default: ZKV_BROKER)."),
]
Asked = Annotated[
    str | None,
    Option("--broker", help="The broker's address (default: ZKV_BROKER, else this machine's)."),
]
BrokerBind = Annotated[
    str | None,
    Option("--bind", help="Where the broker listens; port 0 is any free one."),
]
Servers = Annotated[
    int | None, Option("--servers", help="How many servers hold the model (default: 1).")
]
Workers = Annotated[
    int | None,
    Option("--workers", help="No first batch begins before so many workers are here."),
]
MinWorkers = Annotated[
    int | None,
    Option("--min-workers", help="With fewer workers, lost ones missing, no batch begins."),
]
OnShort = Annotated[
    str | None,
    Option("--on-short", help="When a lost worker makes it too few: wait (default) or fail."),
]
Policy = Annotated[
    str | None,
    Option("--policy", help="When contributions become an update: bsp, asp, ssp:2, k-bsp:2, ..."),
]
Optimizer = Annotated[
    str | None,
    Option("--optimizer", help="What servers do with gradients, such as momentum:lr=0.05."),
]
Staleness = Annotated[
    str | None,
    Option(
        "--staleness",
        help="What happens to gradients that are some updates old: none, scale, dc:0.04, drop:5.",
    ),
]
Record = Annotated[
    str | None,
    Option(
        "--record",
        help="Folder in which all that is heard is written down, for zkv replay, and for "
        "zkv simulate --trace.",
    ),
]
Advertise = Annotated[
    str | None, Option("--advertise", help="The host or address that others reach this one at.")
]
Insecure = Annotated[
    bool | None,
    Option(
        "--insecure",
        help="Allow a bind that others reach; traffic is neither encrypted nor authenticated.",
    ),
]
WorkerLost = Annotated[
    float | None,
    Option(
        "--worker-lost-s", "--worker-lost", help="Silence that makes a worker gone, in seconds."
    ),
]
ServerLost = Annotated[
    float | None,
    Option(
        "--server-lost-s", "--server-lost", help="Silence that makes a server lost, in seconds."
    ),
]
Budget = Annotated[
    str | None,
    Option("--budget", help="Room for contributions that wait, such as 2GiB; 0: no limit."),
]
Loop = Annotated[
    str | None, Option("--loop", help="Event loop: auto, asyncio or uvloop (default: auto).")
]
Count = Annotated[
    int, Option("-n", "--count", min=1, max=65_535, help="How many workers to start.")
]
JoinOrStart = Annotated[
    str | None,
    Option("--broker", help="Join this broker (or ZKV_BROKER's) instead of starting one."),
]
FirstRank = Annotated[
    int, Option("--first-rank", min=0, help="RANK of the first worker of this machine.")
]
World = Annotated[
    int | None, Option("--world", min=1, help="WORLD_SIZE (default: first rank + count).")
]
Report = Annotated[
    bool, Option("--report", help="End with a table of what each worker's time has gone into.")
]
ReportJson = Annotated[
    bool,
    Option("--json", help="End with that report as JSON, alone on standard output."),
]
ReportDir = Annotated[
    Path | None,
    Option("--report-dir", help="Folder that workers find in ZKV_REPORT, for files that stay."),
]
Grace = Annotated[
    float | None, Option("--grace", help="Seconds that workers may go on once one has failed.")
]
NarrateAfter = Annotated[
    float | None,
    Option(
        "--narrate-after",
        help="Seconds of a wait after which a worker logs why it waits, then every 5 s "
        "(default: ZKV_NARRATE_AFTER_S, else 2).",
    ),
]
StallTimeout = Annotated[
    float | None,
    Option(
        "--stall-timeout",
        help="Seconds after which a wait is an error that names who is missing "
        "(default: ZKV_WAIT_TIMEOUT_S, else 600).",
    ),
]
