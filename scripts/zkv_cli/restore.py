"""`zkv restore`: have a cluster that runs go back to one of its snapshots."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from zkv_cli import options as o
from zkv_cli.exits import reporting, say
from zkv_cli.loading import Json, broker_asked, load

Wait = Annotated[
    float, typer.Option("--timeout", min=0.001, help="How long to wait until it is so, in seconds.")
]
Name = Annotated[
    str,
    typer.Argument(
        metavar="NAME",
        help="The snapshot, as zkv snapshot list has it (default: the newest whole one).",
        show_default=False,
    ),
]


@o.sets(join=(o.ASKED,))
def restore(
    flags: o.Flags,
    name: Name = "",
    as_json: Json = False,
    timeout: Wait = 120.0,
    config: o.Config = None,
) -> None:
    """Have a cluster that runs go back to a snapshot: servers and workers, all together.

    Updates after it are lost. Workers are told (zkv.RolledBack) and go on from there. A snapshot
    that is torn, or of another run, is refused before anything is touched.
    """
    with reporting("restore"):
        from zkv import control as c
        from zkv_cli.ask import TOKEN, ask

        asked = c.GoBack(TOKEN, name.rstrip("/").rpartition("/")[2])
        told: dict[str, Any] = ask(broker_asked(load(flags, config)), asked, timeout)
        text = f"back at version {told['version']}, {told['url']}/{told['name']}"
        text += f": {told['undone']} updates after it are lost"
        say(json.dumps(told, ensure_ascii=False) if as_json else text)
