"""`zkv doctor`: is anything in the way between this machine and a broker, and what to do about it.

The order of the checks, and which needs which; others look (`doctor_probes`, `doctor_server`) and
others conclude (`doctor_way`, `doctor_cluster`, `doctor_data`).
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import Any

from zkv import control as c
from zkv.alignment import RoundTrips
from zkv.errors import ClusterNotReady, ZkvError
from zkv.zmtp import Greeting, read_greeting
from zkv_cli import doctor_cluster as cluster
from zkv_cli import doctor_data as data
from zkv_cli import doctor_probes as probes
from zkv_cli import doctor_way as way
from zkv_cli.ask import Line, use_default_keys
from zkv_cli.doctor_check import Check, Step, checks, healthy, lines_of, skipped, summary
from zkv_cli.doctor_handshake import shake_hands
from zkv_cli.doctor_server import ServerLine, own_memory
from zkv_cli.exits import say
from zkv_net import about, descriptors
from zkv_net import loop as net
from zkv_net.sockets import is_loopback, join_address, split_address

ANSWER_S, BELOW_S = 5.0, 1.0
ROUND_TRIPS = 10
CLOCK_TRIPS = 3
ADDRESSES_MAX = 4
MEASURED_MAX = 8
"""To so many servers throughput is measured; the others have the same links, mostly."""
AT_ONCE = 16


class Patient:
    """One examination of the way to one broker: what has been found so far."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.host, port = split_address(address)
        self.place = way.Place(
            "the broker", address, self.host, int(port), f"zkv broker --bind tcp://0.0.0.0:{port}"
        )
        self._resolved = way.Resolved(())
        self._greeting: Greeting | None = None
        self._line: Line | None = None
        self._status: Mapping[str, Any] = {}
        self._trips = RoundTrips()
        self._servers: list[data.ServerFound] = []

    def steps(self) -> list[Step]:
        """Return all checks, in order."""
        answers = (cluster.PROTOCOL,)
        return [
            Step(way.NAME, self._name),
            Step(way.TCP, self._tcp, (way.NAME,)),
            Step(way.ZMTP, self._greet, (way.TCP,)),
            Step(way.CURVE, self._curve, (way.ZMTP,)),
            Step(cluster.PROTOCOL, self._ask, (way.CURVE,)),
            Step(cluster.VERSIONS, self._versions, answers),
            Step(cluster.ROUND_TRIP, self._round_trip, answers),
            Step(cluster.CLOCK, self._clock, answers),
            Step(cluster.CLUSTER, self._cluster, answers),
            Step("servers", self._reach, answers),
            Step(data.RELAY, self._relay, answers),
            Step(data.THROUGHPUT, self._throughput, answers),
            Step(data.MEMORY, self._memory, answers),
            Step(data.CONGESTION, self._congestion, answers),
            Step(cluster.DESCRIPTORS, self._descriptors),
        ]

    def close(self) -> None:
        """Close the connection to the broker."""
        if self._line is not None:
            self._line.close()

    # --- the way to the broker ---------------------------------------------------------------

    def _name(self) -> Iterator[Check]:
        self._resolved = probes.resolve(self.host)
        yield way.check_name(self.place, self._resolved)

    def _tcp(self) -> Iterator[Check]:
        yield way.check_tcp(self.place, dialled(self.place, self._resolved))

    def _greet(self) -> Iterator[Check]:
        found = probes.greet(self._resolved.dialled[0], self.place.port)
        self._greeting = read_greeting(found.heard)
        yield way.check_greeting(self.place, found)

    def _curve(self) -> Iterator[Check]:
        mechanism = "" if self._greeting is None else self._greeting.mechanism
        if mechanism == "CURVE":
            # On loopback no key is looked for before one is asked for.
            use_default_keys()
        done = shake_hands(self.address, mechanism)
        yield way.check_curve(self.place, mechanism, done)

    def _ask(self) -> Iterator[Check]:
        try:
            self._line = Line(self.address)
            self._status = self._line.answer(c.Status(1), ANSWER_S)
        except ClusterNotReady as error:
            server, below = self._who_else()
            yield cluster.check_protocol(self.address, error, server=server, below=below)
        except ZkvError as error:
            yield cluster.check_protocol(self.address, error)
        else:
            yield cluster.check_protocol(self.address, None)

    def _who_else(self) -> tuple[int | None, str]:
        """Return the number of the server that listens in a broker's place, and the address of the
        broker whose data port this is."""
        with closing(ServerLine(self.address)) as line:
            index, _ = line.identify()
        if index is not None or self.place.port == 1:
            return index, ""
        below = join_address(self.host, self.place.port - 1)
        with closing(Line(below)) as line_below:
            try:
                line_below.answer(c.Status(1), BELOW_S)
            except ZkvError:
                return None, ""
        return None, below

    # --- the broker --------------------------------------------------------------------------

    @property
    def _process(self) -> Mapping[str, Any]:
        """What the broker's process says of itself."""
        return dict(self._status.get("process") or {})

    def _versions(self) -> Iterator[Check]:
        yield cluster.check_versions(about.versions(), self._process.get("versions") or {})

    def _round_trip(self) -> Iterator[Check]:
        assert self._line is not None
        try:
            trips = [self._line.beat(ANSWER_S) for _ in range(ROUND_TRIPS)]
        except ZkvError as error:
            yield Check(cluster.ROUND_TRIP, "fail", str(error), *_GONE)
        else:
            yield cluster.check_round_trip(trips)

    def _clock(self) -> Iterator[Check]:
        assert self._line is not None
        for token in range(2, 2 + CLOCK_TRIPS):
            sent = time.time()
            try:
                told = self._line.answer(c.Status(token), ANSWER_S)
            except ZkvError as error:
                yield Check(cluster.CLOCK, "fail", str(error), *_GONE)
                return
            process = told.get("process") or {}
            if "time_s" in process:
                self._trips.note(sent, process["time_s"], time.time())
        found = self._trips.alignment
        if found is None:
            yield skipped(cluster.CLOCK, "the broker does not tell the time")
        else:
            yield cluster.check_clock(found)

    def _cluster(self) -> Iterator[Check]:
        yield cluster.check_cluster(self._status)

    # --- data --------------------------------------------------------------------------------

    def _reach(self) -> Iterator[Check]:
        """Look at all servers side by side, as each that cannot be reached takes its time."""
        with ThreadPoolExecutor(AT_ONCE) as pool:
            self._servers = list(pool.map(found_server, self._status["servers"]))
        for one in self._servers:
            yield data.check_server(one, self.host)

    def _relay(self) -> Iterator[Check]:
        address = str(self._process.get("data_address", ""))
        found = walked(place_of("the broker's data port", address)) if address else None
        yield data.check_relay(address, found, self._servers)

    def _throughput(self) -> Iterator[Check]:
        near = [at for at, one in enumerate(self._servers) if one.reached]
        for at in near[:MEASURED_MAX]:
            one = self._servers[at]
            self._servers[at] = replace(one, rate=rate_of(one))
        yield data.check_throughput(self._servers)

    def _memory(self) -> Iterator[Check]:
        yield data.check_memory(self._servers, own_memory())

    def _congestion(self) -> Iterator[Check]:
        local = is_loopback(self.host) or any(one.local for one in self._servers)
        yield data.check_congestion(probes.congestion_control(), local=local)

    def _descriptors(self) -> Iterator[Check]:
        members = self._status.get("servers_wanted", 0) + len(self._status.get("workers", ()))
        theirs = self._process.get("descriptors")
        yield cluster.check_descriptors(descriptors.limits(), theirs, members)


_GONE = (
    "The broker has answered before, and does not any more.",
    "See whether its process still runs, and what its log says.",
)


def place_of(who: str, address: str) -> way.Place:
    """Return an address that a broker has told, as a place to look at."""
    host, port = split_address(address)
    return way.Place(who, address, host, int(port), "zkv server --bind tcp://0.0.0.0:PORT")


def dialled(place: way.Place, resolved: way.Resolved) -> way.Dialled:
    """Return how a connection went. ZeroMQ takes the first address, so the first one counts; others
    are named if they would do."""
    first = probes.dial(resolved.dialled[0], place.port)
    if first.outcome == "open":
        return first
    for host in resolved.dialled[1:ADDRESSES_MAX]:
        if probes.dial(host, place.port).outcome == "open":
            return replace(first, instead=host)
    return first


def walked(place: way.Place) -> Check:
    """Go the way to an address up to the first check that fails; return that, or the last one."""
    resolved = probes.resolve(place.host)
    looks: tuple[Callable[[], Check], ...] = (
        partial(way.check_name, place, resolved),
        lambda: way.check_tcp(place, dialled(place, resolved)),
        lambda: way.check_greeting(place, probes.greet(resolved.dialled[0], place.port)),
    )
    check = looks[0]()
    for look in looks[1:]:
        if check.outcome == "fail":
            break
        check = look()
    return check


def found_server(told: Mapping[str, Any]) -> data.ServerFound:
    """Look at one server of a status."""
    address = told["address"]
    found = data.ServerFound(told, walked(place_of(f"server {told['index']}", address)))
    if found.way.outcome == "fail":
        return found
    with closing(ServerLine(address, told.get("key", ""))) as line:
        index, trip_s = line.identify()
        host, _ = split_address(address)
        local = is_loopback(host) or net.is_own(address)
        return replace(found, index=index, trip_s=trip_s, memory=line.memory, local=local)


def rate_of(found: data.ServerFound) -> float:
    """Measure what the way to a server carries, in bytes per second."""
    with closing(ServerLine(found.told["address"], found.told.get("key", ""))) as line:
        return line.rate(found.told["index"])


def run(address: str, *, as_json: bool) -> bool:
    """Make all checks and print them, each when it is made; return whether nothing has failed."""
    patient, made = Patient(address), []
    if not as_json:
        say(f"zkv doctor: {address}, asked from {net.host_name()}\n")
    try:
        for check in _shown(checks(patient.steps()), as_json=as_json):
            made.append(check)
    finally:
        patient.close()
    if as_json:
        plain = {
            "broker": address,
            "host": net.host_name(),
            "healthy": healthy(made),
            "checks": [check.to_plain() for check in made],
        }
        say(json.dumps(plain, ensure_ascii=False, indent=2))
    else:
        say(f"\n{summary(made)}")
    return healthy(made)


def _shown(made: Iterable[Check], *, as_json: bool) -> Iterator[Check]:
    for check in made:
        if not as_json:
            say("\n".join(lines_of(check)))
        yield check
