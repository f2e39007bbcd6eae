"""`zkv simulate --train digits`, and compute times out of a live run's recording."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from harness import cluster
from typer.testing import CliRunner

import zkv
from zkv.errors import ProtocolError
from zkv_brokers.recorded_times import recorded_times
from zkv_brokers.recording import LENGTH_BYTES, records
from zkv_cli import digits_model
from zkv_cli.main import app

ROOT = Path(__file__).resolve().parent.parent.parent


def simulate(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["simulate", *arguments])


class FakeBatch:
    """A batch of `FakeWorker`, which keeps what is pushed."""

    def __init__(self, worker: FakeWorker, weight: float) -> None:
        self.worker, self.weight = worker, weight
        self.pushed: dict[str, Any] = {}

    def __enter__(self) -> FakeBatch:
        return self

    def __exit__(self, *error: object) -> None:
        self.worker.batches.append((self.pushed, self.weight))

    @property
    def params(self) -> dict[str, Any]:
        return dict(self.worker.model)

    def set_loss(self, loss: float) -> None:
        assert np.isfinite(loss)

    def push(self, key: str, gradient: Any) -> None:
        self.pushed[key] = gradient


class FakeWorker:
    """Stands for a live worker of three, whose model never changes."""

    def __init__(self, rank: int) -> None:
        self.rank, self.world = rank, 3
        self.model: dict[str, Any] = {}
        self.batches: list[tuple[dict[str, Any], float]] = []

    def __enter__(self) -> FakeWorker:
        return self

    def __exit__(self, *error: object) -> None:
        """Nothing to end."""

    def init(self, params: dict[str, Any]) -> None:
        self.model = params

    def batch(self, weight: float) -> FakeBatch:
        return FakeBatch(self, weight)

    def barrier(self) -> None:
        """Nobody to wait for."""

    def pull(self, keys: list[str]) -> dict[str, Any]:
        return {key: self.model[key] for key in keys}

    def stats(self) -> dict[str, Any]:
        return {}


@pytest.mark.source
@pytest.mark.parametrize("rank", [0, 2])
def test_a_simulated_worker_computes_what_the_live_one_does(
    rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("sklearn")
    live = FakeWorker(rank)
    monkeypatch.setattr(zkv, "connect", lambda: live)
    monkeypatch.setattr(sys, "argv", ["digits.py", "--seed", "5", "--passes", "2"])
    monkeypatch.delenv("ZKV_REPORT", raising=False)
    monkeypatch.setitem(sys.modules, "cupy", None)
    runpy.run_path(str(ROOT / "scripts" / "digits.py"), run_name="__main__")
    learner = digits_model.Digits(workers=3, seed=5)
    for key, value in learner.initial().items():
        assert value.tobytes() == live.model[key].tobytes()
    assert len(live.batches) == 30
    for number, (pushed, weight) in enumerate(live.batches):
        gradients, samples = learner.gradients(live.model, rank, number)
        assert samples == weight
        for key, gradient in gradients.items():
            assert np.array_equal(gradient, pushed[key]), (number, key)


def test_the_digits_reach_a_low_target_under_each_policy() -> None:
    pytest.importorskip("sklearn")
    arguments = ("--compute", "1,1,4", "--train", "digits", "--target", "0.6", "--seeds", "2")
    result = simulate(*arguments, "--json")
    assert result.exit_code == 0, result.stderr
    runs = json.loads(result.stdout)["policies"]
    assert len(runs) == 7
    for run in runs:
        told = run["time_to_target"]
        assert (told["target"], told["seeds"], told["reached"]) == (0.6, 2, 2)
        assert told["min"] <= told["mean"] <= told["max"]
        # The figures beside it are those of the first seed's run, which ends at the target.
        assert told["times"][0] == run["time"] == run["updates"][-1]
    again = simulate(*arguments, "--json")
    assert again.stdout == result.stdout


def test_a_target_that_is_not_reached_is_said() -> None:
    pytest.importorskip("sklearn")
    arguments = ("--compute", "1,1", "--policy", "bsp", "--train", "digits", "--target", "1")
    text = simulate(*arguments, "--updates", "2").stdout
    assert "time to 100 % test accuracy, 1 seed:" in text
    assert text.splitlines()[-1].startswith("bsp     0 of 1   not reached (")
    plain = json.loads(simulate(*arguments, "--passes", "1", "--json").stdout)
    told = plain["policies"][0]["time_to_target"]
    assert (told["reached"], told["mean"], told["times"]) == (0, None, [None])


def test_what_is_missing_or_wrong_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    some = ("--compute", "1,1", "--policy", "bsp")
    for arguments, words in [
        (("--target", "0.9", "--seeds", "2", "--updates", "1"), "--target, --seeds: only with"),
        (("--train", "mnist"), "'mnist': what can be trained is digits"),
        (("--train", "digits", "--seeds", "0"), "--seeds must be 1 to"),
        (("--train", "digits", "--target", "97"), "--target must be above 0 and at most 1"),
        (("--train", "digits", "--until", "0"), "--until must be above 0"),
    ]:
        result = simulate(*some, *arguments)
        assert result.exit_code == 2, arguments
        assert words in result.stderr
    digits_model._split.cache_clear()
    monkeypatch.setitem(sys.modules, "sklearn", None)
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    result = simulate(*some, "--train", "digits")
    assert result.exit_code == 2
    assert "--train digits needs scikit-learn: pip install 'zkv[demo]'" in result.stderr


async def recorded(path: Path, policy: str) -> dict[int, tuple[int, int]]:
    """Record a run of two workers; returns how many batches were committed and begun, by rank."""
    counts = {}

    async def body(worker: Any) -> None:
        await worker.init({"w": np.zeros(5, np.float32)})
        for number in range(4 + worker.rank):
            async with worker.batch() as batch:
                batch.push("w", np.full(5, number, np.float32))
        await worker.barrier()
        stats = worker.stats()
        counts[worker.rank] = stats["outcomes"]["committed"], stats["batches"]

    async with cluster(1, policy_text=policy, record=path) as made:
        await made.run(body, body)
    return counts


def retimed(path: Path, factor: float) -> bytes:
    """The same recording on a clock that runs slower or faster."""
    out = b""
    for _, record in records(path):
        if record[0] == "turn":
            record[1] *= factor
        packed = msgspec.msgpack.encode(record)
        out += len(packed).to_bytes(LENGTH_BYTES, "big") + packed
    return out


@pytest.mark.parametrize("policy", ["asp", "k-bsp:1"])
async def test_a_recording_has_a_time_for_each_batch_that_was_finished(
    policy: str, tmp_path: Path
) -> None:
    path = tmp_path / "broker-1.rec"
    counts = await recorded(path, policy)
    times, warnings = recorded_times(tmp_path)
    assert warnings == ()
    found = dict(zip(times.workers, (rule.values for rule in times.by_worker), strict=True))
    for rank, (committed, begun) in counts.items():
        # Some that were finished may have been too late for the update, under k-bsp.
        assert committed <= len(found.get(rank, ())) <= begun
        if policy == "asp":
            assert len(found[rank]) == 4 + rank
    # They come from the recorded clock alone: half of everything is exact.
    path.write_bytes(retimed(path, 0.5))
    halved, _ = recorded_times(path)
    for rule, before in zip(halved.by_worker, found.values(), strict=True):
        assert list(rule.values) == pytest.approx([max(t / 2, 1e-9) for t in before])
    result = simulate("--trace", str(tmp_path), "--policy", "bsp", "--updates", "3", "--json")
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["policies"][0]["workers"] == list(times.workers)


async def test_a_recording_that_breaks_off_is_used_as_far_as_it_goes(tmp_path: Path) -> None:
    path = tmp_path / "broker-1.rec"
    await recorded(path, "asp")
    whole, _ = recorded_times(path)
    last = list(records(path))[-1][0]
    path.write_bytes(path.read_bytes()[: last + 3])
    torn, warnings = recorded_times(path)
    assert torn == whole
    assert warnings == (f"{path}: the recording breaks off; its whole part is used",)
    result = simulate("--trace", str(path), "--policy", "bsp", "--updates", "1")
    assert result.exit_code == 0
    assert f"warning: {warnings[0]}" in result.stderr


def test_a_folder_or_file_that_is_no_recording_is_named(tmp_path: Path) -> None:
    end = ("--policy", "bsp", "--updates", "1")
    result = simulate("--trace", str(tmp_path), *end)
    assert result.exit_code == 2
    assert f"{tmp_path}: no broker's recording" in result.stderr
    for name in ("broker-1.rec", "broker-2.rec"):
        (tmp_path / name).write_bytes(b"nothing")
    assert "broker-1.rec, broker-2.rec" in simulate("--trace", str(tmp_path), *end).stderr
    with pytest.raises(ProtocolError, match=r"broker-1\.rec"):
        recorded_times(tmp_path / "broker-1.rec")
