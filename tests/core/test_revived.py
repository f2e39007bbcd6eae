"""Which servers a launcher starts again, and how often."""

from __future__ import annotations

from typing import Any

import pytest

from zkv.errors import ClusterNotReady
from zkv_cli import cluster as c
from zkv_cli import launch
from zkv_cli.settings import Settings


class Child:
    """A process that is not there."""

    def __init__(self, label: str) -> None:
        self.label, self.gone, self.code, self.pid = label, False, 137, 7

    def obituary(self) -> str:
        return f"{self.label} was ended"


class Children:
    """Starts nothing, and notes it."""

    def __init__(self) -> None:
        self.started: list[list[str]] = []

    def start(self, label: str, command: list[str], environment: Any) -> Child:
        self.started.append(command)
        return Child(label)


def made() -> tuple[Any, Any]:
    servers: list[Any] = [Child("server 0"), Child("server 1")]
    broker: Any = Child("broker")
    return Children(), c.Cluster("tcp://b:1", broker, servers, True, ["zkv", "server"])


def told(*kept: str, failed: str | None = None, copies: int = 0) -> Any:
    status: dict[str, Any] = {
        "failed": failed,
        "snapshots": {"gone_back": {"can_go_back_to": list(kept)}},
    }
    status["replicas"] = {"standing_by": copies}
    return lambda address, timeout_s: status


def test_a_lost_server_is_started_again_three_times_in_a_minute(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 100.0
    monkeypatch.setattr(c.time, "monotonic", lambda: now)
    monkeypatch.setattr(c, "ask_status", told("zkv-1"))
    children, cluster = made()
    for count in range(1, c.REVIVE_MAX + 1):
        again = c.revived(children, cluster, cluster.servers[1])
        assert again is cluster.servers[1]
        assert again.label == "server 1"
        assert children.started == [["zkv", "server"]] * count
    assert c.revived(children, cluster, cluster.servers[1]) is None
    now += c.REVIVE_S
    assert c.revived(children, cluster, cluster.servers[1]) is not None


def test_where_copies_stand_by_another_server_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(c, "ask_status", told(copies=3))
    children, cluster = made()
    assert c.revived(children, cluster, cluster.servers[0]) is cluster.servers[0]


def test_none_is_started_again_that_could_not_go_back_to_anything(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def silent(address: str, timeout_s: float) -> Any:
        raise ClusterNotReady("no broker has answered")

    for status in (told(), told("zkv-1", failed="it is over"), silent):
        monkeypatch.setattr(c, "ask_status", status)
        children, cluster = made()
        assert c.revived(children, cluster, cluster.servers[0]) is None
    monkeypatch.setattr(c, "ask_status", told("zkv-1"))
    stranger: Any = Child("worker 0")
    assert c.revived(children, cluster, stranger) is None
    cluster.broker.gone = True
    assert c.revived(children, cluster, cluster.servers[0]) is None
    assert c.revived(children, None, cluster.servers[0]) is None
    assert children.started == []


@pytest.mark.parametrize("again", [True, False])
def test_zkv_run_goes_on_while_a_lost_server_is_started_again(
    monkeypatch: pytest.MonkeyPatch, again: bool
) -> None:
    children, cluster = made()
    found = Child("server 1") if again else None
    monkeypatch.setattr(launch.c, "revived", lambda *given: found)
    watch = launch._Watch(Any, children, [], cluster, Settings())  # type: ignore[arg-type]
    watch._ended(cluster.servers[1])
    assert (watch.code, watch.deadline is None) == ((0, True) if again else (1, False))
