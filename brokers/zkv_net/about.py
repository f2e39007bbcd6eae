"""What a process says of itself to who asks."""

from __future__ import annotations

import platform
from typing import Any

import zmq

from zkv.version import VERSION
from zkv.wire import PROTOCOL_VERSION


def versions() -> dict[str, Any]:
    """Return the versions of what this process is made of."""
    return {
        "zkv": VERSION,
        "protocol": PROTOCOL_VERSION,
        "pyzmq": zmq.pyzmq_version(),
        "libzmq": zmq.zmq_version(),
        "python": platform.python_version(),
    }
