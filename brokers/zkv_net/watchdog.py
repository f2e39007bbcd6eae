"""Says where a process hangs: a thread sees that the event loop does not turn, and logs once where
it stands. Where no thread can run (code in C that holds Python's lock), faulthandler writes it.

It ends nothing: others see the silence, and decide. Knows nothing of what the loop is for.
"""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import sys
import threading
import time
import traceback
from types import TracebackType

STUCK_S = 5.0
"""So long a loop may take for one turn before it is said where it stands."""
LOOKS = 5
"""So often it is looked in that time."""


class Watchdog:
    """A context in which the running loop is watched. `log` hears of it.

    For one loop of a process: faulthandler has one timer.
    """

    def __init__(self, log: logging.Logger, stuck_s: float = STUCK_S) -> None:
        self._log, self._stuck_s = log, stuck_s
        self._every_s = stuck_s / LOOKS
        self._turned = time.monotonic()
        self._told = False
        self._closed = threading.Event()
        self._owner = threading.get_ident()
        self._thread = threading.Thread(target=self._watch, name="zkv-watchdog", daemon=True)
        self._timer: asyncio.TimerHandle | None = None

    def __enter__(self) -> Watchdog:
        self._turn()
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._closed.set()
        self._thread.join()

    def _turn(self) -> None:
        """The loop turns."""
        now = time.monotonic()
        stood_s, self._turned = now - self._turned, now
        if self._told:
            self._told = False
            self._log.warning("the event loop turns again, after %.1f s", stood_s)
        self._timer = asyncio.get_running_loop().call_later(self._every_s, self._turn)

    def _watch(self) -> None:
        looked = time.monotonic()
        armed = self._arm()
        while not self._closed.wait(self._every_s):
            armed = armed and self._arm()
            now = time.monotonic()
            late_s, looked = now - looked - self._every_s, now
            if late_s > self._stuck_s / 2:
                # Nothing could run: the loop is no more to blame than this thread.
                self._log.warning(
                    "this process stood still for %.1f s: it was stopped, had no processor, or "
                    "code in C held Python's lock",
                    late_s,
                )
            elif now - self._turned > self._stuck_s and not self._told:
                self._told = True
                self._log.error(
                    "the event loop has not turned for %.1f s, and nothing is answered meanwhile; "
                    "it stands at:\n%s",
                    now - self._turned,
                    self._stack(),
                )
        if armed:
            faulthandler.cancel_dump_traceback_later()

    def _arm(self) -> bool:
        """Have all stacks written if this thread is not back in time; return whether they will."""
        try:
            faulthandler.dump_traceback_later(2 * self._stuck_s, file=sys.stderr)
        except (AttributeError, OSError, ValueError, RuntimeError):
            return False  # Nothing that can be written to without Python.
        return True

    def _stack(self) -> str:
        frame = sys._current_frames().get(self._owner)
        return "" if frame is None else "".join(traceback.format_stack(frame))
