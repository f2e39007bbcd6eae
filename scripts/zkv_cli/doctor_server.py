"""What `zkv doctor` does to find out about a server: who answers at its address, how fast the way
is, and whether its memory can be shared.

A server answers probes of anybody, and they change nothing. Decides nothing (`doctor_data` does).
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import zmq

from zkv import control as c
from zkv.data_messages import Data, Greet, Probe, Probed, Share, decode_data, encode_data
from zkv.dtypes import Array
from zkv.errors import ProtocolError
from zkv.wire import STRANGERS, split_route
from zkv_net.nearby import Nearby, payload_bytes
from zkv_net.safety import choose, said_insecure
from zkv_net.sockets import connect, new_socket
from zkv_workers.link_probe import LinkProbe
from zkv_workers.signals import SendData

ANSWER_S = 2.0
BLOCK_BYTES = 1024 * 1024
BURST_S = 0.2
"""A burst is to take so long, by the rate of single blocks, and to be of so many blocks at most."""
BURST_BLOCKS_MAX = 32
BURST_WAIT_S = 3.0


def stranger() -> int:
    """Return a number that no worker's incarnation is, nor another doctor's."""
    return STRANGERS + secrets.randbits(61)


class ServerLine:
    """A connection to a server's data port, of one who is no member. Close it at the end.

    `key` is the server's public key, "" where there are none.

    Raises:
        ConfigError: keys are needed, and cannot be used.
    """

    def __init__(self, address: str, key: str = "") -> None:
        self._context: zmq.Context[Any] = zmq.Context()
        self._socket = new_socket(self._context, zmq.DEALER, data=True)
        self._who = stranger()
        self.memory: str | None = None
        """Why the server's memory cannot be read here, "" if it can; None: it offers none."""
        self._nearby = Nearby(lambda peer, frames: None, time.monotonic)
        try:
            safety = choose(self._context, dials=[address], insecure=said_insecure())
            if key:
                safety.place(address, key)
            safety.dial(self._socket, address)
            connect(self._socket, address)
            self._send(Greet(self._who, 0), None)
        except BaseException:
            self.close()
            raise

    def _send(self, message: Data, payload: Array | None) -> None:
        frames: list[Any] = [b"", encode_data(message)]
        if payload is not None:
            frames.append(payload)
        self._socket.send_multipart(frames, copy=True)

    def _answers(self, wanted: int, timeout_s: float) -> Sequence[Probed]:
        """Return the answers that have come once there are so many, or the time is up."""
        deadline = time.monotonic() + timeout_s
        found: list[Probed] = []
        while len(found) < wanted and (left := deadline - time.monotonic()) > 0:
            if not self._socket.poll(max(1, int(1000 * left))):
                break
            frames = self._socket.recv_multipart(copy=False)
            try:
                _, rest = split_route(frames)
                message = decode_data(rest[0].buffer, payload_bytes(rest))
            except ProtocolError:
                continue
            if isinstance(message, Share):
                self.memory = self._nearby.offered(0, message, rest[0]).why
            elif isinstance(message, Probed) and message.incarnation == self._who:
                found.append(message)
        return found

    def identify(self) -> tuple[int | None, float]:
        """Return the server's own number and how long its answer took, in seconds; None: nothing
        has answered in time. The shortest of three trips counts."""
        index, least_s = None, ANSWER_S
        for number in range(1, 4):
            began = time.monotonic()
            self._send(Probe(self._who, number), np.zeros(1, np.uint8))
            answers = self._answers(1, ANSWER_S)
            if not answers:
                break
            index, least_s = answers[0].server, min(least_s, time.monotonic() - began)
        return index, least_s

    def rate(self, index: int) -> float:
        """Return what the way to the server carries, in bytes per second; 0.0: not known.

        Single blocks as workers measure with; where they go quickly, many at once.
        """
        rates: list[float] = []
        probe = LinkProbe(True, rates.append)
        at = [c.ServerAt(index, "", "")]
        out = probe.begin(c.Welcome(0, self._who, 0, 1, 0, at, "", ""), time.monotonic())
        while not rates:
            for one in out:
                self._carry(one)
            answers = self._answers(1, ANSWER_S)
            out = [x for one in answers for x in probe.answered(one, time.monotonic())]
            if not answers:
                return 0.0
        return self._burst(rates[0]) or rates[0]

    def _carry(self, one: SendData) -> None:
        self._send(one.message, one.payload)

    def _burst(self, rate: float) -> float:
        """Send many blocks at once; return their rate; 0.0: too few would fit, or some are lost."""
        count = min(BURST_BLOCKS_MAX, int(rate * BURST_S / BLOCK_BYTES))
        if count < 2:
            return 0.0
        payload, began = np.zeros(BLOCK_BYTES, np.uint8), time.monotonic()
        for number in range(count):
            self._send(Probe(self._who, 1000 + number), payload)
        answers = self._answers(count, BURST_WAIT_S)
        took_s = time.monotonic() - began
        return count * BLOCK_BYTES / took_s if len(answers) == count else 0.0

    def close(self) -> None:
        """Close the connection."""
        self._socket.close(linger=0)
        self._context.destroy(linger=0)
        self._nearby.close()


def own_memory() -> str:
    """Return why nothing of a process of this machine can be shared; "" if it can."""
    nearby = Nearby(lambda peer, frames: None, time.monotonic)
    try:
        nearby.offer(0, server=0, incarnation=0)
        return nearby.why
    finally:
        nearby.close()
