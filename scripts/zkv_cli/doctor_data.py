"""What `zkv doctor` concludes of the ways that data takes: to each server, through the broker, and
through the memory of one machine. Pure: what probes have found comes in, checks go out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from zkv_cli.doctor_check import Check, ok, skipped
from zkv_cli.report import bytes_text
from zkv_net.sockets import is_loopback

RELAY, THROUGHPUT, MEMORY, CONGESTION = (
    "route broker",
    "throughput",
    "shared memory",
    "congestion control",
)
SLOW_BYTES_PER_S = 12.5e6
"""100 Mbit/s."""
EXAMPLE_BYTES = 100e6


@dataclass(frozen=True, slots=True)
class ServerFound:
    """What is known of one server: as the broker says, and as it was found from here.

    `way`: the first check on the way to it that has not passed, or the last one that has.
    `index`: as it says itself; None: it has not answered a probe. `rate` is in bytes per second,
    0.0: not measured. `memory`: why its memory cannot be shared, "" if it can; None: it offers
    none. `local`: whether its address is one of this machine.
    """

    told: Mapping[str, Any]
    way: Check
    index: int | None = None
    trip_s: float = 0.0
    rate: float = 0.0
    memory: str | None = None
    local: bool = False

    @property
    def name(self) -> str:
        """Return its name in the list of checks."""
        return f"server {self.told['index']}"

    @property
    def reached(self) -> bool:
        """Return whether it answers at its address."""
        return self.way.outcome != "fail" and self.index == self.told["index"]


def check_server(found: ServerFound, broker_host: str) -> Check:
    """Return the check of the address that a server has announced (`--advertise`)."""
    told, name = found.told, found.name
    address = told["address"]
    who = f"{told['name']!r} on {told['host']}, pid {told['pid']}"
    figures = {"address": address, "round_trip_s": found.trip_s}
    host = address.removeprefix("tcp://").rpartition(":")[0].strip("[]")
    hint = (
        f"Start that server with the address that this machine reaches ({told['host']}: zkv server "
        "--bind tcp://0.0.0.0:PORT --advertise ADDRESS), open its port, or send all data through "
        "the broker: ZKV_ROUTE=broker."
    )
    if is_loopback(host) and not is_loopback(broker_host) and not found.reached:
        return Check(
            name,
            "fail",
            f"{address} ({who}) is loopback, which is this machine itself",
            "A server of another machine has announced it: it cannot be reached from here.",
            hint,
            figures,
        )
    if found.way.outcome == "fail":
        means = f"{found.way.name}: {found.way.means} Workers here could pull and push nothing."
        text = f"{address} ({who}): {found.way.found}"
        return replace(found.way, name=name, found=text, means=means, todo=hint, figures=figures)
    if found.index is None:
        return Check(
            name,
            "fail",
            f"{address} ({who}) answers as ZeroMQ, but not as a server",
            "Another program listens at that address, or the server is stopped or busy.",
            hint,
            figures,
        )
    if not found.reached:
        return Check(
            name,
            "fail",
            f"{address} ({who}) is server {found.index} for who asks from here",
            "Two servers are announced at one address, as seen from here (the same private "
            "address in two networks, or forwarded ports that were swapped).",
            hint,
            figures,
        )
    text = f"{address} ({told['host']}) answers, {1000 * found.trip_s:.2f} ms"
    return ok(name, text, **figures)


def check_relay(address: str, way: Check | None, servers: Sequence[ServerFound]) -> Check:
    """Return the check of the broker's data port; `way` is as in `ServerFound`."""
    if not address or way is None:
        return skipped(RELAY, "the broker does not tell its data port")
    lost = [one.name for one in servers if not one.reached]
    figures = {"address": address}
    if way.outcome != "fail":
        use = f": use it (ZKV_ROUTE=broker), as {', '.join(lost)} cannot be reached" if lost else ""
        return ok(RELAY, f"{address} can be reached{use}", **figures)
    return Check(
        RELAY,
        "warn",
        f"{address}: {way.found}",
        f"{way.name}: {way.means} It is needed only where servers cannot be reached directly.",
        "Open that port too, or leave it if no worker uses ZKV_ROUTE=broker.",
        figures,
    )


def check_throughput(servers: Sequence[ServerFound]) -> Check:
    """Return the check of what the ways to servers carry, one after the other."""
    rates = {one.name: one.rate for one in servers if one.rate}
    if not rates:
        return skipped(THROUGHPUT, "no server can be reached from here")
    slowest, least = min(rates.items(), key=lambda one: one[1])
    named = ", ".join(f"{name} {bytes_text(round(rate))}/s" for name, rate in rates.items())
    text = f"to {named}: {EXAMPLE_BYTES / least:.3g} s for 100 MB to {slowest}"
    figures = {"bytes_per_s": rates}
    if least < SLOW_BYTES_PER_S:
        return Check(
            THROUGHPUT,
            "warn",
            text,
            "That is less than 100 Mbit/s: large models wait for the link most of the time.",
            "Compress (--codec int8+ef, or topk:0.01+int8+ef), contribute less often "
            "(worker.local(h=8)), and see if this is the right card (--advertise).",
            figures,
        )
    return ok(THROUGHPUT, text, **figures)


def check_memory(servers: Sequence[ServerFound], own: str) -> Check:
    """Return the check of sharing with servers of this machine; `own`: why nothing of this
    process can be shared, "" if it can."""
    local = [one for one in servers if one.local and one.reached]
    if not local:
        return skipped(MEMORY, "no server is on this machine")
    wrong = {one.name: one.memory for one in local if one.memory}
    silent = [one.name for one in local if one.memory is None]
    advice = (
        "Run worker and server as one user in one container (or with one IPC and PID namespace "
        "and --network host); nothing else is slower."
    )
    means = "Payloads of this machine go through sockets, which costs about twice the time."
    if own:
        return Check(MEMORY, "warn", own, means, advice)
    if silent:
        todo = "Leave --shared away, or see in the server's log why it could make no memory."
        return Check(MEMORY, "warn", f"{', '.join(silent)} offers no memory", means, todo)
    if wrong:
        found = "; ".join(f"{name}: {why}" for name, why in wrong.items())
        return Check(MEMORY, "warn", found, means, advice)
    names = ", ".join(one.name for one in local)
    return ok(MEMORY, f"payloads to and from {names} can go through memory")


def check_congestion(control: str, *, local: bool) -> Check:
    """Return the check of the kernel's congestion control; `local`: whether there is anything on
    this machine that sockets lead to. "": the system does not tell."""
    if not control:
        return skipped(CONGESTION, "this system does not tell (no /proc/sys/net)")
    if control == "bbr" and local:
        return Check(
            CONGESTION,
            "warn",
            "bbr, and this machine talks to itself",
            "BBR halves what loopback carries (5.3 GB/s where others carry 10.1). Payloads that go "
            "through memory do not mind; on a link that loses packets BBR is right.",
            "If no link of this machine loses packets: sysctl -w "
            "net.ipv4.tcp_congestion_control=cubic",
            {"control": control},
        )
    if control in ("reno", "cubic") and not local:
        text = f"{control}; on a link that loses packets bbr carries far more (29 times at 1 %)"
        return ok(CONGESTION, text, control=control)
    return ok(CONGESTION, control, control=control)
