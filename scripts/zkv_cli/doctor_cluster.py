"""What `zkv doctor` concludes of a broker that answers: versions, clocks, who is missing, and what
the status says. Pure: what was found comes in, checks go out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from zkv.alignment import Alignment
from zkv.descriptors import ALARM, need
from zkv.errors import ClusterNotReady, VersionMismatch
from zkv_cli.doctor_check import Check, ok

PROTOCOL, VERSIONS, ROUND_TRIP, CLOCK = "zkv protocol", "versions", "round trip", "clock"
CLUSTER, DESCRIPTORS = "cluster", "file descriptors"
CLOCK_WARN_S = 2.0
ROUND_TRIP_WARN_S = 0.25
SILENT_S = 5.0
PYZMQ_LEAST = (27, 0)
LIBZMQ_LEAST = (4, 3)


def check_protocol(
    address: str, error: Exception | None, *, server: int | None = None, below: str = ""
) -> Check:
    """Return the check of an answer to a request; `error`: what came instead. Then `server` is the
    number of the server that is there, if one is, and `below` the broker's address, if that has the
    port below."""
    if error is None:
        return ok(PROTOCOL, "the broker has answered a request")
    if isinstance(error, VersionMismatch):
        return Check(
            PROTOCOL,
            "fail",
            str(error),
            "Peers of different protocols understand nothing of each other.",
            "Install the same version of zkv on both machines (zkv --version).",
        )
    if server is not None:
        return Check(
            PROTOCOL,
            "fail",
            f"{address} is the data port of server {server}",
            "Workers and servers join at the broker's address, which names the servers to them.",
            "Give the address that the broker prints when it starts (broker at tcp://...).",
        )
    if below:
        return Check(
            PROTOCOL,
            "fail",
            f"{address} is the broker's data port",
            "It takes data of workers that cannot reach servers; they join at its control port.",
            f"Give {below}.",
        )
    if isinstance(error, ClusterNotReady):
        return Check(
            PROTOCOL,
            "fail",
            f"ZeroMQ listens at {address}, but no broker answers there",
            "Another program that uses ZeroMQ has that port, or a broker that is too busy to "
            "answer.",
            "Give the address that the broker prints when it starts (broker at tcp://...).",
        )
    return Check(
        PROTOCOL,
        "fail",
        f"the answer is none of zkv's: {error}",
        "Another program that uses ZeroMQ listens at that port.",
        "Give the address that the broker prints when it starts (broker at tcp://...).",
    )


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".")[:2] if part.isdecimal())


def check_versions(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> Check:
    """Return the check of versions here and at the broker; each has zkv, protocol, pyzmq, libzmq
    and python. `theirs` is empty if the broker does not tell."""
    figures = {"here": dict(mine), "broker": dict(theirs)}

    def listed(one: Mapping[str, Any]) -> str:
        return (
            f"zkv {one['zkv']} (protocol {one['protocol']}), pyzmq {one['pyzmq']}, "
            f"libzmq {one['libzmq']}, Python {one['python']}"
        )

    if not theirs:
        return Check(
            VERSIONS,
            "warn",
            f"here {listed(mine)}; the broker does not tell its own",
            "The broker's zkv is older than this one, though it speaks the same protocol.",
            "Install the same version of zkv on all machines.",
            figures,
        )
    for where, one in (("here", mine), ("at the broker", theirs)):
        for name, least in (("pyzmq", PYZMQ_LEAST), ("libzmq", LIBZMQ_LEAST)):
            if _numbers(str(one[name])) < least:
                return Check(
                    VERSIONS,
                    "fail",
                    f"{name} {one[name]} {where}",
                    f"zkv needs {name} {'.'.join(map(str, least))} or newer.",
                    "pip install -U pyzmq",
                    figures,
                )
    if mine["zkv"] != theirs["zkv"]:
        return Check(
            VERSIONS,
            "warn",
            f"zkv {mine['zkv']} here, {theirs['zkv']} at the broker (both protocol "
            f"{mine['protocol']})",
            "They understand each other, but not all of what one can do the other can.",
            "Install the same version of zkv on all machines.",
            figures,
        )
    same = all(mine[name] == theirs[name] for name in ("pyzmq", "libzmq", "python"))
    text = f"both {listed(mine)}" if same else f"here {listed(mine)}; broker {listed(theirs)}"
    return ok(VERSIONS, text, **figures)


def check_round_trip(trips_s: Sequence[float]) -> Check:
    """Return the check of how long a message to the broker and its answer take, in seconds."""
    least, middle, most = min(trips_s), median(trips_s), max(trips_s)
    text = (
        f"{1000 * middle:.2f} ms ({1000 * least:.2f} to {1000 * most:.2f}, "
        f"{len(trips_s)} round trips)"
    )
    figures = {"median_s": middle, "least_s": least, "most_s": most}
    if least > ROUND_TRIP_WARN_S:
        return Check(
            ROUND_TRIP,
            "warn",
            text,
            "Each update costs at least one round trip, and more under BSP: this is a long way.",
            "Put the broker nearer, or contribute less often: worker.local(h=8), prefetch=1.",
            figures,
        )
    if middle > ROUND_TRIP_WARN_S:
        return Check(
            ROUND_TRIP,
            "warn",
            text,
            "The way is short enough, but mostly busy: the broker's machine has too much to do, or "
            "the link is full.",
            "See what else runs there (top), or give the broker a core of its own.",
            figures,
        )
    return ok(ROUND_TRIP, text, **figures)


def check_clock(found: Alignment) -> Check:
    """Return the check of wall clocks: own time + `offset_s` is the broker's."""
    apart = abs(found.offset_s)
    way = "ahead of" if found.offset_s > 0 else "behind"
    text = f"the broker's is {apart:.3f} s {way} this one, give or take {found.error_s:.3f} s"
    figures = {"offset_s": found.offset_s, "error_s": found.error_s}
    if apart - found.error_s > CLOCK_WARN_S:
        return Check(
            CLOCK,
            "warn",
            text,
            "Training does not use the time of day; but logs of both machines do not fit together, "
            "and a broker that is started again on a machine whose clock is behind is taken for "
            "an old one.",
            "Switch time synchronisation on (timedatectl set-ntp true, chrony).",
            figures,
        )
    return ok(CLOCK, text, **figures)


def check_cluster(status: Mapping[str, Any]) -> Check:
    """Return the check of what a broker's status says of the cluster."""
    here, wanted = len(status["servers"]), status["servers_wanted"]
    text = f"{here} of {wanted} servers, {len(status['workers'])} workers, policy "
    text += f"{status['policy']}, version {status['version']}"
    figures = {"servers": here, "servers_wanted": wanted, "workers": len(status["workers"])}
    if status["failed"]:
        return Check(
            CLUSTER,
            "fail",
            f"the run has failed: {status['failed']}",
            "This broker's run is over; who joins is told the same.",
            "Stop all processes of the cluster and start it again.",
            figures,
        )
    if here < wanted:
        return Check(
            CLUSTER,
            "fail",
            f"{text}: {wanted - here} missing",
            "Workers wait until all servers are here.",
            f"Start the missing ones (zkv server --broker {status['broker']}), and see in their "
            "log whether they reach the broker.",
            figures,
        )
    silent = [one for one in status["servers"] if one["last_heard_s"] > SILENT_S]
    if silent:
        named = ", ".join(
            f"server {one['index']} ({one['name']!r} on {one['host']}) for "
            f"{one['last_heard_s']:.0f} s"
            for one in silent
        )
        return Check(
            CLUSTER,
            "warn",
            f"{text}; nothing was heard of {named}",
            "It makes a large update, is stopped, or its machine is gone.",
            "Look at that process; zkv status says when it is heard again.",
            figures,
        )
    waiting = status["waiting"]
    return ok(CLUSTER, f"{text}{'; ' + waiting if waiting else ''}", **figures)


def check_descriptors(
    mine: tuple[int, int] | None, theirs: Mapping[str, Any] | None, members: int
) -> Check:
    """Return the check of file descriptors: this process's limits (soft, hard), the broker's
    figures (opened, limit), and how many members there are to be."""
    needed = need(members)
    figures: dict[str, Any] = {"needed": needed, "broker": theirs}
    if theirs and theirs["limit"] and theirs["opened"] >= ALARM * theirs["limit"]:
        return Check(
            DESCRIPTORS,
            "fail" if theirs["opened"] >= theirs["limit"] else "warn",
            f"the broker has {theirs['opened']} of at most {theirs['limit']} open",
            "Without a free one it accepts connections and never answers them.",
            "Start it with a higher limit (ulimit -Hn, LimitNOFILE=, docker --ulimit nofile=).",
            figures,
        )
    if mine is None:
        return ok(DESCRIPTORS, "this system has no limit", **figures)
    soft, hard = mine
    figures |= {"soft": soft, "hard": hard}
    text = f"at most {soft} here ({hard} if raised), {needed} needed for {members} members"
    if hard < needed:
        return Check(
            DESCRIPTORS,
            "fail",
            text,
            "Each connection takes one; a broker or server refuses to start here, and a worker "
            "without a free one hangs.",
            f"ulimit -Hn {needed}, LimitNOFILE={needed} (systemd), --ulimit nofile={needed} "
            "(docker).",
            figures,
        )
    if soft < needed:
        return Check(
            DESCRIPTORS,
            "warn",
            text,
            "zkv broker and zkv server raise it by themselves; a worker's program does not.",
            f"ulimit -n {needed} before a worker is started.",
            figures,
        )
    return ok(DESCRIPTORS, text, **figures)
