"""`zkv plan advise`: what a run's time went into, and what each remedy would gain.

Reads the JSON of a run and prints what `zkv.advice` says of it; it must have no formula of its own.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from zkv.errors import ConfigError
from zkv_cli.exits import reporting, say

Run = Annotated[str, typer.Argument(metavar="RUN", help="JSON of `zkv run --json`; - reads it.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON; units stand in the names.")]


def advise(run: Run, as_json: Json = False) -> None:
    """Name a run's largest cost, and what each remedy gains."""
    with reporting("plan advise"):
        from zkv.advice import advise as advice_of
        from zkv.advice import lines
        from zkv.run_times import run_times

        plain = _read(run)
        try:
            advice = advice_of(run_times(plain))
        except ValueError as error:
            raise ConfigError(f"{run}: {error}") from error
        if as_json:
            say(json.dumps(advice.to_plain(), ensure_ascii=False, indent=2, allow_nan=False))
        else:
            say("\n".join(lines(advice)))


def _read(run: str) -> Any:
    try:
        text = sys.stdin.read() if run == "-" else Path(run).read_text("utf-8")
        return json.loads(text)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{run} cannot be read: {error}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{run} is no JSON: {str(error)[:100]}") from error
