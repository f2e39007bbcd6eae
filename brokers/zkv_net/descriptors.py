"""File descriptors of this process: how many it has and may have (`zkv.descriptors` decides)."""

from __future__ import annotations

import errno
import importlib
import logging
import os
from contextlib import suppress
from typing import Any

from zkv.descriptors import Alarm, fit, too_few
from zkv.errors import ConfigError

_resource: Any = None
with suppress(ImportError):  # Windows has no such limit.
    _resource = importlib.import_module("resource")

MANY = 1 << 20
"""Stands for no limit: more than this is never asked for, as some programs close all there may
be."""
LOOK_S = 1.0


def limits() -> tuple[int, int] | None:
    """Return how many may be open now, and how many without asking an administrator; None: the
    system has no such limit."""
    if _resource is None:
        return None
    return tuple(
        MANY if one == _resource.RLIM_INFINITY else min(one, MANY)
        for one in _resource.getrlimit(_resource.RLIMIT_NOFILE)
    )  # type: ignore[return-value]


def opened() -> int:
    """Return how many are open; 0: the system does not tell."""
    for folder in ("/proc/self/fd", "/dev/fd"):
        try:
            return len(os.listdir(folder))
        except OSError as error:
            found = limits()
            if error.errno == errno.EMFILE and found is not None:
                return found[0]  # Looking takes one, and there is none.
    return 0


def claim(members: int) -> None:
    """Raise this process's limit as far as it goes.

    Raises:
        ConfigError: that is too little for so many members; both figures are named.
    """
    found = limits()
    if found is None:
        return
    soft, hard = found
    if soft < hard:
        _, as_it_is = _resource.getrlimit(_resource.RLIMIT_NOFILE)
        # macOS has a lower limit of the kernel beside this one, and refuses.
        with suppress(OSError, ValueError):
            _resource.setrlimit(_resource.RLIMIT_NOFILE, (hard, as_it_is))
            soft = hard
    wrong = too_few(soft, members)
    if wrong:
        raise ConfigError(wrong)


def room() -> int:
    """Return for how many members this process has room."""
    found = limits()
    return fit(MANY if found is None else found[0])


class Watch:
    """Looks once a second at how many descriptors this process has left, and warns in `log`."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self.figures = {"opened": 0, "limit": 0}
        """As they were when it looked last; a limit of 0: none is known."""
        self._alarm = Alarm()
        self._next = 0.0

    def look(self, now: float) -> None:
        """Look, if it is time to; `now` in seconds."""
        found = limits() if now >= self._next else None
        if found is None:
            return
        self._next = now + LOOK_S
        self.figures = {"opened": opened(), "limit": found[0]}
        if short := self._alarm.look(**self.figures, now=now):
            self._log.warning("%s", short)
