"""`zkv plan topology`: how long an update takes under each topology, and which one to choose.

Of hosts and links that are typed, or of a running cluster's status, with what its workers have
measured of their links. What calculates is imported only in the command, so that `zkv --help`
answers at once.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from zkv.errors import ConfigError
from zkv_cli import units as u
from zkv_cli.exits import say
from zkv_cli.plan import Json, planning
from zkv_cli.tables import table

if TYPE_CHECKING:
    from zkv.topology_costs import Choice, Site

COLUMNS = ("topology", "time", "busiest", "carries", "between hosts")


def topology(
    hosts: Annotated[
        str | None,
        typer.Option("--hosts", help="How many workers each host has: 2,2,1."),
    ] = None,
    links: Annotated[
        str | None,
        typer.Option(
            "--links",
            help="The link of each host, those of servers last: 1Gb/s for all, or a list.",
        ),
    ] = None,
    size: Annotated[
        str | None, typer.Option("--size", help="Bytes of one gradient, such as 400MB.")
    ] = None,
    servers: Annotated[
        str,
        typer.Option(
            "--servers",
            help="The host of each server, from 0: 0,1; or own:2, on hosts of their own.",
        ),
    ] = "own:1",
    status: Annotated[
        Path | None,
        typer.Option(
            "--status",
            help="A running cluster instead: what zkv status --json has said (-: stdin).",
        ),
    ] = None,
    memory: Annotated[
        str, typer.Option("--memory", help="What a host's memory carries between workers.")
    ] = "5GB/s",
    latency: Annotated[
        str, typer.Option("--latency", help="Of one message between hosts: 0.2ms.")
    ] = "0",
    as_json: Json = False,
) -> None:
    """Time of an update under each topology, and which one to choose."""
    with planning("topology"):
        from zkv.topology_costs import choose

        rest = (
            u.option("--memory", u.bits_per_s, memory),
            u.option("--latency", u.seconds, latency),
        )
        nbytes = None if size is None else u.option("--size", u.size_bytes, size)
        if status is not None:
            if hosts is not None:
                raise ConfigError("--status has hosts of its own: leave out --hosts")
            site, names, known = _of_status(_read(status), links, rest)
            nbytes = known if nbytes is None else nbytes
        elif hosts is None or links is None or nbytes is None:
            raise ConfigError("give --hosts, --links and --size, or a cluster's --status")
        else:
            site, names = _typed(hosts, links, servers, rest)
        choice = choose(site, nbytes)
        figures = _figures(choice, site, names, nbytes)
        say(json.dumps(figures, indent=2) if as_json else _text(figures))


def _typed(
    hosts: str, links: str, servers: str, rest: tuple[float, float]
) -> tuple[Site, list[str]]:
    """Return the site that was typed, and the names of its hosts."""
    from zkv.topology_costs import Site

    counts = u.option("--hosts", lambda text: u.each(u.count, text), hosts)
    workers = tuple(host for host, count in enumerate(counts) for _ in range(count))
    kind, own, number = servers.partition(":")
    if own and kind == "own":
        count = u.option("--servers", u.count, number)
        at = tuple(range(len(counts), len(counts) + count))
    else:
        at = tuple(u.option("--servers", lambda text: u.each(u.count, text), servers))
    names = [f"host {host}" for host in range(len(counts))]
    names += [f"server {server}'s host" for server, host in enumerate(at) if host >= len(counts)]
    return Site(workers, at, _links(links, len(names)), *rest), names


def _links(text: str, hosts: int) -> tuple[float, ...]:
    speeds = u.option("--links", lambda listed: u.each(u.bits_per_s, listed), text)
    if len(speeds) not in (1, hosts):
        raise ConfigError(
            f"--links: {len(speeds)} links for {hosts} hosts; give one for all, or all"
        )
    return tuple(speeds * hosts if len(speeds) == 1 else speeds)


def _read(path: Path) -> Mapping[str, Any]:
    try:
        text = sys.stdin.read() if str(path) == "-" else path.read_text("utf-8")
        found = json.loads(text)
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"--status {path}: {error}") from error
    if not isinstance(found, dict) or not {"workers", "servers"} <= found.keys():
        raise ConfigError(f"--status {path}: this is not what zkv status --json says")
    return found


def _of_status(
    status: Mapping[str, Any], links: str | None, rest: tuple[float, float]
) -> tuple[Site, list[str], int]:
    """Return the site of a running cluster, the names of its hosts, and the model's bytes."""
    from zkv.topology_costs import Site

    workers = [one for one in status["workers"] if not one["observer"]]
    names = list(dict.fromkeys(one["host"] for one in (*workers, *status["servers"])))
    if links is not None:
        speeds = _links(links, len(names))
    else:
        measured: dict[str, float] = {}
        for one in workers:
            measured[one["host"]] = max(measured.get(one["host"], 0.0), one["link_rate"] * 8)
        if not all(measured.get(one["host"]) for one in workers):
            missing = next(one["host"] for one in workers if not measured.get(one["host"]))
            raise ConfigError(
                f"no worker on {missing} has measured its link (on loopback none does): give "
                f"--links for {', '.join(names)}"
            )
        # A way to a server is as fast as the slower of both ends: servers are no slower than that.
        fastest = max(measured.values())
        speeds = tuple(measured.get(name, fastest) for name in names)
    site = Site(
        tuple(names.index(one["host"]) for one in sorted(workers, key=lambda w: w["number"])),
        tuple(names.index(one["host"]) for one in status["servers"]),
        speeds,
        *rest,
    )
    return site, names, sum(one["value_bytes"] for one in status["servers"])


def _figures(choice: Choice, site: Site, names: list[str], nbytes: int) -> dict[str, Any]:
    from zkv.topology_costs import sentence

    told = [u.time_text(one.seconds) for one in choice.costs]
    return {
        "workers": len(site.workers),
        "servers": len(site.servers),
        "hosts": {name: link for name, link in zip(names, site.links, strict=True)},
        "size_bytes": nbytes,
        "topologies": [
            {
                "topology": one.name,
                "update_s": one.seconds,
                "busiest_host": names[one.host],
                "busiest_way": one.way,
                "busiest_bytes": one.nbytes,
                "between_hosts_bytes": one.links_bytes,
            }
            for one in choice.costs
        ],
        "left_out": dict(choice.left_out),
        "chosen": choice.best.name,
        "why": sentence(choice, names, told),
    }


def _text(figures: Mapping[str, Any]) -> str:
    rows = [
        (
            one["topology"],
            u.time_text(one["update_s"]),
            f"{one['busiest_host']}, {one['busiest_way']}",
            u.size_text(round(one["busiest_bytes"])),
            u.size_text(round(one["between_hosts_bytes"])),
        )
        for one in figures["topologies"]
    ]
    left_out = [f"{name}: {why}" for name, why in figures["left_out"].items()]
    return "\n".join([*table(COLUMNS, rows), *left_out, f"choose {figures['why']}"])
