"""What a listening port bears: connections, messages in a second, messages that are none."""

from __future__ import annotations

import asyncio
import socket as sockets
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
import zmq
from harness import Cluster, cluster, until

from zkv import control as c
from zkv.limits import Limits

pytestmark = pytest.mark.one_loop


def stranger(stack: ExitStack, address: str) -> Any:
    context = stack.enter_context(zmq.Context())
    socket = context.socket(zmq.DEALER)
    stack.callback(socket.close, 0)
    socket.connect(address)
    return socket


async def still_trains(made: Cluster) -> None:
    async with made.worker(observer=False) as worker:
        await worker.init({"w": np.zeros(2, np.float32)}, rule="sgd:lr=1")
        async with worker.batch() as batch:
            batch.push("w", np.ones(2, np.float32))
        assert await batch.wait() == "committed"


@pytest.mark.parametrize("port", ["control", "relay", "server"])
async def test_messages_that_are_none_end_their_connection(port, caplog):
    limits = Limits(strikes=5)
    async with cluster(1, limits=limits, server_options={"limits": limits}) as made:
        server = made.servers[0]
        listening = {
            "control": made.broker._control,
            "relay": made.broker._relay._front,
            "server": server._data,
        }[port]
        address = {
            "control": made.address,
            "relay": made.broker.data_address,
            "server": server.address,
        }[port]
        with ExitStack() as stack:
            socket = stranger(stack, address)
            watch = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
            stack.callback(watch.close, 0)
            stack.callback(socket.disable_monitor)

            def strikes() -> int:
                return max((len(one.strikes) for one in listening._links.values()), default=0)

            for _ in range(4):
                socket.send_multipart([b"nonsense"])
            await until(lambda: strikes() == 4)
            assert not watch.poll(0)
            socket.send_multipart([b"nonsense"])
            await until(lambda: watch.poll(0))
            assert "its connection is cut" in caplog.text
            # What is sent over a new one is nonsense as before, and it is told once only.
            assert caplog.text.count("dropped a message from 127.0.0.1") == 1
        await still_trains(made)


async def test_more_messages_than_a_port_bears_are_dropped_and_sent_again(caplog):
    limits = Limits(messages_per_s=20)
    async with cluster(1, limits=limits) as made:
        with ExitStack() as stack:
            socket = stranger(stack, made.address)
            packet = c.encode_packet(c.Packet(7, 0, 1, 1, [c.Status(1)]))
            for _ in range(400):
                socket.send(packet)
            await until(lambda: "more than 20 messages a second from 127.0.0.1" in caplog.text)
        # An honest worker is only slowed down.
        async with made.worker(0) as worker:
            await worker.init({"w": np.zeros(2, np.float32)}, rule="sgd:lr=1")
            for _ in range(30):
                async with worker.batch() as batch:
                    batch.push("w", np.ones(2, np.float32))
            await batch.wait()
            assert (await worker.pull("w")).tolist() == [-30.0, -30.0]


async def test_connections_above_the_limit_are_ended_and_the_others_stay(caplog):
    limits = Limits(connections=8)
    async with cluster(1, limits=limits) as made, made.worker(0) as worker:
        await worker.init({"w": np.zeros(2, np.float32)}, rule="sgd:lr=1")
        host, port = made.address.removeprefix("tcp://").split(":")
        with ExitStack() as stack:
            flood = [
                stack.enter_context(sockets.create_connection((host, int(port)), timeout=5))
                for _ in range(40)
            ]
            await until(lambda: "has 8 connections, its most" in caplog.text)
            control = made.broker._control
            await until(lambda: len(control._open) <= 8)

            def ended() -> int:
                count = 0
                for one in flood:
                    one.setblocking(False)
                    try:
                        while one.recv(100):
                            pass
                        count += 1
                    except BlockingIOError:
                        continue
                    except OSError:
                        count += 1
                return count

            await until(lambda: ended() >= 32)
            async with worker.batch() as batch:
                batch.push("w", np.ones(2, np.float32))
            assert await batch.wait() == "committed"
        # When the flood is over there is room again.
        await until(lambda: len(control._open) <= 3)
        await asyncio.wait_for(still_trains_beside(made), 20)


async def still_trains_beside(made: Cluster) -> None:
    async with made.worker(observer=True) as other:
        assert (await other.pull("w")).shape == (2,)
