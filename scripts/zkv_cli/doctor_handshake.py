"""What `zkv doctor` does to find out whether it is let in: one whole ZMTP handshake, watched.

Decides nothing (`doctor_way.check_curve` does).
"""

from __future__ import annotations

import time
from typing import Any

import zmq
from zmq.utils.monitor import parse_monitor_message

from zkv_cli.doctor_way import Handshake
from zkv_net.sockets import connect, new_socket

HANDSHAKE_S = 3.0
ENDS: dict[int, str] = {
    zmq.EVENT_HANDSHAKE_SUCCEEDED: "succeeded",
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: "refused",
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: "mechanism",
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: "broken",
}


def shake_hands(address: str) -> Handshake:
    """Connect as a worker would, and return how that ended within HANDSHAKE_S."""
    context: zmq.Context[Any] = zmq.Context()
    socket = new_socket(context, zmq.DEALER, data=False)
    monitor = socket.get_monitor_socket(sum(ENDS))
    try:
        connect(socket, address)
        deadline = time.monotonic() + HANDSHAKE_S
        while (left := deadline - time.monotonic()) > 0:
            if not monitor.poll(max(1, int(1000 * left))):
                break
            event = int(parse_monitor_message(monitor.recv_multipart())["event"])
            if event in ENDS:
                return Handshake(ENDS[event])
        return Handshake("silent")
    finally:
        socket.disable_monitor()
        monitor.close(linger=0)
        socket.close(linger=0)
        context.destroy(linger=0)
