"""The data port of the broker: route `broker`, and an eye on the servers' connections.

Frames pass as they are, nothing is decoded. A worker puts the server's index before the empty
delimiter; the broker replaces it by the worker's route (where there are keys, with the worker's in
front of it, which the server could not see otherwise), and the server answers over the same route.

The connection to each server is kept whatever the route is, as it tells at once when the process
behind it is gone: a busy server is silent, but its connection stays.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import zmq

from zkv.limits import Limits
from zkv.roles import KEY_BYTES
from zkv_net.dialling import Dialled
from zkv_net.listening import Listening
from zkv_net.safety import Safety
from zkv_net.sockets import new_socket

log = logging.getLogger("zkv.broker")


class Relay:
    """Workers' data in front, one DEALER for each server behind.

    `link_changed(index, up)` is called when a server's connection comes up or breaks;
    `socket_bytes` is as with `new_socket`, for the connections to servers.
    """

    def __init__(
        self,
        context: zmq.Context[Any],
        front: zmq.Socket[bytes],
        link_changed: Callable[[int, bool], None],
        socket_bytes: int = 0,
        safety: Safety | None = None,
        limits: Limits | None = None,
    ) -> None:
        self._context = context
        self._safety = safety or Safety()
        self._socket_bytes = socket_bytes
        self._link_changed = link_changed
        roles, where = ("worker", "server", "follower", "admin"), "the broker's data port"
        self._front = Listening(front, self._from_worker, self._safety, roles, where, limits=limits)
        self._backs: dict[int, Dialled] = {}
        self._addresses: dict[int, str] = {}
        self.bytes_relayed = 0

    def connect(self, addresses: dict[int, str]) -> None:
        """Connect a DEALER to each server that has none yet, and watch its connection; leave those
        that are not named any more."""
        for index in list(self._backs):
            if self._addresses.get(index) != addresses.get(index):
                self._leave(index)
        self._addresses = dict(addresses)
        for index, address in addresses.items():
            if index in self._backs:
                continue
            size = self._socket_bytes
            socket = new_socket(self._context, zmq.DEALER, data=True, buffer_bytes=size)
            changed = partial(self._link_changed, index)
            self._backs[index] = Dialled(
                socket, address, self._from_server, self._safety, link_changed=changed
            )

    def _from_worker(self, frames: list[zmq.Frame]) -> None:
        if len(frames) < 4 or len(frames[1]) != 2:
            why = f"a data message of {len(frames)} frames without a server's index"
            self._front.strike(frames[0].bytes, why)
            return
        back = self._backs.get(int.from_bytes(frames[1].bytes, "big"))
        if back is not None:
            self.bytes_relayed += len(frames[-1])
            route: Any = frames[0]
            if self._safety.encrypts:
                if len(frames[2]):
                    why = "a data message whose route is longer than it can be"
                    self._front.strike(frames[0].bytes, why)
                    return
                route = bytes.fromhex(self._safety.sender(frames[-1])) + route.bytes
            back.send([route, *frames[2:]])

    def _from_server(self, frames: list[zmq.Frame]) -> None:
        self.bytes_relayed += len(frames[-1])
        if self._safety.encrypts:
            self._front.send([frames[0].bytes[KEY_BYTES:], *frames[1:]])
        else:
            self._front.send(frames)

    def close(self) -> None:
        """Close all sockets; a second call does nothing."""
        self._front.close()
        for index in list(self._backs):
            self._leave(index)

    def _leave(self, index: int) -> None:
        self._backs.pop(index).close()
