"""`zkv replay`: recorded brokers and servers live again, and must end with the same bits."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from zkv_cli.exits import CommandFailed, reporting, say


def replay(
    recordings: Annotated[
        list[Path], typer.Argument(help="Recordings (.rec), or folders of them.", exists=True)
    ],
    check: Annotated[
        bool, typer.Option("--check", help="Fail unless each ends with the recorded digest.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Replay what `--record DIR` has written, in one process, bit for bit."""
    with reporting("replay"):
        from zkv_brokers.replay import replay as live_again

        files = _files(recordings)
        lives = {str(path): live_again(path) for path in files}
        if as_json:
            plain = {path: {**asdict(life), "same": life.same} for path, life in lives.items()}
            say(json.dumps({"recordings": plain}))
        else:
            for path, life in lives.items():
                end = "the same bits" if life.same else _difference(life.recorded)
                say(
                    f"{path}: {life.role}, {life.events} events, {life.entries} log entries, "
                    f"version {life.version}: {end}"
                )
        wrong = [path for path, life in lives.items() if not life.same]
        if check and wrong:
            raise CommandFailed(f"not the recorded bits: {', '.join(wrong)}")


def _difference(recorded: str | None) -> str:
    return "the recording breaks off" if recorded is None else "OTHER BITS than were recorded"


def _files(given: list[Path]) -> list[Path]:
    files = [
        file for path in given for file in (sorted(path.glob("*.rec")) if path.is_dir() else [path])
    ]
    if not files:
        raise CommandFailed(f"no recording (*.rec) in {', '.join(map(str, given))}")
    return files
