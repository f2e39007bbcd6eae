"""What an update takes under each topology: the measured machine's limits, laws, and `zkv plan`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from zkv import aggregation_costs
from zkv.costs import server_bytes, transfer_s
from zkv.topology import NAMES, Member, routes, sent_bytes, topology
from zkv.topology_costs import Cost, Site, choose, cost, flows, sentence, waits
from zkv_cli.main import app

LINK = 956e6
"""What was measured of links of 1 Gbit/s."""
MB = 10**6


def plan(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["plan", "topology", *arguments])


def figures(*arguments: str) -> dict[str, Any]:
    result = plan(*arguments, "--json")
    assert result.exit_code == 0, result.stderr
    told: dict[str, Any] = json.loads(result.stdout)
    return told


def site(workers: str, servers: str, link: float = LINK, **more: Any) -> Site:
    """Return a site: the host of each worker and server, as a digit each."""
    at = [tuple(map(int, text)) for text in (workers, servers)]
    return Site(at[0], at[1], (link,) * (1 + max(*at[0], *at[1])), **more)


def test_the_limits_that_measurements_came_to() -> None:
    """100 MB for each of 2 or 4 workers at 956 Mbit/s: the theory of the table of measurements."""
    for name, where, took_s in (
        ("servers", site("01", "01"), 0.837),
        ("servers", site("01", "23"), 0.837),
        ("servers", site("01", "2"), 1.674),
        ("servers", site("0123", "4567"), 0.837),
        ("servers", site("0123", "0123"), 1.255),
        ("servers", site("0123", "45"), 1.674),
        ("servers", site("0123", "4"), 3.347),
        ("one-server", site("0123", "4567"), 3.347),
    ):
        assert cost(name, where, 100 * MB).seconds == pytest.approx(took_s, abs=5e-4)
    # A ring by itself takes 1.255 s; here each also sends a quarter to the server.
    ring = cost("ring", site("0123", "4"), 100 * MB)
    alone_s = aggregation_costs.ring_all_reduce_s(100 * MB, 4, LINK)
    assert alone_s == pytest.approx(1.255, abs=5e-4)
    assert ring.seconds == pytest.approx(alone_s + transfer_s(25 * MB, LINK))


def test_figures_are_those_of_the_other_calculators() -> None:
    in_parts = aggregation_costs.aggregate_in_parts_s(160 * MB, 4, 128e9)
    beside = cost("servers", site("0123", "0123", 128e9, memory=1e15), 160 * MB)
    assert beside.seconds == pytest.approx(in_parts) == pytest.approx(0.015)
    central = cost("one-server", site("0123", "45", 128e9), 160 * MB)
    assert central.nbytes == server_bytes(160 * MB, 4)


@given(
    st.lists(st.integers(0, 3), min_size=2, max_size=8),
    st.lists(st.integers(0, 5), min_size=1, max_size=4),
    st.sampled_from(["ring", "hierarchical"]),
)
def test_bytes_are_those_that_members_send(
    workers: list[int], servers: list[int], name: str
) -> None:
    """The plan's flows and the routes' bytes are one thing, for blocks that can be shared."""
    where = Site(tuple(workers), tuple(servers), (LINK,) * 6)
    count = len(workers)
    sizes = dict.fromkeys(range(count * 6), 1000)
    total = sum(sizes.values())
    told = sent_bytes(topology(name), where.members, sizes)
    found = flows(name, where, total)
    between = sum(one for one, _ in told.values())
    up = sum(one for _, one in told.values())
    # What goes up comes back as values.
    assert sum(found.values()) == pytest.approx(between + 2 * up)


@given(st.integers(2, 8), st.integers(1, 8))
def test_of_each_host_one_contribution_travels(each: int, hosts: int) -> None:
    where = Site(
        tuple(h for h in range(hosts) for _ in range(each)), (hosts,), (1e9,) * (hosts + 1)
    )
    found = flows("hierarchical", where, 8 * MB)
    assert all(found[host, hosts] == 8 * MB for host in range(hosts))
    assert all(found[hosts, host] == 8 * MB for host in range(hosts))
    assert flows("servers", where, 8 * MB)[0, hosts] == each * 8 * MB


def test_the_soonest_is_chosen_and_the_sentence_says_why() -> None:
    def chosen(where: Site) -> tuple[str, str]:
        choice = choose(where, 100 * MB)
        hosts = [f"h{host}" for host in range(len(where.links))]
        return choice.best.name, sentence(
            choice, hosts, [f"{c.seconds:.3f} s" for c in choice.costs]
        )

    name, why = chosen(site("0123", "4"))
    assert name == "ring"
    assert why == (
        "ring: 1.464 s, as the link of h0 carries 175 MB in; the next, servers, takes 3.347 s, as "
        "the link of h4 carries 400 MB in"
    )
    assert chosen(site("0123", "4567"))[0] == "servers"
    assert chosen(site("00001111", "2"))[0] == "hierarchical"
    name, why = chosen(site("0", "1"))
    assert name == "servers"
    assert "nothing else brings anything here" in why
    # Latency of 2N messages makes a ring slower than its bytes do.
    assert chosen(site("0123", "4", latency_s=0.5))[0] == "servers"
    assert waits("ring", site("0123", "4")) == 8


def test_a_tie_goes_to_what_needs_the_least() -> None:
    """All on one host: whatever the way, its memory carries 400 MB."""
    choice = choose(site("00", "0"), 100 * MB)
    assert {one.nbytes for one in choice.costs} == {400 * MB}
    assert choice.best.name == "servers"
    told = sentence(choice, ["a"], [str(one.seconds) for one in choice.costs])
    assert "no other is faster by more than 3 %" in told


def test_what_is_wrong_is_named() -> None:
    for workers, servers, links, memory in (
        ((), (0,), (1e9,), 1e9),
        ((0,), (), (1e9,), 1e9),
        ((0, 2), (0,), (1e9,), 1e9),
        ((0,), (0,), (0.0,), 1e9),
        ((0,), (0,), (1e9,), 0.0),
    ):
        with pytest.raises(ValueError, match="must be from"):
            Site(workers, servers, links, memory)
    with pytest.raises(ValueError, match="size_bytes"):
        cost("ring", site("01", "2"), -1)


# --- the command -----------------------------------------------------------------------------


def test_the_command_tells_all_and_chooses() -> None:
    told = figures("--hosts", "1,1,1,1", "--links", "956Mbit/s", "--size", "100MB")
    assert told["chosen"] == "ring"
    assert told["why"].startswith("ring: 1.46444 s, as the link of host 0 carries 175 MB")
    assert [one["topology"] for one in told["topologies"]] == ["servers", "ring"]
    assert set(told["left_out"]) == {"one-server", "hierarchical"}
    assert told["topologies"][0]["busiest_host"] == "server 0's host"
    shown = plan("--hosts", "1,1,1,1", "--links", "956Mbit/s", "--size", "100MB").stdout
    assert "hierarchical: no two workers are on one host" in shown
    assert shown.rstrip().endswith(told["why"])
    slow = figures("--hosts", "2,2", "--links", "1Gb/s,100Mb/s", "--servers", "0", "--size", "10MB")
    assert slow["hosts"] == {"host 0": 1e9, "host 1": 1e8}


def status(rate: float) -> dict[str, Any]:
    """Return what matters here of a status: four workers on two hosts, one server on a third."""
    return {
        "workers": [
            {"number": n, "host": f"box{n // 2}", "observer": False, "link_rate": rate}
            for n in (1, 0, 3, 2)
        ],
        "servers": [{"host": "head", "value_bytes": 100 * MB}],
    }


def test_a_running_clusters_status_has_hosts_sizes_and_measured_links(tmp_path: Path) -> None:
    path = tmp_path / "status.json"
    path.write_text(json.dumps(status(125e6)))
    told = figures("--status", str(path))
    assert told["hosts"] == {"box0": 1e9, "box1": 1e9, "head": 1e9}
    assert told["size_bytes"] == 100 * MB
    assert told["chosen"] == "hierarchical"
    given = figures("--status", str(path), "--links", "10Gb/s,10Gb/s,1Gb/s")
    assert given["hosts"]["head"] == 1e9
    assert given["hosts"]["box0"] == 1e10
    path.write_text(json.dumps(status(0.0)))
    result = plan("--status", str(path))
    assert result.exit_code == 2
    assert "no worker on box0 has measured its link" in result.stderr
    assert "--links" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ((), "give --hosts, --links and --size"),
        (("--hosts", "1,1", "--links", "1,1Gb/s", "--size", "1MB"), "--links"),
        (("--hosts", "1,1", "--links", "1Gb/s,1Gb/s", "--size", "1MB"), "2 links for 3 hosts"),
        (("--hosts", "1", "--links", "1Gb/s", "--size", "1MB", "--servers", "7"), "host"),
        (("--hosts", "0", "--links", "1Gb/s", "--size", "1MB"), "workers"),
        (("--status", "nowhere.json"), "nowhere.json"),
        (("--status", "x", "--hosts", "1"), "leave out --hosts"),
    ],
)
def test_wrong_use_is_one_line(arguments: tuple[str, ...], why: str) -> None:
    result = plan(*arguments)
    assert result.exit_code == 2
    assert why in result.stderr


def test_every_name_has_a_cost() -> None:
    where = site("001", "2")
    assert {type(cost(name, where, MB)) for name in NAMES} == {Cost}
    assert routes(topology("ring"), [Member(0, "a"), Member(1, "a")], 0, {0: 4})
