"""A machine's state as bytes: each object once, only our classes, the same bytes everywhere."""

from __future__ import annotations

import subprocess
from collections import Counter, defaultdict, deque
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec
import pytest
from hash_seeds import printed
from hypothesis import given
from hypothesis import strategies as st

from zkv import control as c
from zkv.errors import ProtocolError
from zkv.policy import policy
from zkv.pool import Pool, Shard
from zkv_brokers import router as r
from zkv_brokers.decisions import Decisions, Pins
from zkv_brokers.state import packed, unpacked

plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(max_size=5)
    | st.binary(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(st.integers() | st.tuples(st.text(max_size=3)), inner, max_size=3)
        | st.frozensets(st.integers() | st.text(max_size=3), max_size=4)
        | st.sets(st.integers(), max_size=4)
    ),
    max_leaves=12,
)


@given(plain)
def test_plain_values_come_back_with_their_types(value: Any) -> None:
    again = unpacked(packed(value))
    assert again == value
    assert repr(type(again)) == repr(type(value))
    assert packed(again) == packed(value)


def test_collections_come_back_with_their_order_and_limits() -> None:
    book: defaultdict[str, list[int]] = defaultdict(list, {"b": [2], "a": [1]})
    value = [deque([1, 2], maxlen=2), Counter({3: 4}), book, range(2, 9, 3), {2: 1, 1: 2}]
    again = unpacked(packed(value))
    assert again == value
    assert again[0].maxlen == 2
    assert list(again[2]) == ["b", "a"]
    assert again[2]["new"] == []
    assert list(again[4]) == [2, 1]


def test_what_several_refer_to_is_one_object_again_and_circles_close() -> None:
    pins = Pins(3)
    value: list[Any] = [pins, {"also": pins}, pins.by_grant]
    value.append(value)
    again = unpacked(packed(value))
    assert again[0] is again[1]["also"]
    assert again[2] is again[0].by_grant
    assert again[3] is again


def test_methods_and_functions_belong_to_the_new_objects() -> None:
    pool = Pool(Shard(10, size=3))
    take, half = unpacked(packed([pool.take, partial(pool.take, 7)]))
    assert take.__self__ is half.func.__self__
    assert len(half()) == 3
    assert take.__self__.unsettled == {7: 1}
    assert unpacked(packed([policy, Decisions])) == [policy, Decisions]


@dataclass
class Foreign:
    """Not of the project."""

    value: int = field(default=0)


@pytest.mark.parametrize(
    "value",
    [Foreign(), subprocess.run, lambda: 0, object(), {Foreign}, len, 1j],
    # Their texts have addresses, which differ between processes that share the tests out.
    ids=lambda value: type(value).__name__,
)
def test_what_is_not_ours_is_not_written(value: Any) -> None:
    with pytest.raises((TypeError, AttributeError)):
        packed([value])


@pytest.mark.parametrize(
    "plain_form",
    [
        ["named", "subprocess:run"],
        ["named", "os:system"],
        ["named", "zkv_brokers.journal_file:os"],
        ["named", "eval"],
        ["object", "subprocess:Popen", {}],
        ["object", "zkv.policy:policy", {}],
        ["object", "str", {}],
        ["sent", "zkv_brokers.members:Worker", b"\x90"],
        ["partial", [["named", "os:system"], ["tuple", ["true"]], ["dict", []]]],
        ["method", "text", "format"],
        ["method", ["object", "zkv_brokers.decisions:Pins", {}], "__class__"],
        ["seen", 5],
        ["no such kind"],
        ["named", "zkv_brokers.no_such:thing"],
        ["object"],
        [],
    ],
    ids=repr,
)
def test_bytes_that_name_other_code_or_make_no_sense_are_refused(plain_form: Any) -> None:
    with pytest.raises(ProtocolError, match="no state of a machine"):
        unpacked(msgspec.msgpack.encode(plain_form))


@given(st.binary(max_size=60))
def test_any_bytes_are_a_state_or_a_protocol_error(content: bytes) -> None:
    try:
        unpacked(content)
    except ProtocolError:
        return


def test_what_travels_is_written_as_it_travels() -> None:
    entry = c.Grant(1, 0, 2, 3, [4, 5])
    assert unpacked(packed(entry)) == entry


def test_equal_routers_are_equal_bytes_whatever_the_hash_seed() -> None:
    told = printed(
        "import hashlib\n"
        "from zkv.policy import policy\n"
        "from zkv_brokers import router as r\n"
        "from zkv_brokers.state import packed\n"
        "config = r.RouterConfig('tcp://a:1', policy('ssp:2'), codec='bits:learned')\n"
        "state = packed(r.Router(config, term=1, instance=2))\n"
        "print(hashlib.sha256(state).hexdigest())"
    )
    config = r.RouterConfig("tcp://a:1", policy("ssp:2"), codec="bits:learned")
    router = r.Router(config, term=1, instance=2)
    assert len(told.strip()) == 64
    assert packed(unpacked(packed(router))) == packed(router)
