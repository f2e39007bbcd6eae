"""What `zkv doctor` concludes of the way to an address: its name, its port, and who answers there.

Pure: what probes have found comes in (`doctor_probes` looks), a check goes out.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from zkv.zmtp import read_greeting, stranger
from zkv_cli.doctor_check import Check, ok
from zkv_net.sockets import is_loopback, join_address

NAME, TCP, ZMTP, CURVE = "name resolution", "TCP connection", "ZMTP handshake", "CURVE"


@dataclass(frozen=True, slots=True)
class Place:
    """Whose address is looked at, in words: "the broker", "server 1"; and how to start it so that
    it can be reached."""

    who: str
    address: str
    host: str
    port: int
    start: str


@dataclass(frozen=True, slots=True)
class Resolved:
    """What a host's name stands for. `dialled` are those that ZeroMQ would take."""

    dialled: tuple[str, ...]
    others: tuple[str, ...] = ()
    error: str = ""
    timed_out_s: float = 0.0
    """Above 0: no answer within that many seconds."""


@dataclass(frozen=True, slots=True)
class Dialled:
    """How a TCP connection went."""

    host: str
    outcome: Literal["open", "refused", "timeout", "unreachable"]
    took_s: float
    error: str = ""
    own: str = ""
    """The address that it leaves from."""
    instead: str = ""
    """Another address of that name, which accepts."""


@dataclass(frozen=True, slots=True)
class Greeted:
    """What a peer said to our first bytes. `asked`: what it said to a request of HTTP, if it had
    said nothing."""

    heard: bytes
    closed: bool
    waited_s: float
    asked: bytes = b""


@dataclass(frozen=True, slots=True)
class Handshake:
    """How a whole handshake ended: "succeeded", "refused" (the key is not let in), "mechanism"
    (one side encrypts, the other does not), "broken" (no reason was told), "silent" (no end), or
    "unusable" (it did not begin, as keys are needed). `words` is what is probably wrong, and what
    mends it; `encrypts`: whether keys were in use here."""

    outcome: str
    words: str = ""
    encrypts: bool = False


def check_name(place: Place, found: Resolved) -> Check:
    """Return the check of a host's name."""
    if found.dialled:
        listed = ", ".join(found.dialled)
        text = listed if listed == place.host else f"{place.host} is {listed}"
        return ok(NAME, text, addresses=list(found.dialled))
    if found.others:
        first = found.others[0]
        return Check(
            NAME,
            "fail",
            f"{place.host} has IPv6 addresses only ({', '.join(found.others)})",
            "zkv dials names by IPv4, and IPv6 only where the address itself is given.",
            f"Name the address: tcp://[{first}]:{place.port}",
            {"addresses": list(found.others)},
        )
    if found.timed_out_s:
        return Check(
            NAME,
            "fail",
            f"no name server has answered for {place.host} within {found.timed_out_s:g} s",
            "This machine cannot look names up: its name servers do not answer.",
            f"Give {place.who}'s IP address instead, or see /etc/resolv.conf.",
        )
    return Check(
        NAME,
        "fail",
        f"{place.host} cannot be resolved: {found.error}",
        "No name server and no line of /etc/hosts knows that name, so nothing can be dialled.",
        f"Look for a misspelling, give {place.who}'s IP address, or add it to /etc/hosts.",
    )


def check_tcp(place: Place, found: Dialled) -> Check:
    """Return the check of a TCP connection."""
    check = _check_tcp(place, found)
    if not found.instead:
        return check
    todo = f"{found.instead}, which {place.host} stands for too, accepts, but ZeroMQ takes the "
    todo += f"first address: name tcp://{found.instead}:{place.port}."
    return replace(check, todo=todo)


def _check_tcp(place: Place, found: Dialled) -> Check:
    where = join_address(found.host, place.port).removeprefix("tcp://")
    figures = {"connect_s": found.took_s, "from": found.own}
    here = is_loopback(found.host)
    match found.outcome:
        case "open":
            text = f"{where} accepts, {1000 * found.took_s:.1f} ms, from {found.own}"
            return ok(TCP, text, **figures)
        case "refused":
            means = f"The machine is there, and nothing listens at port {place.port}."
            if here:
                means += f" {found.host} is this machine itself: is {place.who} on another one?"
            todo = f"Start {place.who} ({place.start}). If it runs, compare with the address that "
            todo += "it prints: one of 127.0.0.1 is reached from its own machine only."
            return Check(TCP, "fail", f"{where} refuses connections", means, todo, figures)
        case "timeout":
            return Check(
                TCP,
                "fail",
                f"{where} does not answer: nothing within {found.took_s:.1f} s",
                "Packets there, or their answers, get lost: a firewall or security group drops "
                "them, the machine is off, or the address is another one's or of a network that "
                "cannot be reached from here.",
                f"Let TCP port {place.port} through in every firewall between, and look whether "
                f"ping {found.host} answers.",
                figures,
            )
        case "unreachable":
            return Check(
                TCP,
                "fail",
                f"there is no way to {where}: {found.error}",
                "This machine has no route to that address, or one that forbids it, or nobody "
                "there answers in its own network.",
                f"See what `ip route get {found.host}` says; give the address that {place.who} has "
                "in a network which both machines share.",
                figures,
            )


def check_greeting(place: Place, found: Greeted) -> Check:
    """Return the check of who answers at a port."""
    greeting = read_greeting(found.heard)
    where = place.address.removeprefix("tcp://")
    if greeting is not None:
        text = f"ZMTP {greeting.major}.{greeting.minor}, mechanism {greeting.mechanism}"
        return ok(ZMTP, text, mechanism=greeting.mechanism)
    heard = found.heard or found.asked
    wrong = f"Look at the port: {place.who}'s is the one that it prints when it starts."
    if heard:
        return Check(
            ZMTP,
            "fail",
            f"{where} is {stranger(heard)}: it says {heard[:24]!r}",
            f"Another program listens at {place.who}'s port.",
            wrong,
        )
    if found.closed:
        return Check(
            ZMTP,
            "fail",
            f"{where} accepts a connection and closes it at once, without a word",
            "Something between lets nobody through (a proxy or port forwarding whose target is "
            "down), or another program listens there.",
            wrong,
        )
    return Check(
        ZMTP,
        "fail",
        f"{where} accepts a connection and says nothing for {found.waited_s:.1f} s",
        f"The kernel accepts for a process that does not go on: {place.who} is stopped (SIGSTOP, "
        "Ctrl-Z, a debugger), is out of file descriptors, or it is another program.",
        f"Look at {place.who}'s process and its log; fg or kill -CONT lets a stopped one go on.",
    )


def check_curve(place: Place, mechanism: str, found: Handshake) -> Check:
    """Return the check of encryption, and of being let in; `mechanism` is the peer's."""
    figures = {"mechanism": mechanism, "handshake": found.outcome}
    if found.outcome != "succeeded":
        text = _REFUSED.get(found.outcome, "the handshake of {who} does not come to an end")
        if found.outcome == "mechanism" and not found.encrypts:
            text = _REFUSED["keyless"]
        means = found.words[:1].upper() + found.words[1:]
        return Check(CURVE, "fail", text.format(who=place.who), means, SEE_KEYS, figures)
    if mechanism == "CURVE":
        return ok(CURVE, "encrypted, and this process's key is let in", **figures)
    if is_loopback(place.host):
        return ok(CURVE, "none: a loopback address is reached from this machine only", **figures)
    return Check(
        CURVE,
        "warn",
        f"{place.address} is neither encrypted nor authenticated",
        "Whoever reaches that port can read and change everything.",
        "Use keys (docs/security.md), or stay in a network where everybody is trusted.",
        figures,
    )


SEE_KEYS = "docs/security.md has the three commands; `zkv keys list` shows what there is."
_REFUSED = {
    "keyless": "{who} lets in nobody without a key, and none is in use here",
    "unusable": "no keys can be used here, and they are needed",
    "refused": "{who} does not let this process's key in",
    "mechanism": "{who} has no keys, and this process insists on them",
    "broken": "{who} breaks the handshake off: it has another key than is expected, mostly",
}
