"""The broker's data port: its watch over the servers' connections, from beginning to end."""

from __future__ import annotations

from typing import Any

import pytest
import zmq
from harness import until

from zkv_brokers.relay import Relay


async def test_a_watch_ends_before_its_reader_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection that broke in between stopped libzmq's I/O thread, and `close` with it."""
    context: zmq.Context[Any] = zmq.Context()
    server, front = context.socket(zmq.ROUTER), context.socket(zmq.ROUTER)
    port = server.bind_to_random_port("tcp://127.0.0.1")
    links: list[tuple[int, bool]] = []
    relay = Relay(context, front, lambda index, up: links.append((index, up)))
    relay.connect({3: f"tcp://127.0.0.1:{port}"})
    await until(lambda: links == [(3, True)], what="the connection to server 3")
    watched = [relay._front, *relay._backs.values()]
    monitors = {one.socket: one._monitor for one in watched}
    readers_closed: list[bool] = []
    disable = zmq.Socket.disable_monitor

    def observed(socket: zmq.Socket[bytes]) -> None:
        readers_closed.append(monitors[socket].socket.closed)
        disable(socket)

    monkeypatch.setattr(zmq.Socket, "disable_monitor", observed)
    relay.close()
    relay.close()
    assert readers_closed == [False, False]
    assert all(monitor.socket.closed for monitor in monitors.values())
    server.close(0)
    context.term()


async def test_a_servers_end_is_told_at_once() -> None:
    context: zmq.Context[Any] = zmq.Context()
    server, front = context.socket(zmq.ROUTER), context.socket(zmq.ROUTER)
    port = server.bind_to_random_port("tcp://127.0.0.1")
    links: list[tuple[int, bool]] = []
    relay = Relay(context, front, lambda index, up: links.append((index, up)))
    relay.connect({0: f"tcp://127.0.0.1:{port}"})
    await until(lambda: links == [(0, True)], what="the connection to server 0")
    server.close(0)
    await until(lambda: links[1:2] == [(0, False)], what="the news of its end")
    relay.close()
    context.term()
