"""Blocks that come as those of an earlier grant: taken over, waited for, or asked for as values."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from zkv import control as c
from zkv import data_messages as d
from zkv.dtypes import Array
from zkv.layout import Layout
from zkv.wire import MODEL, BlockSpec, KeyEntry, KeySpec, Segment
from zkv_workers.assembly import Assembly
from zkv_workers.downloads import Downloads
from zkv_workers.signals import SendData

ME = 7
NO_BYTES = np.empty(0, np.uint8)


@pytest.fixture
def downloads() -> Downloads:
    layout = Layout()
    keys = [KeyEntry(kid, KeySpec(f"k{kid}", "float32", (3,))) for kid in range(2)]
    layout.add(keys, [BlockSpec(kid, 0, [Segment(kid, 0, 3)]) for kid in range(2)])
    return Downloads(layout, ask_s=5.0)


def grant(downloads: Downloads, number: int) -> Assembly:
    message = c.Granted(MODEL, number, number, True, 0, 0, 0, 0, [], 0)
    return downloads.expect(message, downloads._layout.blocks_in(MODEL), 0.0)


def values(number: int) -> Array:
    return np.full(3, number, np.float32)


def send(downloads: Downloads, number: int, bid: int, like: int = -1) -> list[Assembly]:
    """Deliver a block; return the grants that got something by it."""
    message = d.Block(0, ME, MODEL, number, number, bid, "none", [], like=like)
    payload = NO_BYTES if like >= 0 else values(10 * number + bid).view(np.uint8)
    taken = downloads.take(message, payload, 0.0)
    return [*([] if taken is None else [taken]), *downloads.followers(bid, 0.0)]


def told(downloads: Downloads) -> tuple[list[Any], list[Any]]:
    """Return which blocks were acknowledged, and which asked for: (grant, blocks, as values)."""
    got = [out.message for out in downloads.receipts() if isinstance(out, SendData)]
    asked = [out.message for out in downloads.overdue(ME, 0.0)]
    return (
        [(one.grant, one.bids) for one in got if isinstance(one, d.Got)],
        [(one.grant, one.bids, one.whole) for one in asked if isinstance(one, d.Ask)],
    )


def test_a_block_of_a_complete_grant_is_taken_over(downloads: Downloads) -> None:
    first = grant(downloads, 1)
    for bid in (0, 1):
        send(downloads, 1, bid)
    second = grant(downloads, 2)
    send(downloads, 2, 0)
    send(downloads, 2, 1, like=1)
    assert first.complete
    assert second.complete
    assert second.blocks[0].tolist() == values(20).tolist()
    assert second.blocks[1].tolist() == values(11).tolist()
    assert told(downloads) == ([(1, [0, 1]), (2, [0, 1])], [])


@pytest.mark.parametrize("early", [True, False])
def test_older_values_are_let_go_when_the_log_has_come_to_newer_ones(
    downloads: Downloads, early: bool
) -> None:
    """Whichever comes first: a server would have to keep them as long."""
    for number in (1, 2):
        grant(downloads, number)
        send(downloads, number, 0)
        if early and number == 2:
            downloads.committed(2)
        send(downloads, number, 1)
    assert (downloads.held(1) is None) == early
    downloads.committed(1)
    assert (downloads.held(1) is None) == early
    downloads.committed(2)
    assert downloads.held(1) is None
    assert downloads.held(2) is not None


def test_a_block_of_a_grant_on_its_way_is_waited_for_and_not_acknowledged_before(
    downloads: Downloads,
) -> None:
    """Through several grants, each like the one before."""
    assemblies = [grant(downloads, number) for number in (1, 2, 3)]
    for number in (1, 2, 3):
        send(downloads, number, 0)
    for number in (2, 3):
        assert send(downloads, number, 1, like=number - 1) == [assemblies[number - 1]]
    assert told(downloads) == ([(1, [0]), (2, [0]), (3, [0])], [])
    assert send(downloads, 1, 1) == assemblies
    assert all(one.blocks[1].tolist() == values(11).tolist() for one in assemblies)
    assert all(one.complete for one in assemblies)
    assert told(downloads) == ([(1, [1]), (2, [1]), (3, [1])], [])


def test_what_comes_before_its_grant_is_announced_is_acknowledged_when_it_is_here(
    downloads: Downloads,
) -> None:
    grant(downloads, 1)
    send(downloads, 2, 1, like=1)
    send(downloads, 1, 1)
    assert told(downloads) == ([(1, [1])], [])
    assert grant(downloads, 2).blocks[1].tolist() == values(11).tolist()
    assert told(downloads) == ([(2, [1])], [])


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_block_of_a_grant_that_is_taken_back_is_asked_for_as_values(
    when: str, downloads: Downloads
) -> None:
    """Once, however often it comes again."""
    grant(downloads, 1)
    second = grant(downloads, 2)
    if when == "before":
        downloads.drop(MODEL, 1)
    send(downloads, 2, 1, like=1)
    if when == "after":
        downloads.drop(MODEL, 1)
    assert told(downloads) == ([], [(2, [1], (1,))])
    send(downloads, 2, 1, like=1)
    # A block of the grant that was taken back is of no use to it any more.
    send(downloads, 1, 1)
    assert told(downloads) == ([(1, [1])], [])
    send(downloads, 2, 1)
    assert second.blocks[1].tolist() == values(21).tolist()
    assert told(downloads) == ([(2, [1])], [])


def test_a_block_of_a_grant_that_is_not_kept_any_more_is_asked_for_as_values(
    downloads: Downloads,
) -> None:
    for number in (1, 2, 3):
        grant(downloads, number)
        for bid in (0, 1):
            send(downloads, number, bid)
    told(downloads)
    grant(downloads, 4)
    send(downloads, 4, 0, like=2)
    send(downloads, 4, 1, like=1)
    assert told(downloads) == ([(4, [0])], [(4, [1], (1,))])
