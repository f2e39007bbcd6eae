"""`zkv simulate`: which policy suits which workers, found out before any machine is rented.

Reads the options, lets `zkv.simulator` run each policy under a virtual clock, and prints what came
of it. It starts no process and asks no cluster. What takes time to import is imported when the
command runs, so that `zkv --help` answers at once.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from zkv.errors import ConfigError
from zkv_cli import simulate_samples as sampling
from zkv_cli import simulate_training as training
from zkv_cli.exits import reporting, say

if TYPE_CHECKING:
    from zkv.compute_times import ComputeTimes, Time
    from zkv.network_model import Network
    from zkv.policy import SyncPolicy
    from zkv.sample_shares import Assignment

_BANDWIDTH = re.compile(r"([0-9.]+(?:e[0-9]+)?)\s*([kMGT]?)(?:bit(?:/s|ps)?)?", re.ASCII)
_PREFIX = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}

Compute = Annotated[
    str | None,
    typer.Option(
        "--compute",
        help="Compute time of each worker: 2,5,7 or 64*exp:mean=1, lognormal:mean=1,sigma=0.5, "
        "gamma:mean=1,shape=4; 3/3/9 takes these in turn.",
    ),
]
TraceFile = Annotated[
    Path | None,
    typer.Option(
        "--trace",
        help="Compute times of a live run: the folder of zkv run --record, or JSON lines: "
        '{"worker": 0, "batch": 1, "compute_s": 0.12}.',
    ),
]
Policies = Annotated[
    list[str] | None,
    typer.Option("--policy", help="bsp, asp, ssp:S, k-bsp:K, ...; may be given several times."),
]
Compare = Annotated[
    bool, typer.Option("--compare", help="All seven policies (also when none is named).")
]
K = Annotated[
    int | None,
    typer.Option("--k", help="k of the policies compared (default: three of four workers)."),
]
Slack = Annotated[int, typer.Option("--slack", help="Slack of the ssp compared.")]
Until = Annotated[str | None, typer.Option("--until", help="Simulate through this time.")]
Updates = Annotated[
    int | None, typer.Option("--updates", help="Stop at this update, if it comes sooner.")
]
Seed = Annotated[int, typer.Option("--seed", help="Of random compute times and orders.")]
Bandwidth = Annotated[
    str | None, typer.Option("--bandwidth", help="Of a link, such as 10Gbit/s (default: no limit).")
]
Latency = Annotated[str, typer.Option("--latency", help="Of each pull and push, in seconds.")]
Up = Annotated[str, typer.Option("--up", help="Bytes of a push before the codec, as in 400MB.")]
Down = Annotated[str, typer.Option("--down", help="Bytes of a pull.")]
Density = Annotated[
    str, typer.Option("--density", help="Share of a push's bytes that the codec leaves.")
]
UpdateTime = Annotated[str, typer.Option("--update-time", help="Server time of an update.")]
Shared = Annotated[
    bool, typer.Option("--shared/--separate", help="All workers on one link, or each on its own.")
]
Overlap = Annotated[
    bool,
    typer.Option("--overlap/--serial", help="Transfers beside computing, or before and after."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Plot = Annotated[
    Path | None, typer.Option("--plot", help="Write what each worker did when as a PNG.")
]


def simulate(
    compute: Compute = None,
    trace: TraceFile = None,
    policy: Policies = None,
    compare: Compare = False,
    k: K = None,
    slack: Slack = 1,
    until: Until = None,
    updates: Updates = None,
    seed: Seed = 0,
    bandwidth: Bandwidth = None,
    latency: Latency = "0",
    up: Up = "0",
    down: Down = "0",
    density: Density = "1",
    update_time: UpdateTime = "0",
    shared: Shared = False,
    overlap: Overlap = False,
    train: training.Train = None,
    target: training.Target = None,
    seeds: training.Seeds = None,
    optimizer: training.Optimizer = None,
    staleness: training.Staleness = None,
    passes: training.Passes = None,
    samples: sampling.Samples = None,
    batch: sampling.Batch = None,
    assign: sampling.Assign = None,
    as_json: AsJson = False,
    plot: Plot = None,
) -> None:
    """Run policies under a virtual clock: updates, waiting, staleness and bytes of each.

    Times are in seconds, or in any unit where nothing is transferred. Without --policy all seven
    policies are compared. With --train the model is trained too, until it is good enough. With
    --samples, how often each sample gets into the model, and from which worker.
    """
    with reporting("simulate"):
        _check_plot(plot)
        try:
            asked = training.Asked(train, target, seeds, optimizer, staleness, passes)
            assignment = sampling.Asked(samples, batch, assign, train).assignment(seed)
            times, warnings = read_times(compute, trace, seed)
            policies = chosen(policy or [], compare or not policy, k, slack, len(times.workers))
            figures = {"bandwidth": bandwidth, "latency": latency, "up": up, "down": down}
            figures |= {"density": density, "update-time": update_time}
            network = read_network(figures, shared, overlap)
            end = None if until is None else option("until", until)
            run = (policies, times, network, end, updates, plot is not None)
            shares: list[Any] = []
            found: list[Any] = []
            if train:
                reports, found = train_each(asked, *run)
            else:
                reports, shares = run_all(*run, assignment)
        except (ValueError, ModuleNotFoundError) as error:
            raise ConfigError(str(error)) from error
        show(reports, warnings, as_json, plot, found, shares)


def _check_plot(plot: Path | None) -> None:
    if plot is not None and (plot.is_dir() or not plot.absolute().parent.is_dir()):
        raise ConfigError(f"--plot {plot}: give a file in a folder that exists, as in run.png")


def read_times(
    compute: str | None, trace: Path | None, seed: int
) -> tuple[ComputeTimes, tuple[str, ...]]:
    """Return the compute times of --compute or --trace, and warnings about the file.

    A trace is a folder of recordings, one recording (.rec), or a file of JSON lines. Raises
    ValueError unless exactly one is given and can be read, ProtocolError for a recording that is
    none, OSError if there is no file.
    """
    from zkv.compute_times import FORMS, compute_times, read_trace

    if (compute is None) == (trace is None):
        raise ValueError(
            f"give either --compute, such as {'; '.join(FORMS)}, or --trace FILE (or a folder)"
        )
    if compute is not None:
        return compute_times(compute, seed=seed), ()
    assert trace is not None
    if trace.is_dir() or trace.suffix == ".rec":
        from zkv_brokers.recorded_times import recorded_times

        recorded, torn = recorded_times(trace)
        return replace(recorded, seed=seed), torn
    # A tear may go through a character; whether the line is whole is the reader's to say.
    times, warnings = read_trace(trace.read_text("utf-8", errors="replace"), name=str(trace))
    return replace(times, seed=seed), warnings


def chosen(
    texts: list[str], compare: bool, k: int | None, slack: int, workers: int
) -> list[SyncPolicy]:
    """Return the policies named, and all seven if they are compared, each once.

    Raises ValueError that lists the valid forms.
    """
    from zkv.policy import FORMS, policy

    policies = [policy(text) for text in texts]
    if compare:
        number = {"K": max(1, 3 * workers // 4) if k is None else k, "S": slack}
        for form in FORMS:
            name, colon, letter = form.partition(":")
            policies.append(policy(f"{name}:{number[letter]}" if colon else name))
    return list(dict.fromkeys(policies))


def option(name: str, text: str) -> Time:
    """Return the number that an option was given; ValueError names the option."""
    from zkv.compute_times import exact

    try:
        return exact(text)
    except ValueError as error:
        raise ValueError(f"--{name}: {error}") from error


def read_network(given: dict[str, str | None], shared: bool, overlap: bool) -> Network:
    """Return the communication model of these options; ValueError names the guilty one."""
    from zkv.network_model import Network
    from zkv_cli.settings import size

    figures: dict[str, Any] = {}
    for name in ("latency", "density", "update-time"):
        figures[name] = option(name, given[name] or "0")
    for name in ("up", "down"):
        try:
            figures[name] = size(given[name])
        except ValueError as error:
            raise ValueError(f"--{name}: {error}") from error
    bits_per_s: Time | None = None
    if given["bandwidth"] is not None:
        match = _BANDWIDTH.fullmatch(given["bandwidth"].strip())
        if match is None:
            raise ValueError(
                f"--bandwidth: {given['bandwidth'][:40]!r} is none of 10Gbit/s, 200M, 1e9"
            )
        bits_per_s = option("bandwidth", match[1]) * _PREFIX[match[2]]
    return Network(
        bits_per_s=bits_per_s,
        latency_s=figures["latency"],
        bytes_up=figures["up"],
        bytes_down=figures["down"],
        density=figures["density"],
        update_s=figures["update-time"],
        shared=shared,
        overlap=overlap,
    )


def run_all(
    policies: list[SyncPolicy],
    times: ComputeTimes,
    network: Network,
    until: Time | None,
    updates: int | None,
    trace: bool,
    assignment: Assignment | None = None,
) -> tuple[list[Any], list[Any]]:
    """Simulate each policy with the same compute times; returns a report for each.

    Beside them, what became of the samples under each, if they are assigned.

    Raises ValueError if no end is given, or one that is not above 0, or what an assignment raises.
    """
    from zkv.sample_shares import SampleShares
    from zkv.simulator import Simulation

    if until is None and updates is None:
        raise ValueError("give an end: --until TIME, --updates N, or both")
    _check_end(until, updates)
    reports: list[Any] = []
    found: list[Any] = []
    for policy in policies:
        shares = None if assignment is None else SampleShares(assignment, times.workers)
        listener = None if shares is None else shares.hear
        run = Simulation(policy, times, network=network, trace=trace, listener=listener)
        reports.append(run.run(until=until, updates=updates).report())
        if shares is not None:
            found.append(shares.report())
    return reports, found


def train_each(
    asked: training.Asked,
    policies: list[SyncPolicy],
    times: ComputeTimes,
    network: Network,
    until: Time | None,
    updates: int | None,
    trace: bool,
) -> tuple[list[Any], list[Any]]:
    """Train each policy with each seed; returns the first seed's reports, and times to target.

    Raises what `zkv_cli.simulate_training.train_all` raises, and ValueError for a wrong end.
    """
    from zkv.simulated_training import PASSES_DEFAULT, Limits

    _check_end(until, updates)
    limits = Limits(asked.passes or PASSES_DEFAULT, until, updates)
    return training.train_all(asked, policies, times, network, limits, trace)


def _check_end(until: Time | None, updates: int | None) -> None:
    if until is not None and until <= 0:
        raise ValueError(f"--until must be above 0, given {until}")
    if updates is not None and updates < 1:
        raise ValueError(f"--updates must be at least 1, given {updates}")


def show(
    reports: list[Any],
    warnings: tuple[str, ...],
    as_json: bool,
    plot: Path | None,
    found: list[Any],
    shares: list[Any],
) -> None:
    """Print the reports, and their warnings on standard error; write the picture.

    `found` has the time to target of each report's policy, where they were trained, and `shares`
    what became of the samples, where they were assigned.
    """
    from zkv.simulation_report import to_plain
    from zkv_cli import simulation_views as views

    for warning in (*warnings, *(text for report in reports for text in report.warnings)):
        say(f"zkv simulate: warning: {warning}", error=True)
    if plot is not None:
        try:
            views.write_plot(reports, plot)
        except ModuleNotFoundError as error:
            raise ConfigError(str(error)) from error
    if as_json:
        runs = [to_plain(report) for report in reports]
        for run, one in zip(runs, found, strict=False):
            run["time_to_target"] = one.to_plain()
        for run, one in zip(runs, shares, strict=False):
            run["samples"] = one.to_plain()
        say(json.dumps({"policies": runs, "warnings": list(warnings)}, ensure_ascii=False))
    elif len(reports) == 1:
        say(views.as_text(reports[0]))
    else:
        say(views.comparison(reports))
    if found and not as_json:
        say("\n" + training.as_text(found))
    if shares and not as_json:
        say("\n" + sampling.as_text([report.policy for report in reports], shares))
