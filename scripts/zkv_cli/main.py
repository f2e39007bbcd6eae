"""The `zkv` command: what can be typed. Each command checks its settings and calls the one module
that does the work, imported only then, so that `zkv --help` answers at once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from zkv_cli import options as o
from zkv_cli import plan
from zkv_cli.advise import advise
from zkv_cli.bench import bench
from zkv_cli.exits import EPILOG, reporting
from zkv_cli.keys import app as keys_app
from zkv_cli.loading import Json, Timeout, broker_asked, broker_named, load
from zkv_cli.plan_placement import placement
from zkv_cli.plan_topology import topology
from zkv_cli.replay import replay
from zkv_cli.restore import restore
from zkv_cli.simulate import simulate
from zkv_cli.snapshot import app as snapshot
from zkv_cli.trace import app as trace

app = typer.Typer(
    name="zkv",
    help="A parameter server over ZeroMQ: workers push gradients, servers hold the model, "
    "a broker keeps the order.",
    epilog=EPILOG,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
plan.app.command()(placement)
plan.app.command()(topology)
plan.app.command()(advise)
app.add_typer(plan.app)
app.add_typer(trace)
app.add_typer(keys_app)
app.add_typer(snapshot)
app.command()(replay)
app.command()(restore)


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
@o.sets(
    broker=(
        *(o.BROKER_BIND, o.DATA_BIND, o.ADVERTISE, o.SERVERS, o.WORKERS, *o.TRAINING),
        *(*o.SNAPSHOTS, o.JOURNAL, o.RECORD, o.INSECURE, *o.LOST, *o.LIMITS),
        *(*o.DATA_SOCKETS, o.LOOP),
    ),
    join=(o.KEYS,),
    log=o.LOG,
)
def broker(flags: o.Flags, config: o.Config = None) -> None:
    """Run a broker: it lets members in, and decides when contributions become an update."""
    with reporting("broker"):
        settings = load(flags, config)
        from zkv_cli.roles import run_broker

        raise SystemExit(run_broker(settings))


def _serve(command: str, flags: o.Flags, config: Path | None, *, joins: bool) -> None:
    with reporting(command):
        settings = load(flags, config)
        address = broker_named(settings)
        from zkv_cli.roles import run_server

        raise SystemExit(run_server(settings, address, joins=joins))


server_app = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False)
app.add_typer(server_app, name="server")


@server_app.callback(invoke_without_command=True)
@o.sets(**o.SERVER)
def server(context: typer.Context, flags: o.Flags, config: o.Config = None) -> None:
    """Run a server: it holds a shard of the model and joins a broker. Or add, drain: below."""
    if context.invoked_subcommand is None:
        _serve("server", flags, config, joins=False)
    elif any(one is not None for one in flags.values()):
        raise typer.BadParameter("options go behind the command: zkv server add --broker ...")


@server_app.command(name="add")
@o.sets(**o.SERVER)
def server_add(flags: o.Flags, config: o.Config = None) -> None:
    """Run one more server for a cluster that runs: it gets its share while workers train."""
    _serve("server add", flags, config, joins=True)


Wait = Annotated[
    float, typer.Option("--wait", min=0.0, help="How long to wait for the moves, in seconds.")
]
Dry = Annotated[bool, typer.Option("--dry-run", help="Say what would move, and move nothing.")]


@server_app.command(name="drain")
@o.sets(join=o.ASKING)
def server_drain(
    flags: o.Flags,
    server: Annotated[str, typer.Argument(help="Its number or name, as zkv status has them.")],
    dry_run: Dry = False,
    as_json: Json = False,
    timeout: Timeout = 5.0,
    wait: Wait = 120.0,
    config: o.Config = None,
) -> None:
    """Move all that a server holds to the others while workers train; then it ends, with 0."""
    with reporting("server drain"):
        address = broker_asked(load(flags, config))
        from zkv_cli import moves

        asked = moves.request("drain", server, dry=dry_run)
        moves.run(address, asked, as_json=as_json, timeout_s=timeout, wait_s=wait, measure_s=0.0)


@app.command()
@o.sets(join=o.ASKING)
def rebalance(
    flags: o.Flags,
    keys: Annotated[
        list[str] | None,
        typer.Option("--move", help="Move keys instead: PATTERN=SERVER, a number or a name."),
    ] = None,
    dry_run: Dry = False,
    as_json: Json = False,
    timeout: Timeout = 5.0,
    wait: Wait = 120.0,
    measure: Annotated[
        float, typer.Option(min=0.0, help="How long to measure afterwards, in seconds.")
    ] = 3.0,
    config: o.Config = None,
) -> None:
    """Move blocks from busy servers to idle ones, by measured load, while workers train.

    The placement's pins, groups and limits hold. Updates go on meanwhile, and are the same to the
    bit.
    """
    with reporting("rebalance"):
        address = broker_asked(load(flags, config))
        from zkv_cli import moves

        for asked in moves.requests(keys or [], dry=dry_run):
            moves.run(
                address,
                asked,
                as_json=as_json,
                timeout_s=timeout,
                wait_s=wait,
                measure_s=measure,
            )


@app.command()
@o.sets(
    broker=(
        *(o.SERVERS, *o.TRAINING, *o.SNAPSHOTS, o.RECORD, o.WORKERS, o.BROKER_BIND, o.ADVERTISE),
        *(o.INSECURE, *o.LOST, *o.LIMITS, *o.DATA_SOCKETS, o.LOOP),
    ),
    server=(o.BUDGET, o.SHARED, *o.PORT_LIMITS, *o.DATA_SOCKETS, o.LOOP),
    join=(o.KEYS,),
    log=o.LOG,
)
def up(flags: o.Flags, config: o.Config = None) -> None:
    """Run a broker and its servers on this machine, until Ctrl-C, and print how to join them."""
    with reporting("up"):
        settings = load(flags, config)
        from zkv_cli.launch import run_up

        raise SystemExit(run_up(settings))


@app.command(context_settings={"allow_interspersed_args": False})
@o.sets(**o.JOB)
def run(
    flags: o.Flags,
    command: o.Command,
    count: o.Count = 1,
    first_rank: o.FirstRank = 0,
    world: o.World = None,
    report: o.Report = False,
    as_json: o.AsJson = False,
    report_dir: o.ReportDir = None,
    config: o.Config = None,
) -> None:
    """Run workers, and a broker with servers for them unless a broker is named."""
    with reporting("run"):
        settings = load(flags, config)
        from zkv_cli.launch import Job, run_job

        all_ = world or first_rank + count
        job = Job(tuple(command), count, first_rank, all_, report_dir, report or as_json, as_json)
        raise SystemExit(run_job(settings, job))


@app.command()
@o.sets(join=o.ASKING)
def status(
    flags: o.Flags,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    timeout: Timeout = 5.0,
    config: o.Config = None,
) -> None:
    """Say how a cluster stands: policy, version, servers, workers and what each waits for."""
    with reporting("status"):
        address = broker_asked(load(flags, config))
        from zkv_cli.ask import ask_status
        from zkv_cli.tables import as_text

        plain = ask_status(address, timeout)
        if as_json:
            import json

            typer.echo(json.dumps(plain, ensure_ascii=False, indent=2))
        else:
            typer.echo(as_text(plain))


@app.command()
@o.sets(join=o.ASKING)
def doctor(flags: o.Flags, as_json: Json = False, config: o.Config = None) -> None:
    """Look what is in the way between this machine and a broker, and say what to do.

    Names, ports, handshakes, versions, clocks, each server's address, what links carry, limits of
    this machine. It changes nothing and joins nothing. Exit code 1 if a check has failed.
    """
    with reporting("doctor"):
        address = broker_asked(load(flags, config))
        from zkv_cli.doctor import run as examine

        raise SystemExit(0 if examine(address, as_json=as_json) else 1)


@app.command(name="set")
@o.sets(join=o.ASKING)
def set_(
    flags: o.Flags,
    changes: Annotated[
        list[str], typer.Argument(metavar="NAME=VALUE...", help="Such as lr=0.01 or policy=ssp:2.")
    ],
    timeout: Timeout = 5.0,
    config: o.Config = None,
) -> None:
    """Change settings of a cluster that runs, each from the version on that is printed."""
    with reporting("set"):
        from zkv_cli.ask import ask_change
        from zkv_cli.settings import live_changes

        pairs = live_changes(changes)
        address = broker_asked(load(flags, config))
        for name, value in pairs:
            version = ask_change(address, name, value, timeout)
            typer.echo(f"{name}={value} from version {version} on")


@app.command()
@o.sets(join=o.ASKING)
def export(
    flags: o.Flags,
    file: Annotated[Path, typer.Argument(help="The safetensors file to write.")],
    timeout: Timeout = 60.0,
    config: o.Config = None,
) -> None:
    """Write one whole version of the model as a safetensors file.

    Integer keys are written as "int:7"; a text key that begins with "int:" or "str:" gets "str:" in
    front. Of a table there are the numbers of its rows and their values, as NAME.ids and NAME.rows.
    The file is complete or not there: it is renamed once it is written.
    """
    with reporting("export"):
        address = broker_asked(load(flags, config))
        from zkv_cli.export import write_model

        version, keys, size = write_model(address, file, timeout)
        typer.echo(f"{file}: version {version}, {keys} keys, {size} bytes")


app.command()(simulate)
app.command()(bench)
