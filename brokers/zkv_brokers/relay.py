"""The data port of the broker: route `broker`, and an eye on the servers' connections.

Frames pass as they are, nothing is decoded. A worker puts the server's index before the empty
delimiter; the broker replaces it by the worker's route, and the server answers over the same route.

The connection to each server is kept whatever the route is, as it tells at once when the process
behind it is gone: a busy server is silent, but its connection stays.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import zmq
from zmq.utils.monitor import parse_monitor_message

from zkv_net.sockets import FdSocket, connect, new_socket

log = logging.getLogger("zkv.broker")
WATCHED = zmq.EVENT_CONNECTED | zmq.EVENT_DISCONNECTED


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
    ) -> None:
        self._context = context
        self._socket_bytes = socket_bytes
        self._link_changed = link_changed
        self._front = FdSocket(front, self._from_worker)
        self._backs: dict[int, FdSocket] = {}
        self._watches: dict[int, FdSocket] = {}
        self._monitors: list[FdSocket] = []
        """Those of servers that have gone are closed."""
        self.bytes_relayed = 0

    def connect(self, addresses: dict[int, str]) -> None:
        """Connect a DEALER to each server that has none yet, and watch its connection; leave those
        that are not named any more."""
        for index in self._backs.keys() - addresses.keys():
            self._leave(index)
        for index, address in addresses.items():
            if index in self._backs:
                continue
            size = self._socket_bytes
            socket = new_socket(self._context, zmq.DEALER, data=True, buffer_bytes=size)
            monitor = socket.get_monitor_socket(WATCHED)
            self._watches[index] = FdSocket(monitor, self._watcher(index))
            self._monitors.append(self._watches[index])
            connect(socket, address)
            self._backs[index] = FdSocket(socket, self._from_server)

    def _watcher(self, index: int) -> Callable[[list[zmq.Frame]], None]:
        def watch(frames: list[zmq.Frame]) -> None:
            event = parse_monitor_message([frame.bytes for frame in frames])
            self._link_changed(index, event["event"] == zmq.EVENT_CONNECTED)

        return watch

    def _from_worker(self, frames: list[zmq.Frame]) -> None:
        if len(frames) < 4 or len(frames[1]) != 2:
            log.warning("dropped a data message of %d frames without a server's index", len(frames))
            return
        back = self._backs.get(int.from_bytes(frames[1].bytes, "big"))
        if back is not None:
            self.bytes_relayed += len(frames[-1])
            back.send([frames[0], *frames[2:]])

    def _from_server(self, frames: list[zmq.Frame]) -> None:
        self.bytes_relayed += len(frames[-1])
        self._front.send(frames)

    def close(self) -> None:
        """Close all sockets; a second call does nothing."""
        self._front.close()
        for index in list(self._backs):
            self._leave(index)

    def _leave(self, index: int) -> None:
        back = self._backs.pop(index)
        if not back.socket.closed:
            back.socket.disable_monitor()
        back.close()
        # Only now: with nobody to read an event, libzmq's I/O thread would wait for ever to write
        # it, and disable_monitor for that thread.
        self._watches.pop(index).close()
