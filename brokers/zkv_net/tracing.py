"""Spans of this process: the clock that they are taken with, and the file that they end up in.

The variable ZKV_TRACE names a folder; without it there are none. Each process (or worker, where one
process has several) leaves one file as it ends, complete or not at all, so one that was killed
leaves nothing. Nobody's work may fail because of it.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec

from zkv.alignment import Alignment
from zkv.data_messages import Ack, Block, Got, Push
from zkv.dtypes import Array
from zkv.heartbeat import BEAT_S
from zkv.spans import NETWORK, Spans, flow
from zkv.wire import SEEDS

log = logging.getLogger("zkv.trace")
VARIABLE = "ZKV_TRACE"
FORMAT = "zkv spans 1"
TRACED_BEAT_S = 0.1
"""How often a process says that it is alive: when it is traced, each time is a round trip."""
SENDS_MAX = 65_536
"""More than so many sends without an answer are not kept."""


def recorder(folder: str) -> Spans | None:
    """Return where to record, if spans are wanted."""
    return Spans(time.monotonic) if folder else None


def beat_s(folder: str) -> float:
    """Return how often a process beats, in seconds."""
    return TRACED_BEAT_S if folder else BEAT_S


class Sends:
    """Blocks that were handed to a socket and are not acknowledged; each becomes a span."""

    def __init__(self, spans: Spans) -> None:
        self._spans = spans
        self._open: dict[Hashable, tuple[float, str, tuple[str, ...], dict[str, Any]]] = {}

    def _sent(self, name: Hashable, text: str, out: tuple[str, ...], **about: Any) -> None:
        # What is sent again was on its way from the first time on.
        if name not in self._open:
            if len(self._open) >= SENDS_MAX:
                del self._open[next(iter(self._open))]
            self._open[name] = (self._spans.clock(), text, out, about)

    def _arrived(self, name: Hashable, now: float) -> None:
        sent = self._open.pop(name, None)
        if sent is not None:
            began, text, out, about = sent
            self._spans.span(NETWORK, text, began, now, out=out, **about)

    def push(self, server: int, message: Push, payload: Array | None) -> None:
        """A block of a contribution goes to a server."""
        name, bid = message.contribution, message.bid
        seeds = name.group == SEEDS
        self._sent(
            (name, bid),
            f"seed {bid}" if seeds else f"send {bid}",
            () if seeds else (flow(name, bid),),
            server=server,
            batch=name.batch,
            codec=message.codec,
            bytes=0 if payload is None else payload.nbytes,
        )

    def acknowledged(self, message: Ack) -> None:
        """A server has blocks of contributions."""
        now = self._spans.clock()
        for name, bid in message.items:
            self._arrived((name, bid), now)

    def block(self, message: Block, payload: Array | None) -> None:
        """A block of a grant goes to a worker."""
        self._sent(
            (message.incarnation, message.group, message.grant, message.bid),
            f"grant {message.bid}",
            (),
            incarnation=message.incarnation,
            version=message.version,
            codec=message.codec,
            bytes=0 if payload is None else payload.nbytes,
        )

    def got(self, message: Got) -> None:
        """A worker has blocks of a grant."""
        now = self._spans.clock()
        for bid in message.bids:
            self._arrived((message.incarnation, message.group, message.grant, bid), now)


def write(
    folder: str,
    role: str,
    number: int,
    spans: Spans,
    alignment: Alignment | None,
    about: Mapping[str, Any],
) -> None:
    """Leave `ROLE-NUMBER-PID-….jsonl`: a line about the process, and one for each span.

    `alignment` leads to the broker's clock; `about` says more of the process. A folder that cannot
    be written to is a warning.
    """
    kept = spans.kept
    head = {
        "format": FORMAT,
        "role": role,
        "number": number,
        "pid": os.getpid(),
        "dropped": spans.dropped,
        "alignment": None if alignment is None else asdict(alignment),
        **about,
    }
    path = Path(folder, f"{role}-{number}-{os.getpid()}-{id(spans):x}.jsonl")
    part = path.with_suffix(".part")
    encoder = msgspec.json.Encoder(enc_hook=str)
    try:
        part.write_bytes(encoder.encode_lines([head, *kept]))
        os.replace(part, path)
    except (OSError, ValueError, TypeError) as error:
        log.warning("the spans of %s %d are lost: %s", role, number, error)


_at_the_end: list[Callable[[], None]] = []


def before_sigterm(act: Callable[[], None]) -> None:
    """Do this before SIGTERM ends this process, where nothing else was said about that signal.

    Only the main thread may ask for signals; elsewhere nothing is done.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    if not _at_the_end and signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        return
    if not _at_the_end:
        owner = os.getpid()

        def ended(number: int, frame: object) -> None:
            for one in _at_the_end if os.getpid() == owner else ():
                one()
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

        signal.signal(signal.SIGTERM, ended)
    _at_the_end.append(act)
