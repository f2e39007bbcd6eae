"""After a cut a connection's kernel sends again within a second, however long the cut was."""

from __future__ import annotations

import os
import socket
import sys

import numpy as np
import pytest
from harness import cluster

import zkv.aio
from zkv_net.sockets import RESEND_MOST_MS, TCP_RTO_MAX_MS, tries_often


def longest_pause_ms(descriptor: int) -> int | None:
    """What the kernel waits at most before it sends again; None: this is no TCP connection."""
    try:
        with socket.socket(fileno=os.dup(descriptor)) as one:
            one.getpeername()
            return one.getsockopt(socket.IPPROTO_TCP, TCP_RTO_MAX_MS)
    except OSError:
        return None


def kernel_can() -> bool:
    if not sys.platform.startswith("linux"):
        return False
    with socket.socket() as one:
        try:
            one.setsockopt(socket.IPPROTO_TCP, TCP_RTO_MAX_MS, RESEND_MOST_MS)
        except OSError:
            return False
    return True


@pytest.mark.cluster
@pytest.mark.one_loop
@pytest.mark.skipif(not kernel_can(), reason="Linux can since 6.15")
async def test_every_connection_of_a_run_tries_again_each_second() -> None:
    async with (
        cluster(2, optimizer="sgd:lr=1") as made,
        zkv.aio.connect(made.address, shared_bytes=0) as worker,
    ):
        await worker.init({"w": np.zeros(9, np.float32)})
        async with worker.batch() as batch:
            batch.push("w", np.ones(9, np.float32))
        await batch.wait()
        pauses = [longest_pause_ms(int(name)) for name in os.listdir("/proc/self/fd")]
        found = [one for one in pauses if one is not None]
    # Both ends are here: three processes' control, two servers' data and the broker's own to them.
    assert len(found) >= 10
    assert set(found) == {RESEND_MOST_MS}


def test_what_has_ended_meanwhile_or_is_no_connection_is_left_alone() -> None:
    with socket.socket() as one:
        number = one.fileno()
    tries_often(number)
    with open(os.devnull) as file:
        tries_often(file.fileno())
