"""Lets `python -m zkv_cli` stand for the `zkv` command: launchers start their children that way."""

from __future__ import annotations

from zkv_cli.main import app

if __name__ == "__main__":
    app(prog_name="zkv")
