"""What a broker was told before anything was begun (`zkv_workers.told`)."""

from __future__ import annotations

from zkv import control as c
from zkv.layout import Layout
from zkv.link import Link
from zkv.wire import KeyEntry, KeySpec
from zkv_workers import signals as s
from zkv_workers.config import SessionConfig
from zkv_workers.cycle import Cycle
from zkv_workers.pulls import Pulls
from zkv_workers.requests import Requests
from zkv_workers.told import Told


def test_an_offer_is_kept_until_the_present_broker_has_answered_it() -> None:
    """The one before has answered it; this one may still ask for the values."""
    config = SessionConfig("w", "tcp://127.0.0.1:1")
    link = Link(7, resend_s=1.0)
    told = Told(link)
    spec = KeySpec("w", "float32", (3,))
    told.offer(s.Initialise(5, (spec,), {}, False))
    told.again(Cycle(0), Pulls(Layout(), link, lambda kid: False), Requests(config), 0)
    told.answered(5)
    told.again(Cycle(0), Pulls(Layout(), link, lambda kid: False), Requests(config), 0)
    told.begun(lambda token: False)
    asked = c.Layout(1, [KeyEntry(0, spec)], [], True, 0)
    assert told.wanted(asked).token == 5
    told.answered(5)
    told.begun(lambda token: False)
    assert not told._offers
