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
from zkv_net.safety import choose, said_insecure
from zkv_net.sockets import connect, new_socket

HANDSHAKE_S = 3.0
ENDS: dict[int, str] = {
    zmq.EVENT_HANDSHAKE_SUCCEEDED: "succeeded",
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: "refused",
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: "mechanism",
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: "broken",
}


def shake_hands(address: str, mechanism: str) -> Handshake:
    """Connect as a worker would, with this process's keys if it has some, and return how that
    ended within HANDSHAKE_S. `mechanism` is what the peer has said that it uses."""
    context: zmq.Context[Any] = zmq.Context()
    socket = new_socket(context, zmq.DEALER, data=False)
    monitor = socket.get_monitor_socket(sum(ENDS))
    try:
        safety = choose(context, dials=[address], insecure=said_insecure())
        safety.dial(socket, address)
        connect(socket, address)
        event = _end(monitor)
        outcome = "silent" if event is None else ENDS[event]
        if outcome == "succeeded":
            return Handshake(outcome, encrypts=safety.encrypts)
        if (mechanism == "CURVE") != safety.encrypts:
            # libzmq tells why only if this end is the first to see it, and else hangs up.
            outcome, event = "mechanism", zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
        why = safety.why_refused(address, event or zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL)
        return Handshake(outcome, why, safety.encrypts)
    except ConfigError as error:
        return Handshake("unusable", str(error))
    finally:
        socket.disable_monitor()
        monitor.close(linger=0)
        socket.close(linger=0)
        context.destroy(linger=0)


def _end(monitor: zmq.Socket[bytes]) -> int | None:
    """Return the event that a handshake ends with; None: it does not within HANDSHAKE_S."""
    deadline = time.monotonic() + HANDSHAKE_S
    while (left := deadline - time.monotonic()) > 0:
        if not monitor.poll(max(1, int(1000 * left))):
            break
        event = int(parse_monitor_message(monitor.recv_multipart())["event"])
        if event in ENDS:
            return event
    return None
