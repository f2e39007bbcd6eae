"""Placements as values: their text, and what is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zkv.errors import ConfigError
from zkv.placements import (
    BYTES_MAX,
    ByHash,
    ByLoad,
    BySize,
    Caps,
    Placement,
    placement,
    server_number,
)
from zkv.sizes import exact, size

# --- laws ------------------------------------------------------------------------------------

patterns = st.text("ab*?[].7=: ", min_size=1, max_size=6).map(str.strip).filter(bool)
numbers = st.floats(0, 1e18)
rules = st.one_of(
    st.just(BySize()),
    st.builds(ByHash, st.integers(1, 4096)),
    st.builds(ByLoad, st.lists(st.tuples(patterns, numbers), max_size=3).map(tuple)),
)
caps = st.builds(
    Caps,
    st.none() | st.integers(1, 10**9),
    st.none() | st.integers(1, BYTES_MAX) | st.sampled_from([2**10, 3 * 2**30]),
    st.none() | numbers.filter(bool),
)
pins = st.dictionaries(patterns, st.sampled_from(["0", "17", "gpu-box", "a b"]), max_size=3)
placements = st.builds(
    Placement,
    rules,
    pins.map(lambda found: tuple(found.items())),
    st.lists(st.lists(patterns, min_size=1, max_size=3).map(tuple), max_size=2).map(tuple),
    caps,
)


@given(value=placements)
def test_a_placement_reads_its_own_text(value: Placement) -> None:
    assert placement(value.text) == value
    assert placement(value.text.replace(";", " ; ")) == value


@given(text=st.text("by_sizehlad:;=pntogerkc*|0123.GiB ", max_size=30))
def test_any_text_is_a_placement_or_a_value_error_with_the_form(text: str) -> None:
    try:
        found = placement(text)
    except ValueError as error:
        assert "by_size, by_hash[:VIRTUAL_NODES]" in str(error)  # noqa: PT017 - both are right
    else:
        assert placement(str(found)) == found


@given(nbytes=st.integers(0, BYTES_MAX))
def test_an_exact_size_is_read_as_it_was(nbytes: int) -> None:
    assert size(exact(nbytes)) == nbytes


# --- cases -----------------------------------------------------------------------------------


def test_a_text_with_everything() -> None:
    text = (
        "by_hash:16;pin:embed.*=0;pin:head.[wb]=gpu-box;together=emb.*|head.*;together=norm?;"
        "blocks=2;bytes=1GiB;load=0.5"
    )
    value = placement(text)
    assert value == Placement(
        ByHash(16),
        (("embed.*", "0"), ("head.[wb]", "gpu-box")),
        (("emb.*", "head.*"), ("norm?",)),
        Caps(2, 2**30, 0.5),
    )
    assert value.text == text
    assert value.pinned("embed.w") == ("embed.*", "0")
    assert value.pinned("Embed.w") is None
    assert value.groups_of("head.w") == [0]
    assert placement("by_size") == Placement()
    assert not placement("by_size").caps
    assert placement("by_hash") == Placement(ByHash(64))


def test_the_first_pattern_that_matches_counts() -> None:
    value = placement("by_load:emb.w=40,emb.*=2.5;pin:emb.w=1;pin:emb.*=0")
    assert isinstance(value.rule, ByLoad)
    assert [value.rule.load_of(key) for key in ("emb.w", "emb.b", "head", 7)] == [
        40,
        2.5,
        None,
        None,
    ]
    assert value.pinned("emb.w") == ("emb.w", "1")
    assert value.pinned("emb.b") == ("emb.*", "0")
    assert placement("by_load:7=3").rule.load_of(7) == 3  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "'' is no rule"),
        ("by_name", "'by_name' is no rule"),
        ("by_size:3", "'by_size:3' is no rule"),
        ("by_hash:0", "by_hash:0: give from 1 to 4096"),
        ("by_hash:x", "by_hash: 'x' is no count"),
        ("by_hash:", "by_hash: '' is no count"),
        ("by_load:", "'by_load:' is no rule"),
        ("by_load:a=x", "load of 'a'='x' is not a number"),
        ("by_load:=3", "pattern '': it must not be empty"),
        ("by_load:a=-1", "a=-1.0: a load is not negative"),
        ("by_load:a=nan", "not finite"),
        ("by_size;block=2", "'block=2' is no part of a placement"),
        ("by_size;embed.*=0", r"'embed.\*=0' is no part of a placement"),
        ("by_size;", "'' is no part of a placement"),
        ("by_size;blocks=0", "blocks=0: a server takes from 1"),
        ("by_size;blocks=2;blocks=3", "blocks is given twice"),
        ("by_size;blocks=1.5", "blocks: '1.5' is no count"),
        ("by_size;bytes=1XB", "size '1XB' is none of"),
        ("by_size;bytes=0", "bytes=0: a server takes from 1"),
        ("by_size;load=0", "load=0.0: a server takes more than 0"),
        ("by_size;pin:a=0;pin:a=1", "pin:a names two servers, 0 and 1; choose one"),
        ("by_size;pin:a=", "pin:a=: name a server"),
        ("by_size;pin:=1", "pattern ''"),
        ("by_size;pin:a", "'pin:a' is no part"),
        ("by_size;together=", "'together=' is no part"),
        ("by_size;together=a||b", "pattern ''"),
    ],
)
def test_a_wrong_text_is_named_with_the_form(text: str, named: str) -> None:
    with pytest.raises(ValueError, match=named) as caught:
        placement(text)
    assert "for example 'by_size;pin:embed.*=0" in str(caught.value)


def test_a_message_shows_a_long_text_only_in_part() -> None:
    text = "by_load:" + ",".join(f"layer{at}.w={at}" for at in range(1000)) + ";pin:w=3"
    value = placement(text)
    assert value.text == text
    with pytest.raises(ConfigError, match="names no server") as caught:
        value.check(2)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("pattern", ["", " a", "a;b", "a,b"])
def test_a_pattern_that_no_text_could_name_is_refused(pattern: str) -> None:
    with pytest.raises(ValueError, match="pattern"):
        ByLoad(((pattern, 1.0),))


def test_a_pin_names_a_server_by_its_number_or_its_name() -> None:
    value = placement("by_size;pin:a=2;pin:b=gpu-box")
    value.check(3)
    with pytest.raises(ConfigError, match=r"pin:a=2 names no server .* servers are 0 to 1; pin to"):
        value.check(2)
    with pytest.raises(ConfigError, match="servers are 0;"):
        value.check(1)
    assert server_number(value, "a", "2", 3, ("x", "y", "z")) == 2
    assert server_number(value, "b", "gpu-box", 3, ("x", "gpu-box", "z")) == 1
    with pytest.raises(ConfigError, match=r"pin:b=gpu-box names no server.* 0 to 1 \(x, y\)"):
        server_number(value, "b", "gpu-box", 2, ("x", "y"))
