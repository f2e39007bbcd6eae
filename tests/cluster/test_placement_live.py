"""Placements over real sockets: the same model, whoever comes first and wherever its blocks lie."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness import cluster

from zkv.aio import AsyncWorker
from zkv.dtypes import Array
from zkv.errors import ConfigError, ProtocolError
from zkv.placements import placement
from zkv.policy import policy
from zkv_brokers.broker import Broker, BrokerConfig
from zkv_brokers.recorded_blocks import recorded_blocks

SIZES = {"embed.w": 600_000, "embed.b": 30, "mid.w": 40_000, "head.w": 20_000, "head.b": 5}
TEXTS = (
    "by_size",
    "by_hash:8",
    "by_load:embed.*=1,head.*=50",
    "by_size;pin:embed.*=1;together=mid.w|head.*;bytes=3MB",
)


async def train(worker: AsyncWorker) -> dict[str, Array]:
    """Three batches, whose keys every worker names in an order of its own."""
    keys = list(SIZES)
    keys = keys[worker.rank :] + keys[: worker.rank]
    await worker.init({key: np.full(SIZES[key], 0.5, np.float32) for key in keys})
    chance = np.random.default_rng(worker.rank)
    for _ in range(3):
        async with worker.batch() as batch:
            for key in SIZES:
                batch.push(key, chance.standard_normal(SIZES[key]).astype(np.float32))
        await batch.wait()
    pulled: dict[str, Array] = await worker.pull()
    return pulled


async def test_where_blocks_lie_changes_no_bit_whoever_names_the_keys_how() -> None:
    """D02: the same name is the same value on the same server, whatever the order of the keys."""
    seen: list[dict[str, Array]] = []
    wheres = []
    for text in TEXTS:
        async with cluster(3, optimizer="sgd:lr=0.1", placement=text) as made:
            seen += await made.run(train, train)
            router = made.broker.router
            assert router is not None
            layout = router.layout
            wheres.append({block.bid: block.server for block in layout.blocks.values()})
            if "pin" in text:
                fan_out = {
                    key: {b.server for b in layout.blocks_with(layout.kid(key))} for key in SIZES
                }
                assert fan_out["embed.w"] == fan_out["embed.b"] == {1}
                assert len(fan_out["mid.w"] | fan_out["head.w"] | fan_out["head.b"]) == 1
    for one in seen[1:]:
        for key in SIZES:
            np.testing.assert_array_equal(one[key], seen[0][key])
    assert len({tuple(sorted(where.items())) for where in wheres}) == len(TEXTS)


async def test_the_status_says_how_it_is_placed() -> None:
    text = "by_hash;pin:embed.*=1;together=head.*"
    async with cluster(3, placement=text) as made, made.worker(0) as worker:
        await worker.init({key: np.zeros(size, np.float32) for key, size in SIZES.items()})
        told: dict[str, Any] = await worker.status()
    assert told["placement"] == text
    assert told["fan_out"]["together"] == {"head.*": 1}
    assert told["fan_out"]["key_max"] == 1
    held = [server["value_bytes"] for server in told["servers"]]
    assert sum(held) == 4 * sum(SIZES.values())
    assert held[1] >= 4 * 600_030
    assert [server["load"] for server in told["servers"]] == held
    assert sum(server["blocks"] for server in told["servers"]) >= 5
    assert told["imbalance"] == told["load_imbalance"] == round(max(held) * 3 / sum(held), 4)


async def test_a_model_without_room_is_refused_to_the_worker_and_a_smaller_one_is_not() -> None:
    async with cluster(2, placement="by_size;bytes=1MB") as made, made.worker(0) as worker:
        with pytest.raises(
            ConfigError, match=r"'w' \(a block with 1,048,576 of its 2,400,000 bytes\) is"
        ):
            await worker.init({"w": np.zeros(600_000, np.float32)})
        await worker.init({"w": np.zeros(200_000, np.float32)})
        assert (await worker.pull("w")).shape == (200_000,)


async def test_a_pin_may_name_a_server_by_the_name_that_it_was_started_with() -> None:
    named: dict[str, Any] = {"server_options": {"name": "box"}}
    params = {"w": np.zeros(600_000, np.float32)}
    text = "by_size;pin:w=box;pin:v=no-such"
    async with cluster(2, placement=text, **named) as made, made.worker(0) as worker:
        with pytest.raises(ConfigError, match=r"pin:v=no-such .* are 0 to 1 \(box, box\)"):
            await worker.init(params)
    text = "by_size;pin:w=box"
    async with cluster(2, placement=text, **named) as made, made.worker(0) as worker:
        await worker.init(params)
        told: dict[str, Any] = await worker.status()
    assert [server["value_bytes"] for server in told["servers"]] == [2_400_000, 0]


async def test_a_broker_does_not_start_with_a_placement_that_none_can_meet() -> None:
    for text, error in (("by_size;pin:w=2", ConfigError), ("by_name", ValueError)):
        config = BrokerConfig(policy("bsp"), bind="tcp://127.0.0.1:0", servers=2, placement=text)
        broker = Broker(config)
        with pytest.raises(error, match=r"pin:w=2 names no server|'by_name' is no rule"):
            broker.start()


async def test_a_recorded_model_is_placed_anew(tmp_path: Path) -> None:
    file = tmp_path / "broker-1.rec"
    async with cluster(3, record=file, codec="int8;embed.*=none") as made:
        await made.run(train)
    plain = recorded_blocks(tmp_path)
    assert plain["after"] is None
    assert plain["moved"] == []
    assert plain["text"] is None
    before = plain["before"]
    assert before["placement"] == "by_size"
    assert sum(server["value_bytes"] for server in before["servers"]) == 4 * sum(SIZES.values())
    # int8 leaves a quarter of mid.w and head.w; a small key is sent as it is.
    dense = 4 * (600_000 + 30 + 5)
    assert sum(server["load"] for server in before["servers"]) == pytest.approx(
        dense + 60_000, rel=0.01
    )

    same = recorded_blocks(file, placement("by_size"))
    assert same["after"] == before
    assert same["moved"] == []

    told = recorded_blocks(file, placement("by_load;pin:embed.b=2;together=head.*"), 4)
    assert len(told["after"]["servers"]) == 4
    assert told["text"].startswith("by_load:")
    assert ",embed.w=2400000" in told["text"].replace(":", ",")
    again = recorded_blocks(file, placement(told["text"]), 4)
    assert again["after"]["servers"] == told["after"]["servers"]
    assert told["after"]["fan_out"]["together"] == {"head.*": 1}
    for row in told["moved"]:
        assert 0 < row["bytes"] <= 4 * SIZES[row["key"]]
    assert {row["key"]: row["why"] for row in told["moved"]}.get("embed.b", "pin:embed.b=2") == (
        "pin:embed.b=2"
    )

    with pytest.raises(ConfigError, match=r"key 'embed\.w'"):
        recorded_blocks(file, placement("by_size;bytes=1kB"))
    (tmp_path / "other").mkdir()
    with pytest.raises(ValueError, match="no broker's recording"):
        recorded_blocks(tmp_path / "other")
    (tmp_path / "server.rec").write_bytes(file.read_bytes()[:10])
    with pytest.raises(ProtocolError, match="no recording of a broker"):
        recorded_blocks(tmp_path / "server.rec")


async def test_a_recording_without_a_model_is_named(tmp_path: Path) -> None:
    file = tmp_path / "broker-1.rec"
    async with cluster(1, record=file) as made, made.worker(0) as worker:
        await worker.status()
    with pytest.raises(ProtocolError, match="no model was initialised in it"):
        recorded_blocks(file)
