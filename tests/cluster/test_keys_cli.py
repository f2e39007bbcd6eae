"""`zkv keys` as it is typed, and the other commands with the keys that it makes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from processes import launched, program

from zkv_net.keys import KeyFolder

pytestmark = pytest.mark.cluster

PATIENCE_S = 30
TRAIN = """
import numpy as np, zkv
with zkv.connect() as worker:
    worker.init({"w": np.zeros(3, np.float32)}, rule="sgd:lr=1")
    with worker.batch() as batch:
        batch.push("w", -np.ones(3, np.float32))
    batch.wait()
    print("reached", worker.pull("w").tolist(), worker.stats()["transport"])
"""


def zkv(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "zkv_cli", *arguments],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        env={**os.environ, **variables},
        check=False,
    )


def told(*arguments: str, **variables: str) -> str:
    done = zkv(*arguments, **variables)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_keys_are_made_listed_added_and_revoked(tmp_path: Path) -> None:
    head, node = {"ZKV_KEYS": str(tmp_path / "head")}, {"ZKV_KEYS": str(tmp_path / "node")}
    said = told("keys", "new", "broker", **head)
    broker = KeyFolder(tmp_path / "head").own()
    assert f"zkv keys new worker --broker-key {broker.public}" in said
    assert broker.secret not in said
    said = told("keys", "new", "server,worker", "--name", "node1", **node)
    own = KeyFolder(tmp_path / "node").own()
    assert f"zkv keys add server,worker node1 {own.public}" in said
    assert "the broker's key is not known here yet" in said
    # The pair stays; only the trust is new.
    said = told("keys", "new", "worker", "--broker-key", broker.public, **node)
    assert "not known" not in said
    assert KeyFolder(tmp_path / "node").own() == own
    assert KeyFolder(tmp_path / "node").broker() == broker.public
    assert "is let in" in told("keys", "add", "server,worker", "node1", own.public, **head)
    plain = json.loads(told("keys", "list", "--json", **head))
    assert plain["own"]["key"] == plain["broker"] == broker.public
    assert plain["authorized"] == [
        {"name": "node1", "roles": ["server", "worker"], "key": own.public}
    ]
    listed = told("keys", "list", **head)
    assert own.public in listed
    assert "secret" not in listed
    assert "is let in no more" in told("keys", "revoke", "node1", **head)
    assert json.loads(told("keys", "list", "--json", **head))["authorized"] == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("new", "root"), "'root' is no role; there are worker, server, follower, admin"),
        (("new", "worker", "--name", "a/b"), "cannot be the name of a key"),
        (("new", "worker", "--broker-key", "xyz"), "is no public key"),
        (("new", "broker"), "is there already"),
        (("add", "worker", "../x", "a" * 64), "cannot be the name of a key"),
        (("add", "worker", "x", "a" * 63), "is no public key"),
        (("add", "boss", "x", "a" * 64), "is no role"),
        (("revoke", "nobody"), "no key 'nobody' is let in"),
    ],
)
def test_misuse_is_one_message_and_nothing_is_written(tmp_path, arguments, words) -> None:
    KeyFolder(tmp_path / "keys").make("broker", ("broker",))
    before = sorted(p.name for p in (tmp_path / "keys").rglob("*"))
    done = zkv("keys", *arguments, "--keys", str(tmp_path / "keys"))
    assert done.returncode == 2
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert sorted(p.name for p in (tmp_path / "keys").rglob("*")) == before


def test_keys_are_added_at_a_broker_only(tmp_path: Path) -> None:
    KeyFolder(tmp_path).make("node", ("worker",))
    done = zkv("keys", "add", "worker", "x", "a" * 64, "--keys", str(tmp_path))
    assert done.returncode == 2
    assert "has no broker's keys" in done.stderr


def test_all_commands_use_the_keys_that_are_named(tmp_path: Path) -> None:
    head, admin = str(tmp_path / "head"), str(tmp_path / "admin")
    told("keys", "new", "broker", "--keys", head)
    key = KeyFolder(tmp_path / "head").own().public
    told("keys", "new", "admin", "--name", "boss", "--broker-key", key, "--keys", admin)
    told("keys", "add", "admin", "boss", KeyFolder(tmp_path / "admin").own().public, "--keys", head)
    train = program(tmp_path, TRAIN)
    with launched("up", "--servers", "2", "--bind", "tcp://127.0.0.1:0", "--keys", head) as up:
        broker = up.line(r"broker at (tcp://\S+)")[1]
        at = ("--broker", broker)
        assert "reached [1.0, 1.0, 1.0]" in told("run", *at, "--keys", head, train)
        assert "lr=0.5 from version" in told("set", *at, "--keys", admin, "lr=0.5")
        assert json.loads(told("status", *at, "--keys", admin, "--json"))["version"] == 1
        told("rebalance", *at, "--keys", admin, "--dry-run")
        model = str(tmp_path / "model.safetensors")
        assert "version 1, 1 keys" in told("export", *at, "--keys", admin, model)
        done = zkv("status", *at)
        assert done.returncode == 1
        assert "asks for keys" in done.stderr
        done = zkv("run", *at, "--keys", admin, train)
        assert "may not be a worker" in done.stderr
        assert done.returncode == 1


def test_a_run_with_keys_of_its_own_cluster(tmp_path: Path) -> None:
    told("keys", "new", "broker", "--keys", str(tmp_path))
    said = told("run", "--keys", str(tmp_path), "-n", "2", program(tmp_path, TRAIN))
    assert said.count("reached [1.0, 1.0, 1.0] memory") == 2


def test_a_secret_that_others_can_read_is_refused_with_the_command_that_mends_it(tmp_path) -> None:
    told("keys", "new", "broker", "--keys", str(tmp_path))
    (tmp_path / "secret.key").chmod(0o644)
    done = zkv("broker", "--bind", "tcp://127.0.0.1:0", "--keys", str(tmp_path))
    assert done.returncode == 2
    assert f"chmod 600 {tmp_path / 'secret.key'}" in done.stderr
