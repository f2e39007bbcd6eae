"""File descriptors: limits are raised at the start, too low ones refused, and shortage is told."""

from __future__ import annotations

import json
import logging
import shlex
import subprocess
import sys

import pytest
from harness import cluster, until
from processes import Launched, free_address

from zkv.descriptors import need
from zkv_net import descriptors

ZKV = [sys.executable, "-m", "zkv_cli"]
linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="a shell's ulimit")


def limited(limits: str, *arguments: str) -> list[str]:
    """A command of `zkv` under a shell's limits."""
    return ["sh", "-c", f"{limits} && exec {shlex.join([*ZKV, *arguments])}"]


@linux
@pytest.mark.cluster
@pytest.mark.parametrize(
    ("role", "members"),
    [
        (["broker", "--servers", "3", "--workers", "40", "--bind", "tcp://127.0.0.1:0"], 43),
        (["broker", "--max-members", "200", "--bind", "tcp://127.0.0.1:0"], 200),
        (["server", "--broker", "tcp://127.0.0.1:1"], 2),
    ],
)
def test_a_limit_that_members_would_use_up_is_refused_at_the_start(role, members):
    line = limited(f"ulimit -n {need(members) - 1}", *role)
    done = subprocess.run(line, capture_output=True, text=True, check=False, timeout=30)
    assert done.returncode == 2, done.stderr
    assert f"{members} members need {need(members)}" in done.stderr
    assert f"ulimit -Hn {need(members)}" in done.stderr


@linux
@pytest.mark.cluster
def test_a_soft_limit_is_raised_as_far_as_it_goes():
    address = free_address()
    hard = need(1 + 1) + 10
    broker = Launched(*limited(f"ulimit -Sn 40 && ulimit -Hn {hard}", "broker", "--bind", address))
    try:
        broker.line("broker at")
        asked = [*ZKV, "status", "--json", "--broker", address]
        done = subprocess.run(asked, capture_output=True, text=True, check=True, timeout=30)
        assert json.loads(done.stdout)["process"]["descriptors"]["limit"] == hard
    finally:
        broker.process.terminate()
        assert broker.end() == 143


@linux
@pytest.mark.cluster
def test_row_19_under_256_a_broker_has_room_for_96():
    """`ulimit -n 256`: as many members as there are descriptors for, and who asks for more is
    refused at the start."""
    address = free_address()
    broker = Launched(*limited("ulimit -n 256", "broker", "--bind", address))
    try:
        broker.line("broker at")
        asked = [*ZKV, "status", "--json", "--broker", address]
        done = subprocess.run(asked, capture_output=True, text=True, check=True, timeout=30)
        told = json.loads(done.stdout)["process"]["descriptors"]
        assert told["limit"] == 256
        assert told["opened"] < need(0)
    finally:
        broker.process.terminate()
        assert broker.end() == 143
    line = limited("ulimit -n 256", "broker", "--bind", address, "--max-members", "97")
    done = subprocess.run(line, capture_output=True, text=True, check=False, timeout=30)
    assert done.returncode == 2
    assert "97 members need 258" in done.stderr


def test_a_default_of_more_members_than_fit_is_lowered_to_those_that_do(monkeypatch):
    from zkv_cli.roles import broker_config
    from zkv_cli.settings import load

    monkeypatch.setattr(descriptors, "limits", lambda: (need(10) + 1, need(10) + 1))
    assert broker_config(load().broker).max_members == 10
    monkeypatch.setattr(descriptors, "limits", lambda: None)
    assert broker_config(load().broker).max_members == 4096


@pytest.mark.skipif(descriptors.limits() is None, reason="no such limit here")
async def test_a_broker_and_a_server_say_when_descriptors_run_out(monkeypatch, caplog):
    caplog.set_level(logging.WARNING)

    def told(logger: str) -> list[str]:
        return [r.getMessage() for r in caplog.records if r.name == logger]

    limit, _ = descriptors.limits()
    monkeypatch.setattr(descriptors, "opened", lambda: limit - 1)
    async with cluster(servers=1):
        for logger in ("zkv.broker", "zkv.server"):
            await until(
                lambda logger=logger: any(
                    f"{limit - 1} of at most {limit}" in text for text in told(logger)
                ),
                what=f"a warning of {logger}",
            )


@pytest.mark.skipif(descriptors.limits() is None, reason="no such limit here")
def test_a_watch_looks_once_a_second(monkeypatch):
    looked: list[float] = []
    monkeypatch.setattr(descriptors, "opened", lambda: looked.append(0.0) or 0)
    watch = descriptors.Watch(logging.getLogger("zkv.test"))
    for now in (0.0, 0.5, 1.0, 1.5, 2.0):
        watch.look(now)
    assert len(looked) == 3


def test_what_is_open_is_counted():
    import os

    before = descriptors.opened()
    fds = [os.open(os.devnull, os.O_RDONLY) for _ in range(5)]
    try:
        assert descriptors.opened() == before + 5 or before == 0
    finally:
        for fd in fds:
            os.close(fd)
