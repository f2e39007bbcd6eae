"""What `zkv doctor` concludes of what was found: pure, one finding after the other."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from zkv.alignment import RoundTrips
from zkv.errors import ClusterNotReady, ProtocolError, VersionMismatch
from zkv_cli import doctor_cluster as cluster
from zkv_cli import doctor_data as data
from zkv_cli import doctor_way as way
from zkv_cli.doctor_check import Check, Step, checks, healthy, lines_of, ok, summary

BROKER = way.Place("the broker", "tcp://head:5555", "head", 5555, "zkv broker")
HERE = way.Place("the broker", "tcp://127.0.0.1:5555", "127.0.0.1", 5555, "zkv broker")
NULL, CURVE = "NULL", "CURVE"


def failing(name: str) -> Check:
    return Check(name, "fail", "it is broken", "that is bad", "mend it")


def step(name: str, *needs: str, made: Check | None = None) -> Step:
    return Step(name, lambda: [made or ok(name, "fine")], needs)


# --- the order of checks -----------------------------------------------------------------------


def test_what_needs_a_failed_check_is_skipped_by_its_name_all_the_way():
    made = list(
        checks(
            [
                step("name"),
                step("TCP", "name", made=failing("TCP")),
                step("ZMTP", "TCP"),
                step("broker", "ZMTP"),
                step("limits"),
            ]
        )
    )
    assert [check.outcome for check in made] == ["ok", "fail", "skipped", "skipped", "ok"]
    assert made[3].name == "broker"
    assert made[3].found == "needs TCP, which failed"
    assert not healthy(made)


def test_a_warning_is_no_reason_to_skip_nor_to_fail():
    warned = Check("CURVE", "warn", "none")
    made = list(checks([step("CURVE", made=warned), step("broker", "CURVE")]))
    assert [check.outcome for check in made] == ["warn", "ok"]
    assert healthy(made)
    assert summary(made) == "2 checks made: 1 with a warning (CURVE)"


def test_a_skipped_check_is_never_made():
    def never() -> list[Check]:
        raise AssertionError

    made = list(checks([step("a", made=failing("a")), Step("b", never, ("a",))]))
    assert made[1].found == "needs a, which failed"
    assert summary(made) == "1 checks made: 1 failed (a)"


def test_a_failure_is_told_with_what_it_means_and_what_to_do():
    assert lines_of(failing("TCP")) == [
        "FAIL    TCP                 it is broken",
        "        that is bad",
        "        -> mend it",
    ]
    assert lines_of(ok("TCP", "fine")) == ["ok      TCP                 fine"]


# --- the way to an address ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (way.Resolved((), error="Name or service not known"), "head cannot be resolved: Name or"),
        (way.Resolved((), ("fd00::2",)), "head has IPv6 addresses only (fd00::2)"),
        (way.Resolved((), timed_out_s=5.0), "no name server has answered for head within 5 s"),
    ],
)
def test_a_name_that_leads_nowhere(found, words):
    check = way.check_name(BROKER, found)
    assert (check.name, check.outcome) == ("name resolution", "fail")
    assert words in check.found
    assert check.means
    assert check.todo


def test_a_name_of_ipv6_only_is_mended_by_the_address_in_brackets():
    check = way.check_name(BROKER, way.Resolved((), ("fd00::2",)))
    assert check.todo == "Name the address: tcp://[fd00::2]:5555"


@pytest.mark.parametrize(
    ("outcome", "found", "means"),
    [
        ("refused", "10.0.0.2:5555 refuses connections", "nothing listens at port 5555"),
        ("timeout", "10.0.0.2:5555 does not answer", "firewall"),
        ("unreachable", "there is no way to 10.0.0.2:5555: no route", "no route"),
    ],
)
def test_a_port_that_does_not_accept(outcome, found, means):
    check = way.check_tcp(BROKER, way.Dialled("10.0.0.2", outcome, 3.0, "no route"))
    assert (check.name, check.outcome) == ("TCP connection", "fail")
    assert found in check.found
    assert means in check.means


def test_a_closed_port_of_this_machine_asks_for_the_other_one():
    check = way.check_tcp(HERE, way.Dialled("127.0.0.1", "refused", 0.0))
    assert "this machine itself: is the broker on another one?" in check.means


def test_another_address_of_the_name_that_accepts_is_what_to_give():
    found = way.Dialled("10.0.0.2", "refused", 0.0, instead="10.1.0.2")
    assert "name tcp://10.1.0.2:5555" in way.check_tcp(BROKER, found).todo


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (way.Greeted(b"HTTP/1.0 400 Bad", True, 0.0), "head:5555 is a web server (HTTP)"),
        (way.Greeted(b"", False, 2.0, b"HTTP/1.0 200 OK"), "head:5555 is a web server (HTTP)"),
        (way.Greeted(b"SSH-2.0-x", False, 2.0), "an SSH server"),
        (way.Greeted(b"", True, 0.0), "closes it at once, without a word"),
        (way.Greeted(b"", False, 2.0), "says nothing for 2.0 s"),
    ],
)
def test_a_port_where_nobody_speaks_zeromq(found, words):
    check = way.check_greeting(BROKER, found)
    assert (check.name, check.outcome) == ("ZMTP handshake", "fail")
    assert words in check.found


def test_silence_names_a_stopped_process_and_used_up_descriptors():
    means = way.check_greeting(BROKER, way.Greeted(b"", False, 2.0)).means
    assert "SIGSTOP" in means
    assert "out of file descriptors" in means


@pytest.mark.parametrize(
    ("mechanism", "found", "words"),
    [
        (CURVE, way.Handshake("broken", "why"), "the broker breaks the handshake off"),
        (CURVE, way.Handshake("mechanism", "why"), "lets in nobody without a key"),
        (CURVE, way.Handshake("refused", "why", True), "does not let this process's key in"),
        (NULL, way.Handshake("mechanism", "why", True), "has no keys, and this process insists"),
        (NULL, way.Handshake("silent", "why"), "does not come to an end"),
        (NULL, way.Handshake("unusable", "why"), "no keys can be used here"),
    ],
)
def test_a_handshake_that_does_not_succeed(mechanism, found, words):
    check = way.check_curve(BROKER, mechanism, found)
    assert (check.name, check.outcome) == ("CURVE", "fail")
    assert words in check.found
    assert check.means == "Why"
    assert "docs/security.md" in check.todo


def test_no_encryption_is_fine_on_loopback_and_a_warning_elsewhere():
    done = way.Handshake("succeeded")
    assert way.check_curve(HERE, NULL, done).outcome == "ok"
    warned = way.check_curve(BROKER, NULL, done)
    assert warned.outcome == "warn"
    assert "neither encrypted nor authenticated" in warned.found
    assert way.check_curve(BROKER, CURVE, way.Handshake("succeeded", "", True)).outcome == "ok"


# --- the broker --------------------------------------------------------------------------------

MINE = {"zkv": "0.1.0", "protocol": 1, "pyzmq": "27.3.0", "libzmq": "4.3.5", "python": "3.11.7"}


@pytest.mark.parametrize(
    ("error", "more", "words"),
    [
        (VersionMismatch("the peer speaks protocol 2, this process speaks 1"), {}, "protocol 2"),
        (ClusterNotReady("nobody"), {}, "no broker answers there"),
        (ClusterNotReady("nobody"), {"server": 3}, "is the data port of server 3"),
        (ClusterNotReady("nobody"), {"below": "tcp://head:5554"}, "is the broker's data port"),
        (ProtocolError("not a packet"), {}, "none of zkv's: not a packet"),
    ],
)
def test_who_answers_and_is_no_broker_of_this_protocol(error, more, words):
    check = cluster.check_protocol("tcp://head:5555", error, **more)
    assert check.outcome == "fail"
    assert words in check.found
    assert check.todo


def test_the_control_port_is_named_where_the_data_port_was_given():
    error = ClusterNotReady("nobody")
    check = cluster.check_protocol("tcp://head:5556", error, below="tcp://head:5555")
    assert check.todo == "Give tcp://head:5555."


@pytest.mark.parametrize(
    ("theirs", "outcome", "words"),
    [
        (MINE, "ok", "both zkv 0.1.0 (protocol 1)"),
        (MINE | {"python": "3.13.1"}, "ok", "broker zkv 0.1.0 (protocol 1)"),
        (MINE | {"zkv": "0.2.0"}, "warn", "zkv 0.1.0 here, 0.2.0 at the broker"),
        (MINE | {"libzmq": "4.2.5"}, "fail", "libzmq 4.2.5 at the broker"),
        (MINE | {"pyzmq": "26.4.0"}, "fail", "pyzmq 26.4.0 at the broker"),
        ({}, "warn", "does not tell its own"),
    ],
)
def test_versions_of_both_ends_are_compared(theirs, outcome, words):
    check = cluster.check_versions(MINE, theirs)
    assert check.outcome == outcome
    assert words in check.found


@pytest.mark.parametrize(
    ("trips", "outcome"),
    [([0.001, 0.002, 0.9], "ok"), ([0.3, 0.4, 0.5], "warn"), ([0.001, 0.4, 0.5], "warn")],
)
def test_a_long_way_and_a_busy_one_are_told_apart(trips, outcome):
    assert cluster.check_round_trip(trips).outcome == outcome


def test_a_busy_way_is_not_called_long():
    assert "long way" in cluster.check_round_trip([0.3, 0.4]).means
    assert "mostly busy" in cluster.check_round_trip([0.001, 0.4, 0.5]).means


@pytest.mark.parametrize(
    ("ahead_s", "trip_s", "outcome", "words"),
    [
        (3600.0, 0.01, "warn", "3600.000 s ahead of this one"),
        (-3600.0, 0.01, "warn", "3600.000 s behind this one"),
        (1.0, 0.01, "ok", "1.000 s ahead of"),
        (3.0, 4.0, "ok", "give or take 2.000 s"),
    ],
)
def test_a_clock_is_off_only_by_more_than_the_round_trip_leaves_open(
    ahead_s, trip_s, outcome, words
):
    trips = RoundTrips()
    trips.note(1000.0, 1000.0 + trip_s / 2 + ahead_s, 1000.0 + trip_s)
    assert trips.alignment is not None
    check = cluster.check_clock(trips.alignment)
    assert check.outcome == outcome
    assert words in check.found


def status(**changes: Any) -> dict[str, Any]:
    server = {"index": 0, "name": "s", "host": "node1", "last_heard_s": 0.1}
    plain = {
        "broker": "tcp://head:5555",
        "servers": [server],
        "servers_wanted": 1,
        "workers": [],
        "policy": "bsp",
        "version": 0,
        "failed": None,
        "waiting": "",
    }
    return plain | changes


def test_a_cluster_that_is_well_a_failed_one_and_one_with_missing_servers():
    assert cluster.check_cluster(status()).outcome == "ok"
    missing = cluster.check_cluster(status(servers_wanted=3))
    assert missing.outcome == "fail"
    assert "1 of 3 servers" in missing.found
    assert "2 missing" in missing.found
    failed = cluster.check_cluster(status(failed="server 0 is lost"))
    assert failed.outcome == "fail"
    assert "server 0 is lost" in failed.found


def test_a_server_that_is_silent_is_named():
    silent = {"index": 0, "name": "s", "host": "node1", "last_heard_s": 9.0}
    check = cluster.check_cluster(status(servers=[silent]))
    assert check.outcome == "warn"
    assert "server 0 ('s' on node1) for 9 s" in check.found


@pytest.mark.parametrize(
    ("mine", "theirs", "members", "outcome", "words"),
    [
        ((1024, 4096), {"opened": 30, "limit": 1024}, 10, "ok", "84 needed for 10 members"),
        ((80, 4096), None, 10, "warn", "at most 80 here (4096 if raised)"),
        ((80, 80), None, 10, "fail", "at most 80 here"),
        ((1024, 4096), {"opened": 90, "limit": 100}, 1, "warn", "90 of at most 100"),
        ((1024, 4096), {"opened": 100, "limit": 100}, 1, "fail", "100 of at most 100"),
        (None, None, 1, "ok", "no limit"),
    ],
)
def test_descriptors_here_and_at_the_broker(mine, theirs, members, outcome, words):
    check = cluster.check_descriptors(mine, theirs, members)
    assert check.outcome == outcome
    assert words in check.found


# --- data --------------------------------------------------------------------------------------

TOLD = {"index": 1, "name": "s", "host": "node1", "pid": 7, "address": "tcp://10.0.0.3:5600"}
REACHED = data.ServerFound(TOLD, ok(way.ZMTP, "ZMTP 3.1"), index=1, trip_s=0.0002)
REFUSED = way.check_tcp(BROKER, way.Dialled("10.0.0.3", "refused", 0.0))


def test_a_server_that_answers_for_itself_is_well():
    check = data.check_server(REACHED, "head")
    assert (check.name, check.outcome) == ("server 1", "ok")


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (replace(REACHED, way=REFUSED, index=None), "refuses connections"),
        (replace(REACHED, index=None), "answers as ZeroMQ, but not as a server"),
        (replace(REACHED, index=0), "is server 0 for who asks from here"),
    ],
)
def test_an_advertised_address_that_leads_elsewhere_or_nowhere(found, words):
    check = data.check_server(found, "head")
    assert (check.name, check.outcome) == ("server 1", "fail")
    assert TOLD["address"] in check.found
    assert words in check.found
    assert "--advertise" in check.todo
    assert "ZKV_ROUTE=broker" in check.todo


def test_a_loopback_address_of_another_machine_is_called_that():
    told = TOLD | {"address": "tcp://127.0.0.1:5600"}
    found = replace(REACHED, told=told, way=REFUSED, index=None)
    assert "loopback, which is this machine itself" in data.check_server(found, "head").found
    assert "refuses" in data.check_server(found, "127.0.0.1").found


def test_the_relay_is_what_to_use_where_a_server_cannot_be_reached():
    reached = ok(way.ZMTP, "ZMTP 3.1")
    lost = replace(REACHED, way=REFUSED, index=None)
    check = data.check_relay("tcp://head:5556", reached, [REACHED, lost])
    assert check.outcome == "ok"
    assert "ZKV_ROUTE=broker" in check.found
    assert "use it" not in data.check_relay("tcp://head:5556", reached, [REACHED]).found
    assert data.check_relay("tcp://head:5556", REFUSED, [REACHED]).outcome == "warn"
    assert data.check_relay("", None, [REACHED]).outcome == "skipped"


def test_the_slowest_way_is_judged():
    quick = replace(REACHED, rate=1e9)
    slow = replace(REACHED, told=TOLD | {"index": 2}, rate=1e6)
    assert data.check_throughput([quick]).outcome == "ok"
    check = data.check_throughput([quick, slow])
    assert check.outcome == "warn"
    assert "100 s for 100 MB to server 2" in check.found
    assert data.check_throughput([replace(REACHED, rate=0.0)]).outcome == "skipped"


def test_memory_is_shared_with_servers_of_this_machine_or_it_says_why_not():
    near = replace(REACHED, local=True, memory="")
    assert data.check_memory([REACHED], "").found == "no server is on this machine"
    assert data.check_memory([near], "").outcome == "ok"
    assert data.check_memory([replace(near, memory=None)], "").found == "server 1 offers no memory"
    other = data.check_memory([replace(near, memory="it is on another machine")], "")
    assert other.found == "server 1: it is on another machine"
    assert data.check_memory([near], "no memory can be shared").outcome == "warn"


def test_bbr_is_a_warning_only_where_a_machine_talks_to_itself():
    assert data.check_congestion("bbr", local=True).outcome == "warn"
    assert data.check_congestion("bbr", local=False).outcome == "ok"
    assert data.check_congestion("cubic", local=True).outcome == "ok"
    assert "29 times" in data.check_congestion("reno", local=False).found
    assert data.check_congestion("", local=True).outcome == "skipped"
