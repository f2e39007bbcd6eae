"""The broker's catalog under a placement, and what its status says of it."""

from __future__ import annotations

from typing import Any

import pytest

from zkv import control as c
from zkv.errors import ConfigError, ZkvError
from zkv.layout import Layout
from zkv.optimizer_spec import optimizer
from zkv.placements import placement
from zkv.wire import KeySpec
from zkv_brokers.catalog import Catalog, Pending
from zkv_brokers.coding import Coding
from zkv_brokers.decisions import Decisions
from zkv_brokers.placed import Placed
from zkv_brokers.recorded_blocks import _with_loads

SGD = optimizer("sgd:lr=0.1")
KIB = 1024


def spec(key: str | int, kib: int = 100) -> KeySpec:
    return KeySpec(key, "int8", (kib * KIB,))


class Shelf:
    """A catalog with three servers of these names."""

    def __init__(self, text: str, names: tuple[str, ...] = ("amy", "bob", "eve")) -> None:
        self.catalog = Catalog(Layout(), Coding(), 0, text, lambda: names)
        self.out = Decisions(0)

    def offer(
        self,
        *specs: KeySpec,
        worker: int = 11,
        token: int = 1,
        plain: bool = False,
        rate: float = 0.0,
    ) -> Any:
        message = c.Offer(token, list(specs), plain, rate)
        return self.catalog.offer(worker, message, plain, 3, SGD, self.out)

    def place(self, *specs: KeySpec, plain: bool = False) -> dict[str | int, set[int]]:
        """Initialise keys and return the servers of each."""
        pending = self.offer(*specs, plain=plain)
        if isinstance(pending, ZkvError):
            raise pending
        for server in range(3):
            done = self.catalog.held(pending.init, server)
            if done is not None:
                self.catalog.complete(done, 1)
        names = {entry.kid: entry.spec.key for entry in pending.entries}
        found: dict[str | int, set[int]] = {}
        for block in pending.blocks:
            for kid in block.kids:
                found.setdefault(names[kid], set()).add(block.server)
        return found


def test_keys_are_where_they_are_pinned_whoever_came_first() -> None:
    text = "by_size;pin:embed.*=eve;pin:head=0"
    for names in (("amy", "bob", "eve"), ("eve", "amy", "bob")):
        found = Shelf(text, names).place(spec("embed.w"), spec("embed.b", 1), spec("head"), spec(7))
        assert {names[server] for server in found["embed.w"] | found["embed.b"]} == {"eve"}
        assert found["head"] == {0}


def test_what_cannot_be_placed_is_refused_and_leaves_nothing() -> None:
    shelf = Shelf("by_size;bytes=150KiB")
    for _ in range(2):
        error = shelf.offer(spec("a"), spec("b"), spec("c"), spec("d"))
        assert isinstance(error, ConfigError)
        assert "key 'a' (102,400 bytes)" in str(error)
    assert (shelf.out.entries, shelf.out.messages, shelf.catalog.pending) == ([], [], {})
    assert shelf.place(spec("a"), spec("b")).keys() == {"a", "b"}
    with pytest.raises(ConfigError, match="pin:w=zoe names no server of this cluster"):
        Shelf("by_size;pin:w=zoe").place(spec("w"))


def test_room_is_taken_by_what_is_there_and_by_what_is_on_its_way() -> None:
    shelf = Shelf("by_size;bytes=150KiB")
    assert shelf.place(spec("a")) == {"a": {0}}
    pending = shelf.offer(spec("b"))
    assert isinstance(pending, Pending)
    assert [block.server for block in pending.blocks] == [1]
    other = shelf.offer(spec("c"), worker=22)
    assert isinstance(other, Pending)
    assert [block.server for block in other.blocks] == [2]
    assert isinstance(shelf.offer(spec("d"), worker=33), ConfigError)


def test_who_would_take_over_is_told_if_its_blocks_have_no_room() -> None:
    """The first one's link made small blocks; whoever takes over has blocks of 1 MiB."""
    shelf = Shelf("by_size;bytes=500KiB")
    large = KeySpec("w", "int8", (1200 * KIB,))
    assert isinstance(shelf.offer(large, worker=11, token=5, rate=50e6), Pending)
    assert isinstance(shelf.offer(large, worker=22, token=6), Pending)
    shelf.out.messages.clear()
    assert shelf.catalog.lost(11, 3, SGD, shelf.out) == []
    ((whom, told),) = shelf.out.messages
    assert (whom, told.token, told.code) == (22, 6, "ConfigError")
    assert "key 'w' (a block with 1,048,576 of its 1,228,800 bytes) is larger" in told.reason
    assert isinstance(shelf.offer(large, worker=22, rate=50e6), Pending)


def test_a_load_of_all_keys_so_far_is_what_servers_are_compared_by() -> None:
    shelf = Shelf("by_load:hot=100,warm=60,cold=1")
    assert shelf.place(spec("hot", 1)) == {"hot": {0}}
    assert shelf.place(spec("warm", 200)) == {"warm": {1}}
    assert shelf.place(spec("cold", 500)) == {"cold": {2}}
    assert shelf.place(spec("cold2", 1), plain=True) == {"cold2": {2}}


def test_loads_that_a_run_has_told_are_those_of_a_placement_by_load() -> None:
    shelf = Shelf("by_size")
    shelf.place(spec("a", 2), spec("b,c d", 1), spec(7, 1))
    books = [{"key": "a", "bytes_before": 400, "bytes_after": 100}]
    told = _with_loads(placement("by_load;blocks=9"), shelf.catalog.layout, books)
    assert told.text == "by_load:a=512,b?c?d=1024,7=1024;blocks=9"
    for text in ("by_size", "by_load:a=1"):
        one = placement(text)
        assert _with_loads(one, shelf.catalog.layout, books) is one


def test_the_status_has_what_servers_hold_carry_and_are_asked() -> None:
    shelf = Shelf("by_size;pin:a=0;pin:b=1;together=a;together=x")
    shelf.place(spec("a", 2 * KIB), spec("b", 1 * KIB))
    shelf.place(spec("p", 512), plain=True)
    books = [{"key": "a", "bytes_before": 400, "bytes_after": 100}]
    placed = Placed(shelf.catalog.placement, shelf.catalog.layout, 3, books)
    mib = KIB * KIB
    assert [placed.of_server(index) for index in range(3)] == [
        {"value_bytes": 2 * mib, "blocks": 2, "load": mib // 2},
        {"value_bytes": mib, "blocks": 1, "load": mib},
        {"value_bytes": mib // 2, "blocks": 1, "load": mib // 2},
    ]
    told = placed.plain()
    assert told["placement"] == "by_size;pin:a=0;pin:b=1;together=a;together=x"
    assert told["imbalance"] == round(2 / (3.5 / 3), 4)
    assert told["load_imbalance"] == 1.5
    assert told["fan_out"] == {
        "batch": 3,
        "key_mean": 1.0,
        "key_max": 1,
        "together": {"a": 1, "x": 0},
    }
    spread = Shelf("by_size")
    spread.place(spec("a", 3 * KIB))
    fan_out = Placed(placement("by_size"), spread.catalog.layout, 3, []).plain()["fan_out"]
    assert (fan_out["batch"], fan_out["key_max"]) == (3, 3)
    nothing = Placed(placement("by_size"), Layout(), 2, []).plain()
    assert (nothing["imbalance"], nothing["fan_out"]["batch"]) == (1.0, 0)
