"""`zkv trace run`: a run, and one file in which everybody's spans are seen beside each other."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated

import typer

from zkv_cli import options as o
from zkv_cli.exits import reporting

app = typer.Typer(
    name="trace",
    help="See what every worker, server and the broker did, and when.",
    no_args_is_help=True,
)
Output = Annotated[
    Path, typer.Option("--output", "-o", help="The file for ui.perfetto.dev or chrome://tracing.")
]


@app.callback()
def _main() -> None:
    return


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
    output: Output = Path("zkv-trace.json"),
    config: o.Config = None,
) -> None:
    """Run workers as `zkv run` does, and leave a trace that Perfetto and Chrome show."""
    with reporting("trace run"):
        from zkv_cli import logs, settings, trace_file
        from zkv_cli.launch import Job, run_job

        loaded = settings.load(flags, config)
        logs.set_up(loaded.log.format, loaded.log.level)
        trace_file.check_writable(output)
        all_ = world or first_rank + count
        code = 1
        with tempfile.TemporaryDirectory(prefix="zkv-trace-") as folder:
            told = (report_dir, report or as_json, as_json)
            job = Job(tuple(command), count, first_rank, all_, *told, trace=Path(folder))
            servers = 0 if loaded.join.broker is not None else loaded.broker.servers
            try:
                code = run_job(loaded, job)
            finally:
                trace_file.finish(Path(folder), output, job.ranks, servers, silent=as_json)
        raise SystemExit(code)
