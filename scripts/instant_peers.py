"""Peers that cost nothing: a broker and one server for one worker, inside of that worker.

What the worker sends is taken where it would go into a socket. A pushed block is acknowledged at
once, and neither copied, decoded nor summed; a batch counts as soon as it is finished, and the next
grant comes with the first values again. All of it runs on the worker's own I/O thread. No sockets.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from zkv import control as c
from zkv import data_messages as d
from zkv.data_messages import decode_data, encode_data
from zkv.dtypes import Array
from zkv.link import Link
from zkv.placement import plan
from zkv.wire import MODEL, PULLS, BlockSpec, KeyEntry, open_envelope
from zkv_net.loop import instance_number
from zkv_workers import signals as s
from zkv_workers.blocking import Worker
from zkv_workers.config import SessionConfig
from zkv_workers.driver import Driver, now

BROKER = "tcp://127.0.0.1:9"
"""Nobody is asked there."""
SERVER = 0
INCARNATION = 1


class Peers:
    """The broker's and the server's part. What they say goes to `tell`, as inputs of a session."""

    def __init__(self, tell: Callable[[s.Input], None]) -> None:
        self._tell = tell
        self._link = Link(instance_number())
        self._keys: list[KeyEntry] = []
        self._blocks: list[BlockSpec] = []
        self._values: dict[int, Array] = {}
        self._offered = 0
        """The token of the initialisation whose values are on their way."""
        self._version = 0
        self._grants = 0
        self._got: list[tuple[Any, int]] = []
        self.pushed = 0
        """Blocks of gradients."""
        self.idle = threading.Event()
        """Set while the worker holds all values of its next grant."""

    # --- control -----------------------------------------------------------------------------

    def control(self, frame: bytes) -> None:
        """Take what the worker says to the broker."""
        packet = c.decode_messages(open_envelope(frame), by_broker=True)
        for message in self._link.receive(packet, now())[1]:
            self._hear(message)
        self._speak()

    def _speak(self) -> None:
        for packet in self._link.outgoing(now()):
            self._tell(s.FromBroker(c.encode_packet(packet)))

    def _hear(self, message: c.Message) -> None:
        say = self._link.send
        match message:
            case c.WorkerHello():
                at = [c.ServerAt(SERVER, "instant", BROKER)]
                say(c.Welcome(0, INCARNATION, 0, 1, 1, at, "", "bsp"))
            case c.Offer(token=token) if self._keys:
                say(c.Refusal(token, "refused", "instant peers take one init: no buffers"))
            case c.Offer(token=token, keys=keys):
                self._offered = token
                self._keys = [KeyEntry(kid, spec) for kid, spec in enumerate(keys)]
                self._blocks = plan(self._keys, 1, together=lambda entry: entry.spec.rule)
                say(c.Layout(1, self._keys, self._blocks, True, 0))
            case c.Begin():
                self._grant(MODEL, 0)
            case c.Pull(token=token):
                self._grant(PULLS, token)
            case c.Finish(contribution=name):
                self._version += 1
                say(c.Settled([(MODEL, name.batch, self._version, "")]))
                self._grant(MODEL, 0)
            case c.Status(token=token):
                say(c.Reply(token, {"optimizer": "sgd:lr=0.1"}))
            case c.Leave():
                say(c.Bye("gone"))

    def _grant(self, group: int, token: int) -> None:
        self._grants += 1
        kids = [] if group == MODEL else [entry.kid for entry in self._keys]
        granted = c.Granted(group, self._grants, self._version, True, 0, 0, 0, 0, kids, token)
        self._link.send(granted)
        self._speak()
        for bid, values in self._values.items():
            message = d.Block(
                SERVER, INCARNATION, group, self._grants, self._version, bid, "none", []
            )
            self._tell(s.FromServer(decode_data(encode_data(message), values.nbytes), values))

    # --- data --------------------------------------------------------------------------------

    def data(self, header: bytes, payload: Array | None) -> None:
        """Take what the worker says to the server."""
        match decode_data(header, None if payload is None else payload.nbytes):
            case d.Push(contribution=name, bid=bid):
                assert payload is not None
                if self._offered:
                    self._values[bid] = payload.view("u1")
                else:
                    self.pushed += 1
                self._got.append((name, bid))
            case d.Done(contribution=name):
                self._got.append((name, -1))
                if self._offered:
                    self._link.send(c.Layout(1, self._keys, self._blocks, False, 0))
                    self._link.send(c.Ready(1))
                    self._link.send(c.Reply(self._offered, None))
                    self._offered = 0
            case d.Got():
                self.idle.set()

    def turn_over(self) -> None:
        """Acknowledge what has come in this turn, in one message, as a server does."""
        got, self._got = self._got, []
        if got:
            ack = encode_data(d.Ack(SERVER, INCARNATION, got))
            self._tell(s.FromServer(decode_data(ack, None), None))
        self._speak()


class _Ear:
    """Stands where the control socket is."""

    def __init__(self, hear: Callable[[bytes], None]) -> None:
        self._hear = hear

    def send(self, frames: list[bytes]) -> bool:
        """Take a message."""
        self._hear(frames[-1])
        return True

    def close(self, linger_ms: int = 0) -> None:
        """Do nothing."""


class InstantDriver(Driver):
    """A driver whose peers are `Peers`, in the next turn of its loop."""

    def __init__(self, config: SessionConfig) -> None:
        super().__init__(config)
        self._control.close()
        self.peers = Peers(self._say)
        self._control: Any = _Ear(self._heard)
        self._turn: deque[s.Input] = deque()
        self._due = False

    def _heard(self, frame: bytes) -> None:
        self.peers.control(frame)

    def _say(self, event: s.Input) -> None:
        self._turn.append(event)
        self._wake()

    def _wake(self) -> None:
        if not self._due:
            self._due = True
            self._loop.call_soon(self._next_turn)

    def _next_turn(self) -> None:
        self._due = False
        self.peers.turn_over()
        said, self._turn = self._turn, deque()
        for event in said:
            self.session.take(event, now())
        self.flush()

    def _connect(self, servers: dict[int, str], broker_data: str) -> None:
        """Nobody is dialled."""

    def _send_data(self, server: int, header: bytes, payload: Any) -> None:
        self.peers.data(header, payload)
        self._wake()


class InstantWorker(Worker):
    """A worker whose peers are `Peers`."""

    def __init__(self) -> None:
        super().__init__(SessionConfig(name="bench", broker=BROKER), "direct")

    async def _make_driver(self, route: str) -> Driver:
        driver = InstantDriver(self._config)
        driver.cancelled = self._running.cancel
        return driver

    @property
    def peers(self) -> Peers:
        """The broker and the server."""
        driver = self._driver
        assert isinstance(driver, InstantDriver)
        return driver.peers
