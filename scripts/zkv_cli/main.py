"""The `zkv` command: what can be typed. Each command checks its settings and calls the one module
that does the work, imported only then, so that `zkv --help` answers at once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from zkv_cli import options as o
from zkv_cli import plan
from zkv_cli.exits import EPILOG, reporting
from zkv_cli.replay import replay
from zkv_cli.simulate import simulate

app = typer.Typer(
    name="zkv",
    help="A parameter server over ZeroMQ: workers push gradients, servers hold the model, "
    "a broker keeps the order.",
    epilog=EPILOG,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.add_typer(plan.app)
app.command()(replay)


def _load(flags: dict[tuple[str, str], Any], config: Path | None) -> Any:
    from zkv_cli import logs, settings

    loaded = settings.load(flags, config)
    logs.set_up(loaded.log.format, loaded.log.level)
    return loaded


def _broker_named(settings: Any) -> str:
    from zkv.errors import ConfigError

    if settings.join.broker is None:
        raise ConfigError(
            "no broker is named: give --broker tcp://HOST:PORT, set ZKV_BROKER, "
            "or write broker under [join] of zkv.toml"
        )
    return str(settings.join.broker)


def _broker_asked(settings: Any) -> str:
    """The broker named, else the one that `zkv up` starts here with the same settings."""
    from zkv_net.sockets import join_address, split_address

    host, port = split_address(settings.broker.bind)
    if settings.join.broker is not None or port in ("0", "*"):
        return _broker_named(settings)
    return join_address({"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host), port)


def _version(wanted: bool) -> None:
    if wanted:
        from zkv import __version__

        typer.echo(f"zkv {__version__}")
        raise typer.Exit


@app.callback(epilog=EPILOG)
def _main(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_version, is_eager=True, help="Print the version and end."
        ),
    ] = False,
) -> None:
    del version


@app.command()
def broker(
    bind: o.BrokerBind = None,
    data_bind: Annotated[
        str | None,
        typer.Option("--data-bind", help="Where route broker takes data (default: a port higher)."),
    ] = None,
    advertise: o.Advertise = None,
    servers: o.Servers = None,
    workers: o.Workers = None,
    policy: o.Policy = None,
    optimizer: o.Optimizer = None,
    staleness: o.Staleness = None,
    min_workers: o.MinWorkers = None,
    on_short: o.OnShort = None,
    record: o.Record = None,
    insecure: o.Insecure = None,
    worker_lost: o.WorkerLost = None,
    server_lost: o.ServerLost = None,
    loop: o.Loop = None,
    config: o.Config = None,
    log_format: o.LogFormat = None,
    log_level: o.LogLevel = None,
) -> None:
    """Run a broker: it lets members in, and decides when contributions become an update."""
    flags = {
        ("broker", "bind"): bind,
        ("broker", "data_bind"): data_bind,
        ("broker", "advertise"): advertise,
        ("broker", "servers"): servers,
        ("broker", "workers"): workers,
        ("broker", "policy"): policy,
        ("broker", "optimizer"): optimizer,
        ("broker", "staleness"): staleness,
        ("broker", "min_workers"): min_workers,
        ("broker", "on_short"): on_short,
        ("broker", "record"): record,
        ("broker", "insecure"): insecure,
        ("broker", "worker_lost_s"): worker_lost,
        ("broker", "server_lost_s"): server_lost,
        ("broker", "loop"): loop,
        ("log", "format"): log_format,
        ("log", "level"): log_level,
    }
    with reporting("broker"):
        settings = _load(flags, config)
        from zkv_cli.roles import run_broker

        raise SystemExit(run_broker(settings))


@app.command()
def server(
    broker: o.Join = None,
    bind: Annotated[
        str | None,
        typer.Option(
            "--bind", help="Where it takes data (default: tcp://127.0.0.1:0, a free port)."
        ),
    ] = None,
    advertise: o.Advertise = None,
    name: Annotated[
        str | None, typer.Option("--name", help="Its name in messages (default: host and pid).")
    ] = None,
    budget: o.Budget = None,
    connect_timeout: Annotated[
        float | None,
        typer.Option("--connect-timeout", help="How long to wait for the broker, in seconds."),
    ] = None,
    broker_lost: Annotated[
        float | None,
        typer.Option("--broker-lost", help="Silence that makes the broker lost, in seconds."),
    ] = None,
    record: o.Record = None,
    insecure: o.Insecure = None,
    loop: o.Loop = None,
    config: o.Config = None,
    log_format: o.LogFormat = None,
    log_level: o.LogLevel = None,
) -> None:
    """Run a server: it holds a shard of the model and joins a broker."""
    flags = {
        ("join", "broker"): broker,
        ("server", "bind"): bind,
        ("server", "advertise"): advertise,
        ("server", "name"): name,
        ("server", "budget"): budget,
        ("server", "connect_timeout_s"): connect_timeout,
        ("server", "broker_lost_s"): broker_lost,
        ("server", "record"): record,
        ("server", "insecure"): insecure,
        ("server", "loop"): loop,
        ("log", "format"): log_format,
        ("log", "level"): log_level,
    }
    with reporting("server"):
        settings = _load(flags, config)
        address = _broker_named(settings)
        from zkv_cli.roles import run_server

        raise SystemExit(run_server(settings, address))


@app.command()
def up(
    servers: o.Servers = None,
    policy: o.Policy = None,
    optimizer: o.Optimizer = None,
    staleness: o.Staleness = None,
    min_workers: o.MinWorkers = None,
    on_short: o.OnShort = None,
    record: o.Record = None,
    workers: o.Workers = None,
    bind: o.BrokerBind = None,
    advertise: o.Advertise = None,
    insecure: o.Insecure = None,
    worker_lost: o.WorkerLost = None,
    server_lost: o.ServerLost = None,
    budget: o.Budget = None,
    loop: o.Loop = None,
    config: o.Config = None,
    log_format: o.LogFormat = None,
    log_level: o.LogLevel = None,
) -> None:
    """Run a broker and its servers on this machine, until Ctrl-C, and print how to join them."""
    flags = _cluster_flags(
        servers, policy, optimizer, staleness, record, workers, bind, advertise, insecure
    )
    flags |= {
        ("broker", "min_workers"): min_workers,
        ("broker", "on_short"): on_short,
        ("broker", "worker_lost_s"): worker_lost,
        ("broker", "server_lost_s"): server_lost,
        ("server", "budget"): budget,
        ("broker", "loop"): loop,
        ("server", "loop"): loop,
        ("log", "format"): log_format,
        ("log", "level"): log_level,
    }
    with reporting("up"):
        settings = _load(flags, config)
        from zkv_cli.launch import run_up

        raise SystemExit(run_up(settings))


def _cluster_flags(
    servers: int | None,
    policy: str | None,
    optimizer: str | None,
    staleness: str | None,
    record: str | None,
    workers: int | None,
    bind: str | None,
    advertise: str | None,
    insecure: bool | None,
) -> dict[tuple[str, str], Any]:
    return {
        ("broker", "servers"): servers,
        ("broker", "policy"): policy,
        ("broker", "optimizer"): optimizer,
        ("broker", "staleness"): staleness,
        ("broker", "record"): record,
        ("broker", "workers"): workers,
        ("broker", "bind"): bind,
        ("broker", "advertise"): advertise,
        ("broker", "insecure"): insecure,
    }


@app.command(context_settings={"allow_interspersed_args": False})
def run(
    command: Annotated[
        list[str],
        typer.Argument(metavar="COMMAND...", help="A .py file or a program, and its arguments."),
    ],
    count: o.Count = 1,
    broker: o.JoinOrStart = None,
    first_rank: o.FirstRank = 0,
    world: o.World = None,
    report: o.Report = False,
    as_json: o.ReportJson = False,
    report_dir: o.ReportDir = None,
    grace: o.Grace = None,
    narrate_after: o.NarrateAfter = None,
    stall_timeout: o.StallTimeout = None,
    servers: o.Servers = None,
    policy: o.Policy = None,
    optimizer: o.Optimizer = None,
    staleness: o.Staleness = None,
    min_workers: o.MinWorkers = None,
    on_short: o.OnShort = None,
    record: o.Record = None,
    bind: o.BrokerBind = None,
    advertise: o.Advertise = None,
    insecure: o.Insecure = None,
    config: o.Config = None,
    log_format: o.LogFormat = None,
    log_level: o.LogLevel = None,
) -> None:
    """Run workers, and a broker with servers for them unless a broker is named."""
    flags = _cluster_flags(
        servers, policy, optimizer, staleness, record, None, bind, advertise, insecure
    )
    flags |= {
        ("broker", "min_workers"): min_workers,
        ("broker", "on_short"): on_short,
        ("join", "broker"): broker,
        ("run", "grace_s"): grace,
        ("run", "narrate_after_s"): narrate_after,
        ("run", "stall_timeout_s"): stall_timeout,
        ("log", "format"): log_format,
        ("log", "level"): log_level,
    }
    with reporting("run"):
        settings = _load(flags, config)
        from zkv_cli.launch import Job, run_job

        all_ = world or first_rank + count
        job = Job(tuple(command), count, first_rank, all_, report_dir, report or as_json, as_json)
        raise SystemExit(run_job(settings, job))


Timeout = Annotated[
    float, typer.Option("--timeout", min=0.001, help="How long to wait for an answer, in seconds.")
]


@app.command()
def status(
    broker: o.Asked = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    timeout: Timeout = 5.0,
    config: o.Config = None,
) -> None:
    """Say how a cluster stands: policy, version, servers, workers and what each waits for."""
    with reporting("status"):
        address = _broker_asked(_load({("join", "broker"): broker}, config))
        from zkv_cli.ask import ask_status
        from zkv_cli.tables import as_text

        plain = ask_status(address, timeout)
        if as_json:
            import json

            typer.echo(json.dumps(plain, ensure_ascii=False, indent=2))
        else:
            typer.echo(as_text(plain))


@app.command(name="set")
def set_(
    changes: Annotated[
        list[str], typer.Argument(metavar="NAME=VALUE...", help="Such as lr=0.01 or policy=ssp:2.")
    ],
    broker: o.Asked = None,
    timeout: Timeout = 5.0,
    config: o.Config = None,
) -> None:
    """Change settings of a cluster that runs, each from the version on that is printed."""
    with reporting("set"):
        from zkv_cli.ask import ask_change
        from zkv_cli.settings import live_changes

        pairs = live_changes(changes)
        address = _broker_asked(_load({("join", "broker"): broker}, config))
        for name, value in pairs:
            version = ask_change(address, name, value, timeout)
            typer.echo(f"{name}={value} from version {version} on")


@app.command()
def export(
    file: Annotated[Path, typer.Argument(help="The safetensors file to write.")],
    broker: o.Asked = None,
    timeout: Timeout = 60.0,
    config: o.Config = None,
) -> None:
    """Write one whole version of the model as a safetensors file.

    Integer keys are written as "int:7"; a text key that begins with "int:" or "str:" gets "str:" in
    front. The file is complete or not there: it is renamed once it is written.
    """
    with reporting("export"):
        address = _broker_asked(_load({("join", "broker"): broker}, config))
        from zkv_cli.export import write_model

        version, keys, size = write_model(address, file, timeout)
        typer.echo(f"{file}: version {version}, {keys} keys, {size} bytes")


app.command()(simulate)
