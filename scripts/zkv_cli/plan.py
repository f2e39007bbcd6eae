"""`zkv plan`: the calculators of `zkv.costs` and `zkv.aggregation_costs` on the command line.

Each command reads quantities with units, and prints the formulas with the numbers filled in, or the
figures as JSON with units in their names. It must have no formula of its own, nor ask a cluster.
What calculates is imported only in the commands, so that `zkv --help` answers at once.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Annotated, Any

import typer

from zkv.errors import ConfigError
from zkv_cli import units as u
from zkv_cli.exits import reporting, say

app = typer.Typer(
    name="plan",
    help="Calculate before renting machines: ideal sizes, times, waits and loads.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

Json = Annotated[bool, typer.Option("--json", help="Print JSON; units stand in the names.")]
Link = Annotated[
    str, typer.Option("--link", help="Speed one way: 10Gb/s, 100Mbit/s (bits), 16GB/s (bytes).")
]
Size = Annotated[str, typer.Option("--size", help="Bytes of one gradient, such as 400MB.")]


@contextmanager
def planning(command: str) -> Iterator[None]:
    """Report a wrong input as wrong use: one line, exit code 2."""
    with reporting(f"plan {command}"):
        try:
            yield
        except ValueError as error:
            raise ConfigError(str(error)) from error


def tell(figures: Mapping[str, Any], lines: Sequence[tuple[str, str]], as_json: bool) -> None:
    """Print the figures as JSON, or the lines (what, formula) as one block."""
    if as_json:
        say(json.dumps(figures, ensure_ascii=False, indent=2, allow_nan=False))
        return
    width = max(len(what) for what, _ in lines)
    say("\n".join(f"{what.ljust(width)}  {formula}" for what, formula in lines))


@app.command()
def transfer(
    entries: Annotated[str, typer.Option("--entries", help="Entries of a gradient: 100M.")],
    link: Link,
    bits: Annotated[str, typer.Option("--bits", help="Bits for each value: 32, 8, 1.6.")] = "32",
    density: Annotated[
        str, typer.Option("--density", help="Share of the entries that is sent: 0.01 or 1%.")
    ] = "1",
    index_bits: Annotated[
        str, typer.Option("--index-bits", help="Bits for each position, if some are left out.")
    ] = "32",
    scale_bytes: Annotated[
        str, typer.Option("--scale-bytes", help="Bytes of scales, all together.")
    ] = "0",
    as_json: Json = False,
) -> None:
    """Size of an encoded gradient, and its time on a link."""
    with planning("transfer"):
        from zkv import costs

        of = u.option("--entries", u.count, entries)
        speed = u.option("--link", u.bits_per_s, link)
        width = u.option("--bits", u.number, bits)
        share = u.option("--density", u.number, density)
        index = u.option("--index-bits", u.number, index_bits)
        scales = u.option("--scale-bytes", u.size_bytes, scale_bytes)
        size = costs.payload_bytes(of, width, share, index, scales)
        figures = {
            "entries": of,
            "bits_per_value": width,
            "density": share,
            "index_bits": index if share < 1 else 0,
            "scale_bytes": scales,
            "kept_entries": costs.kept_entries(of, share),
            "payload_bytes": size,
            "float32_ratio": costs.float32_ratio(of, size),
            "bits_per_s": speed,
            "transfer_s": costs.transfer_s(size, speed),
        }
        tell(figures, _transfer_lines(figures), as_json)


def _transfer_lines(f: Mapping[str, Any]) -> list[tuple[str, str]]:
    kept, width, size = f["kept_entries"], u.plain(f["bits_per_value"]), u.size_text
    lines = []
    if f["density"] < 1:
        share = u.plain(100 * f["density"])
        lines.append(("entries", f"{share} % of {f['entries']:,} = {kept:,}"))
        width = f"({width} + {u.plain(f['index_bits'])} for its position)"
    scales = f" + {size(f['scale_bytes'])} of scales" if f["scale_bytes"] else ""
    ratio = f"float32 / {u.plain(f['float32_ratio'])}"
    payload = size(f["payload_bytes"])
    return [
        *lines,
        ("payload", f"{kept:,} × {width} bit / 8{scales} = {payload} ({ratio})"),
        (
            "transfer",
            f"{payload} × 8 / {u.bits_text(f['bits_per_s'])} = {u.time_text(f['transfer_s'])}",
        ),
    ]


@app.command()
def ingress(
    size: Size,
    workers: Annotated[int, typer.Option("--workers", help="Workers that push one each.")],
    link: Link,
    servers: Annotated[
        int, typer.Option("--servers", help="Servers that share the load evenly, a link each.")
    ] = 1,
    as_json: Json = False,
) -> None:
    """Time of all workers on one server's link."""
    with planning("ingress"):
        from zkv import costs

        each = u.option("--size", u.size_bytes, size)
        speed = u.option("--link", u.bits_per_s, link)
        taken = costs.server_bytes(each, workers, servers)
        one_s = costs.transfer_s(each, speed)
        all_s = costs.shared_ingress_s(each, workers, speed, servers)
        figures = {
            "size_bytes": each,
            "workers": workers,
            "servers": servers,
            "bits_per_s": speed,
            "one_worker_s": one_s,
            "server_bytes": taken,
            "shared_ingress_s": all_s,
        }
        size_text, speed_text = u.size_text, u.bits_text(speed)
        shared = f" / {servers} servers" if servers > 1 else ""
        lines = [
            ("one worker", f"{size_text(each)} × 8 / {speed_text} = {u.time_text(one_s)}"),
            ("a server", f"{workers} × {size_text(each)}{shared} = {size_text(taken)}"),
            ("all", f"{size_text(taken)} × 8 / {speed_text} = {u.time_text(all_s)}"),
        ]
        tell(figures, lines, as_json)


@app.command()
def overlap(
    compute: Annotated[str, typer.Option("--compute", help="Time to compute: 60ms.")],
    communication: Annotated[
        str, typer.Option("--communication", help="Time to communicate: 40ms.")
    ],
    chunks: Annotated[
        int | None, typer.Option("--chunks", help="Also one batch in so many equal chunks.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Serial against overlapped time of a batch."""
    with planning("overlap"):
        from zkv import costs

        c = u.option("--compute", u.seconds, compute)
        m = u.option("--communication", u.seconds, communication)
        figures = {
            "compute_s": c,
            "communication_s": m,
            "serial_s": costs.serial_s(c, m),
            "overlapped_s": costs.overlapped_s(c, m),
            "exposed_s": costs.exposed_s(c, m),
            "speed_up": costs.overlap_speed_up(c, m),
            "chunks": chunks,
            "pipelined_s": None if chunks is None else costs.pipelined_s(c, m, chunks),
        }
        tell(figures, _overlap_lines(figures), as_json)


def _overlap_lines(f: Mapping[str, Any]) -> list[tuple[str, str]]:
    text = u.time_text
    c, m, n = text(f["compute_s"]), text(f["communication_s"]), f["chunks"]
    serial, overlapped = text(f["serial_s"]), text(f["overlapped_s"])
    lines = [
        ("serial", f"{c} + {m} = {serial}"),
        ("steady state", f"max({c}, {m}) = {overlapped}"),
        ("exposed", f"max(0, {m} − {c}) = {text(f['exposed_s'])}"),
        ("speed-up", f"{serial} / {overlapped} = {u.plain(f['speed_up'])}"),
    ]
    if n is not None:
        whole = f"({c} + {n - 1} × max({c}, {m}) + {m}) / {n} = {text(f['pipelined_s'])}"
        lines.append((f"{n} chunks", whole))
    return lines


@app.command()
def stragglers(
    workers: Annotated[int, typer.Option("--workers", help="K, the workers.")],
    threshold: Annotated[
        int | None, typer.Option("--threshold", help="k, how many are waited for (default: all).")
    ] = None,
    mean: Annotated[str, typer.Option("--mean", help="Mean time of one worker: 150ms.")] = "1s",
    as_json: Json = False,
) -> None:
    """Expected wait for k of K exponential workers."""
    with planning("stragglers"):
        from zkv import costs

        first = workers if threshold is None else threshold
        mean_s = u.option("--mean", u.seconds, mean)
        exact_s = costs.first_workers_s(first, workers, mean_s)
        large_s = None if first == workers else costs.first_workers_large_s(first, workers, mean_s)
        all_s = costs.first_workers_s(workers, workers, mean_s)
        figures = {
            "workers": workers,
            "threshold": first,
            "mean_s": mean_s,
            "exact_s": exact_s,
            "large_k_s": large_s,
            "all_s": all_s,
        }
        text = u.time_text
        rest = workers - first
        lines = [
            (
                f"{first} of {workers}, exact",
                f"(H_{workers} − H_{rest}) × {text(mean_s)} = {text(exact_s)}",
            )
        ]
        if large_s is not None:
            limit = f"ln({workers} / {rest}) × {text(mean_s)} = {text(large_s)}"
            lines.append(("its limit for many workers", limit))
            every = f"H_{workers} × {text(mean_s)} = {text(all_s)}"
            lines.append((f"all {workers}, exact", every))
        tell(figures, lines, as_json)


@app.command()
def aggregate(
    size: Size,
    devices: Annotated[int, typer.Option("--devices", help="Devices with a gradient each.")],
    link: Link,
    as_json: Json = False,
) -> None:
    """Aggregation on one device, on the CPU, in parts."""
    with planning("aggregate"):
        from zkv import aggregation_costs as costs

        n = devices
        each = u.option("--size", u.size_bytes, size)
        speed = u.option("--link", u.bits_per_s, link)
        figures = {
            "size_bytes": each,
            "devices": n,
            "bits_per_s": speed,
            "on_device_s": costs.aggregate_on_device_s(each, n, speed),
            "on_cpu_s": costs.aggregate_on_cpu_s(each, n, speed),
            "in_parts_s": costs.aggregate_in_parts_s(each, n, speed),
        }
        whole, at, text = u.size_text(each), f"× 8 / {u.bits_text(speed)}", u.time_text
        lines = [
            ("one device", f"2 × ({n} − 1) × {whole} {at} = {text(figures['on_device_s'])}"),
            ("CPU", f"2 × {n} × {whole} {at} = {text(figures['on_cpu_s'])}"),
            ("in parts", f"2 × ({n} − 1) × {whole} / {n} {at} = {text(figures['in_parts_s'])}"),
        ]
        tell(figures, lines, as_json)


@app.command()
def ring(
    size: Size,
    nodes: Annotated[int, typer.Option("--nodes", help="Nodes of the ring.")],
    link: Link,
    reduce_only: Annotated[
        bool, typer.Option("--reduce-only", help="Only the half that adds up (scatter-reduce).")
    ] = False,
    as_json: Json = False,
) -> None:
    """Ring all-reduce: chunks, rounds, bytes and time."""
    with planning("ring"):
        from zkv import aggregation_costs as costs

        each = u.option("--size", u.size_bytes, size)
        speed = u.option("--link", u.bits_per_s, link)
        rounds = costs.ring_rounds(nodes, reduce_only=reduce_only)
        sent = costs.ring_sent_bytes(each, nodes, reduce_only=reduce_only)
        chunk = costs.ring_chunk_bytes(each, nodes)
        time_s = costs.ring_all_reduce_s(each, nodes, speed, reduce_only=reduce_only)
        figures = {
            "size_bytes": each,
            "nodes": nodes,
            "reduce_only": reduce_only,
            "bits_per_s": speed,
            "chunks": nodes,
            "chunk_bytes": chunk,
            "rounds": rounds,
            "sent_bytes": sent,
            "time_s": time_s,
        }
        text = u.size_text
        factor = f"({nodes} − 1)" if reduce_only else f"2 × ({nodes} − 1)"
        lines = [
            ("chunk", f"{text(each)} / {nodes} = {text(chunk)}"),
            ("rounds", f"{factor} = {rounds}"),
            ("each node", f"{rounds} × {text(chunk)} = {text(sent)} sent, as much received"),
            ("time", f"{text(sent)} × 8 / {u.bits_text(speed)} = {u.time_text(time_s)}"),
        ]
        tell(figures, lines, as_json)
