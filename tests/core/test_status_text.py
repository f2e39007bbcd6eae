"""What `zkv status` says to a person."""

from __future__ import annotations

from typing import Any

import pytest

from zkv_cli.tables import as_text


def status(**changes: Any) -> dict[str, Any]:
    plain: dict[str, Any] = {
        "broker": "tcp://127.0.0.1:5555",
        "policy": "bsp",
        "codec": "none",
        "codec_down": "none",
        "codec_chosen": "",
        "codec_why": "",
        "codecs": [],
        "optimizer": "sgd:lr=0.01",
        "version": 7,
        "keys": 2,
        "failed": "",
        "waiting": "",
        "placement": "by_size",
        "topology": {"name": "servers", "updates": 0, "came_apart": 0, "why": ""},
        "imbalance": 1.0,
        "load_imbalance": 1.0,
        "fan_out": {"batch": 1, "key_mean": 1.0, "key_max": 1, "together": {}},
        "servers": [],
        "servers_wanted": 1,
        "workers": [],
        "data": None,
    }
    return plain | changes


def test_tables_are_told_with_their_rows() -> None:
    table = {"key": "emb", "dim": 64, "dtype": "float32", "rows": 0, "servers": [0, 1]}
    told = status(tables=[table | {"rows_held": 1200, "bytes_held": 614_400}])
    line = "table      emb: 1200 rows of 64 float32 (614 kB with state) on 2 servers"
    assert line in as_text(told).splitlines()
    told = status(tables=[table | {"rows": 5000, "rows_held": 12, "bytes_held": 0}])
    assert "table      emb: 12 of 5000 rows of 64 float32" in as_text(told)


def share(counted: int, skipped: int = 0, returned: int = 0) -> dict[str, int]:
    return {"counted": counted, "skipped": skipped, "returned": returned}


def test_the_placement_is_told_with_its_figures_and_each_servers_part() -> None:
    server = {
        "index": 0,
        "address": "tcp://10.0.0.2:5557",
        "host": "box",
        "pid": 12,
        "value_bytes": 4_000_000,
        "blocks": 7,
        "load": 1_000_000,
        "last_heard_s": 0.21,
    }
    told = status(
        placement="by_size;together=a.*|b",
        imbalance=1.25,
        load_imbalance=1.5,
        fan_out={"batch": 1, "key_mean": 1.5, "key_max": 2, "together": {"a.*|b": 2}},
        servers=[server],
    )
    lines = as_text(told).splitlines()
    assert lines[4:7] == [
        "placement  by_size;together=a.*|b; busiest server over the mean: 1.25 of bytes, "
        "1.5 of load",
        "fan-out    a batch 1 of 1 servers, a key 1.5 (at most 2)",
        "           together: a.*|b 2",
    ]
    assert lines[9:11] == [
        "server  address              host  pid  holds    blocks  load     heard",
        "0       tcp://10.0.0.2:5557  box   12   4.00 MB  7       1.00 MB  0.2 s ago",
    ]
    assert "together" not in as_text(status())


def test_without_samples_nothing_is_said_of_them() -> None:
    assert "samples" not in as_text(status())


def test_samples_are_told_by_worker_with_each_ones_part() -> None:
    data = {
        "n": 1437,
        "pass": 2,
        "passes": 3,
        "coverage": {"2": 0.4},
        "workers": {"0": share(600), "1": share(200, returned=32)},
    }
    assert as_text(status(data=data)).splitlines()[-4:] == [
        "samples: pass 2 of 3, 40.0% of 1437 settled",
        "worker  counted  part   skipped  returned",
        "0       600      75.0%  0        0",
        "1       200      25.0%  0        32",
    ]


@pytest.mark.parametrize(
    ("coverage", "workers", "said"),
    [
        ({}, {}, "pass 1 without end, 0.0% of 10 settled"),
        ({"1": 0.0}, {"0": share(0)}, "pass 1 without end, 0.0% of 10 settled"),
        ({}, {"0": share(10)}, "pass 1 without end, 100.0% of 10 settled"),
    ],
)
def test_a_pass_before_its_first_draw_in_it_and_after_its_last(
    coverage: dict[str, float], workers: dict[str, Any], said: str
) -> None:
    data = {"n": 10, "pass": 1, "passes": None, "coverage": coverage, "workers": workers}
    assert f"samples: {said}" in as_text(status(data=data))


def test_codecs_are_told_where_there_are_any() -> None:
    assert "codecs" not in as_text(status())
    lines = as_text(status(codec="int8+ef;*.bias=none")).splitlines()
    assert "codecs     int8+ef;*.bias=none up, none down" in lines


def account(key: str, **changes: Any) -> dict[str, Any]:
    plain: dict[str, Any] = {
        "key": key,
        "codec": "int8+ef",
        "codecs": ["int8+ef"],
        "bytes_before": 400_000,
        "bytes_after": 104_000,
        "encode_s": 0.0123,
        "decode_s": 0.0,
        "residual_norm": 0.5,
        "why": "",
    }
    return plain | changes


def test_each_key_that_a_codec_encodes_has_a_line() -> None:
    why = "'w' (100 elements): int8+ef, 0.001 s a step, against 0.3 s with none"
    text = as_text(status(codec="auto", codecs=[account("w", why=why), account("b")]))
    assert text.splitlines()[-4:] == [
        "codecs: 800 kB of gradients were sent as 208 kB",
        "key  codec    before  after   encoding  decoding  kept back  why",
        "w    int8+ef  400 kB  104 kB  0.0123 s  0 s       0.5        int8+ef, 0.001 s a step, "
        "against 0.3 s with none",
        "b    int8+ef  400 kB  104 kB  0.0123 s  0 s       0.5        -",
    ]


def test_of_many_keys_the_largest_have_a_line() -> None:
    lines = as_text(status(codecs=[account(str(n)) for n in range(23)])).splitlines()
    assert lines[-1] == "and 3 smaller keys: zkv status --json"
    assert lines[-2].startswith("19 ")


def test_the_width_of_all_is_told_with_its_reason() -> None:
    text = as_text(
        status(codec="bits:heuristic", codec_chosen="int8+ef", codec_why="8 bits since step 10.")
    )
    assert "codecs     bits:heuristic up, none down\n           now int8+ef: 8 bits since" in text


def test_the_topology_is_told_unless_each_gradient_goes_to_the_servers_by_itself() -> None:
    assert not [line for line in as_text(status()).splitlines() if "topology" in line]
    shown = as_text(
        status(topology={"name": "ring", "updates": 8, "came_apart": 1, "why": "no"})
    ).splitlines()
    assert "topology   ring: 8 updates, 1 came apart" in shown
    assert "           to servers: no" in shown
