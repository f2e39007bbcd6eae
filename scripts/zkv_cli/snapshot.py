"""`zkv snapshot`: take one of a cluster that runs, and say what is in those that there are."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from zkv_cli import options as o
from zkv_cli.exits import reporting, say
from zkv_cli.loading import Json, broker_asked, load

app = typer.Typer(name="snapshot", rich_markup_mode=None, pretty_exceptions_enable=False)

Wait = Annotated[
    float,
    typer.Option("--timeout", min=0.001, help="How long to wait until it exists, in seconds."),
]
Where = Annotated[
    str, typer.Argument(metavar="FOLDER", help="Where snapshots are: a folder, or an URL.")
]
Check = Annotated[
    bool, typer.Option("--check", help="Read every file, and compare it with what was written.")
]


@app.callback(invoke_without_command=True)
@o.sets(join=(o.ASKED,))
def take(
    context: typer.Context,
    flags: o.Flags,
    as_json: Json = False,
    timeout: Wait = 120.0,
    config: o.Config = None,
) -> None:
    """Take a snapshot of a cluster that runs, into its --snapshot-dir. Or list, show: below."""
    if context.invoked_subcommand is not None:
        return
    with reporting("snapshot"):
        from zkv import control as c
        from zkv_cli.ask import TOKEN, ask
        from zkv_cli.report import bytes_text

        told: dict[str, Any] = ask(
            broker_asked(load(flags, config)), c.TakeSnapshot(TOKEN), timeout
        )
        size = bytes_text(told["bytes"])
        text = (
            f"{told['url']}/{told['name']}: version {told['version']}, {size} in "
            f"{told['took_s']:g} s"
        )
        say(json.dumps(told, ensure_ascii=False) if as_json else text)


@app.command(name="list")
def list_(folder: Where, as_json: Json = False, check: Check = False) -> None:
    """Say which snapshots are in a folder, the newest first."""
    with reporting("snapshot list"):
        from zkv_cli import snapshot_report

        say(snapshot_report.listed(folder, as_json=as_json, check=check))


@app.command()
def show(folder: Where, as_json: Json = False, check: Check = False) -> None:
    """Say what is in one snapshot: FOLDER/NAME, or the newest of FOLDER."""
    with reporting("snapshot show"):
        from zkv_cli import snapshot_report

        say(snapshot_report.shown(folder, as_json=as_json, check=check))
