"""Connections of ZeroMQ's by their descriptors: whose they are, and how one is ended.

libzmq has no call to end one connection of many. It notices when the kernel says that it is over.
"""

from __future__ import annotations

import os
import socket as sockets
from typing import Any


def far_end(descriptor: int) -> Any:
    """Return the address of the other end of a connection; None: it is gone already."""
    try:
        with sockets.socket(fileno=os.dup(descriptor)) as copy:
            return copy.getpeername()
    except OSError:
        return None


def host_of(far: Any) -> str:
    """Return the machine of a far end, in words."""
    return str(far[0]) if far else "a machine that is gone already"


def cut(descriptor: int, far: Any) -> bool:
    """End the connection with this descriptor, if its far end is still that one."""
    try:
        # A copy of the descriptor stays this connection's, whatever libzmq does meanwhile; if it
        # has done something already, the far end differs.
        with sockets.socket(fileno=os.dup(descriptor)) as copy:
            if far is None or copy.getpeername() != far:
                return False
            copy.shutdown(sockets.SHUT_RDWR)
            return True
    except OSError:
        return False
