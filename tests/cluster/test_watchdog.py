"""A process whose loop hangs says where, once; one in which nothing can run, too."""

from __future__ import annotations

import asyncio
import logging
import re
import subprocess
import sys
import threading
from collections.abc import Callable

import pytest

from zkv_net.watchdog import Watchdog

STUCK_S = 0.2
log = logging.getLogger("zkv.test")


class Heard(logging.Handler):
    """What was logged; `first` and `second` are set by the first two lines."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.first, self.second = threading.Event(), threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())
        (self.first if len(self.texts) == 1 else self.second).set()


@pytest.fixture
def heard() -> Heard:
    handler = Heard()
    log.addHandler(handler)
    yield handler
    log.removeHandler(handler)


def hangs_here(until: threading.Event, looks: Callable[[], bool]) -> None:
    assert until.wait(10)
    # As long again: it is said once.
    assert not looks()


async def test_row_21_a_loop_that_hangs_is_told_once_with_where_it_stands(
    heard: Heard, monkeypatch: pytest.MonkeyPatch
) -> None:
    # pytest has the timer.
    monkeypatch.setattr(Watchdog, "_arm", lambda self: False)
    with Watchdog(log, STUCK_S):
        hangs_here(heard.first, lambda: heard.second.wait(2 * STUCK_S))
        assert await asyncio.to_thread(heard.second.wait, 10)
    stuck, again = heard.texts
    assert "the event loop has not turned for" in stuck
    assert "in hangs_here" in stuck
    assert "until.wait" in stuck
    assert "turns again" in again


HOLDS = """
import asyncio, ctypes, logging, sys
from zkv_net.watchdog import Watchdog
logging.basicConfig(format="%(message)s")
def holds_the_lock():
    ctypes.PyDLL(None).usleep(1_000_000)
async def main():
    with Watchdog(logging.getLogger("zkv.test"), 0.2):
        holds_the_lock()
        await asyncio.sleep(0)
asyncio.run(main())
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="usleep of Linux's C library")
def test_row_21_code_that_holds_pythons_lock_is_found_without_it() -> None:
    done = subprocess.run(
        [sys.executable, "-c", HOLDS], capture_output=True, text=True, timeout=30, check=True
    )
    assert re.search(r"in holds_the_lock\n.* in main", done.stderr), done.stderr
    assert "this process stood still for" in done.stderr
    assert "has not turned" not in done.stderr


async def test_what_turns_is_never_told(heard: Heard, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Watchdog, "_arm", lambda self: False)
    with Watchdog(log, 60.0) as watchdog:
        watchdog._every_s = 0.001
        for _ in range(50):
            await asyncio.sleep(0.001)
    assert heard.texts == []
    assert not watchdog._thread.is_alive()
