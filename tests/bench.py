"""A worker's session without sockets: the broker and one server say what a test lets them say.

It drives a session by its inputs alone, as a driver does; it must not know brokers or sockets.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from zkv import control as c
from zkv import data_messages as d
from zkv.link import Link
from zkv.wire import MODEL, BlockSpec, KeyEntry, KeySpec, Segment, open_envelope
from zkv_workers import signals as s
from zkv_workers.model import BatchState
from zkv_workers.running import Running
from zkv_workers.session import Session, SessionConfig

ME = 1_048_577
"""a is cut into two blocks, b and c share one; t has the values of b."""
ENTRIES = [
    KeyEntry(0, KeySpec("a", "float32", (4,))),
    KeyEntry(1, KeySpec("b", "float32", (1,))),
    KeyEntry(2, KeySpec("c", "float32", (2,))),
    KeyEntry(1, KeySpec("t", "float32", (1,), same_as="b")),
]
BLOCKS = [
    BlockSpec(0, 0, [Segment(0, 0, 2)]),
    BlockSpec(1, 0, [Segment(0, 2, 4)]),
    BlockSpec(2, 0, [Segment(1, 0, 1), Segment(2, 0, 2)]),
]
VALUES = {
    bid: np.array(values, np.float32) for bid, values in enumerate(([1, 2], [3, 4], [5, 6, 7]))
}


class Bench:
    """A session that has joined, and the broker's end of its link."""

    def __init__(self, prefetch: int = 0) -> None:
        config = SessionConfig("w", "tcp://broker:5555", prefetch=prefetch)
        self.session = Session(config, instance=11)
        self.link = Link(22)
        self.out: list[s.Output] = []
        self.heard: list[c.Message] = []
        self.running = Running()
        self.feed(s.Join(1))
        self.say(c.Welcome(0, ME, 0, 1, 1, [c.ServerAt(0, "s", "tcp://s:1")], "", "bsp"))
        self.say(c.Layout(1, ENTRIES, BLOCKS, False, 1))

    def feed(self, event: s.Input) -> None:
        out = self.session.handle(event, 0.0)
        for one in out:
            if isinstance(one, s.SendControl):
                packet = c.decode_messages(open_envelope(one.frame))
                self.heard += self.link.receive(packet, 0.0)[1]
            if isinstance(one, s.CancelBatch):
                self.running.cancel(one.batch)
        self.out += out

    def say(self, message: c.Message) -> None:
        self.link.send(message)
        for packet in self.link.outgoing(0.0):
            self.feed(s.FromBroker(c.encode_packet(packet)))

    def grant(self, number: int = 1, *, follow: bool = True, version: int = 0) -> None:
        self.say(c.Granted(MODEL, number, version, follow, 0, 0, 0, 0, [], 0))

    def send(self, bid: int, grant: int = 1, version: int = 0) -> None:
        block = d.Block(0, ME, MODEL, grant, version, bid, "none", [])
        self.feed(s.FromServer(block, VALUES[bid].view(np.uint8)))

    def answer(self, token: int) -> Any:
        found = [one for one in self.out if isinstance(one, s.Answer | s.Fail)]
        return next((one for one in found if one.token == token), None)

    def begin(self, token: int = 2) -> BatchState:
        self.feed(s.Begin(token))
        answer = self.answer(token)
        assert isinstance(answer, s.Answer)
        return self.running.add(BatchState(answer.value, 1.0))

    def wait(self, token: int, state: BatchState, *keys: str) -> None:
        self.feed(s.Await(token, state.number, state.missing(keys or None)))

    def receipts(self) -> list[c.Message]:
        return [one for one in self.heard if isinstance(one, c.Received)]
