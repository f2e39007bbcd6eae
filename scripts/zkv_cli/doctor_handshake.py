"""What `zkv doctor` does to find out whether it is let in: one whole ZMTP handshake, watched.

Decides nothing (`doctor_way.check_curve` does).
"""

from __future__ import annotations

import time
from typing import Any

import zmq
from zmq.utils.monitor import parse_monitor_message

from zkv.errors import ConfigError
from zkv_cli.doctor_way import Handshake
from zkv_net.safety import Safety, choose, said_insecure
from zkv_net.sockets import connect, new_socket

HANDSHAKE_S = 3.0
ENDS: dict[int, str] = {
    zmq.EVENT_HANDSHAKE_SUCCEEDED: "succeeded",
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: "refused",
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: "mechanism",
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: "broken",
}


def shake_hands(address: str) -> Handshake:
    """Connect as a worker would, with this process's keys if it has some, and return how that
    ended within HANDSHAKE_S."""
    context: zmq.Context[Any] = zmq.Context()
    socket = new_socket(context, zmq.DEALER, data=False)
    monitor = socket.get_monitor_socket(sum(ENDS))
    try:
        safety = choose(context, dials=[address], insecure=said_insecure())
        safety.dial(socket, address)
        connect(socket, address)
        return _end(monitor, safety, address)
    except ConfigError as error:
        return Handshake("unusable", str(error))
    finally:
        socket.disable_monitor()
        monitor.close(linger=0)
        socket.close(linger=0)
        context.destroy(linger=0)


def _end(monitor: zmq.Socket[bytes], safety: Safety, address: str) -> Handshake:
    deadline = time.monotonic() + HANDSHAKE_S
    while (left := deadline - time.monotonic()) > 0:
        if not monitor.poll(max(1, int(1000 * left))):
            break
        event = int(parse_monitor_message(monitor.recv_multipart())["event"])
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            return Handshake(ENDS[event], encrypts=safety.encrypts)
        if event in ENDS:
            why = safety.why_refused(address, event)
            return Handshake(ENDS[event], why, safety.encrypts)
    why = safety.why_refused(address, zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL)
    return Handshake("silent", why, safety.encrypts)
