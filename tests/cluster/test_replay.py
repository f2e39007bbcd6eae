"""A recorded run lives again in one process, bit for bit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from harness import cluster

from zkv.errors import ProtocolError
from zkv_brokers.recording import records
from zkv_brokers.replay import replay

PARAMS = {
    "w": np.linspace(-1, 1, 300_000, dtype=np.float32).reshape(300, 1000),
    "b": np.zeros(7, np.float16),
}


async def train(worker, batches: int = 4) -> None:
    await worker.init(PARAMS)
    await worker.init({"n": np.zeros(3)}, plain=True, rule="assign")
    rng = np.random.default_rng(worker.rank)
    for _ in range(batches):
        async with worker.batch(weight=1.0 + worker.rank) as batch:
            for key, value in batch.params.items():
                if key != "n":
                    batch.push(key, rng.standard_normal(value.shape).astype(value.dtype))
        await worker.pushpull("n", np.ones(3))


@pytest.mark.parametrize("policy", ["bsp", "asp", "k-bsp:1"])
async def test_a_recorded_run_is_replayed_bit_for_bit(policy: str, tmp_path: Path) -> None:
    files = [tmp_path / f"server-{index}.rec" for index in range(2)]
    async with cluster(
        2,
        policy_text=policy,
        optimizer="adam:lr=0.01",
        record=tmp_path / "broker.rec",
        server_records=files,
    ) as made:
        await made.run(train, train)
    broker = replay(tmp_path / "broker.rec")
    assert broker.same, broker
    assert broker.version >= 4
    servers = [replay(path) for path in files]
    for server in servers:
        assert server.same, server
        assert (server.entries, server.version) == (broker.entries, broker.version)


async def test_a_recording_that_was_changed_or_breaks_off_is_told(tmp_path: Path) -> None:
    path = tmp_path / "server.rec"
    async with cluster(1, server_records=[path]) as made:
        await made.run(train)
    whole = path.read_bytes()
    last = list(records(path))[-1][0]

    path.write_bytes(whole[: last + 3])
    broken = replay(path)
    assert broken.recorded is None
    assert not broken.same
    assert broken.digest == replay_of(path, whole).digest

    changed = bytearray(whole)
    at = whole.index(np.float32(-1).tobytes() * 1)
    changed[at] ^= 1
    assert not replay_of(path, bytes(changed)).same

    with pytest.raises(ProtocolError, match="no recording"):
        replay_of(path, b"\x00\x00\x00\x02\x91\xa0" + whole)
    with pytest.raises(ProtocolError, match="byte 0"):
        replay_of(path, b"\x00\x00\x00\x01\xc1")


def replay_of(path: Path, content: bytes):
    path.write_bytes(content)
    return replay(path)
