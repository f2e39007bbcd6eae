"""What a process says of itself to who asks: versions, its clock, its file descriptors."""

from __future__ import annotations

import platform
import time
from typing import Any

import zmq

from zkv.version import VERSION
from zkv.wire import PROTOCOL_VERSION
from zkv_net import descriptors


def versions() -> dict[str, Any]:
    """Return the versions of what this process is made of."""
    return {
        "zkv": VERSION,
        "protocol": PROTOCOL_VERSION,
        "pyzmq": zmq.pyzmq_version(),
        "libzmq": zmq.zmq_version(),
        "python": platform.python_version(),
    }


def process(data_address: str) -> dict[str, Any]:
    """Return what a broker says of its process: versions, the time of day in seconds, descriptors
    (opened, and the limit; 0: none is known), and where its data port is."""
    limits = descriptors.limits()
    return {
        "versions": versions(),
        "time_s": time.time(),
        "descriptors": {
            "opened": descriptors.opened(),
            "limit": limits[0] if limits is not None else 0,
        },
        "data_address": data_address,
    }
