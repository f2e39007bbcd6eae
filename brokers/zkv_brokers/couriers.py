"""Sockets between servers, for the states of blocks that move: one end of them asks, by dialling
the other's data port (or the broker's, which relays); the answer comes the same way. Decides
nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import zmq

from zkv.data_messages import Data, Fetch, Part, decode_data, encode_data
from zkv.dtypes import Array
from zkv.errors import ProtocolError
from zkv.wire import split_route
from zkv_brokers.shard_events import ToServer
from zkv_net.dialling import Dialled
from zkv_net.nearby import payload_bytes
from zkv_net.safety import Safety
from zkv_net.sockets import FdSocket, new_socket

Heard = Callable[[bytes, Data, Array | None], None]
"""Called with header, message and payload (flat uint8) of what a server has sent."""


class Couriers:
    """The sockets of one server to others. `answer(route, frames)` sends over its data port."""

    def __init__(
        self,
        context: zmq.Context[Any],
        answer: Callable[[list[bytes], list[Any]], None],
        heard: Heard,
        turn_over: Callable[[], None],
        safety: Callable[[], Safety] = Safety,
    ) -> None:
        self._context = context
        self._safety = safety
        self._answer = answer
        self._heard = heard
        self._turn_over = turn_over
        self._dialled: dict[str, FdSocket] = {}
        self._askers: dict[int, list[bytes]] = {}

    def asked(self, message: Fetch, route: list[bytes]) -> None:
        """A server asks over this route."""
        self._askers[message.asker] = route

    def send(self, action: ToServer) -> None:
        """Carry out what a node wants to be sent."""
        header, payload = encode_data(action.message), action.payload
        frames: list[Any] = [b"", header] if payload is None else [b"", header, payload]
        if not action.address:
            route = self._askers.get(action.server)
            if route is not None:
                self._answer(route, frames)
            return
        if action.address not in self._dialled:
            socket = new_socket(self._context, zmq.DEALER, data=True)
            self._dialled[action.address] = Dialled(
                *(socket, action.address, self._received, self._safety()),
                turn_over=self._turn_over,
            )
        where = [action.server.to_bytes(2, "big")] if action.relayed else []
        self._dialled[action.address].send([*where, *frames])

    def _received(self, frames: list[zmq.Frame]) -> None:
        _, rest = split_route(frames)
        message = decode_data(rest[0].buffer, payload_bytes(rest))
        if not isinstance(message, Part) or len(rest) != 2:
            raise ProtocolError(f"a {type(message).__name__} is not what another server sends")
        self._heard(rest[0].bytes, message, np.frombuffer(rest[1].buffer, np.uint8))

    def close(self, linger_ms: int = 0) -> None:
        """Close all sockets."""
        for socket in self._dialled.values():
            socket.close(linger_ms)
