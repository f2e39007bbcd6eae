"""A parameter server on plain blocking sockets, of the same pattern as zkv: what ZeroMQ, Python's
loops, acknowledgements, versions and updates cost is what zkv takes longer than this.

Tensors are cut into chunks of 1 MiB, small ones joined; chunks are spread over servers by bytes. A
worker sends its chunks to the servers, which sum the first one's in place and send the sum to all;
sending is asking. Sums land where they belong, without a copy.
"""

from __future__ import annotations

import json
import socket
import struct
import threading
from typing import Any

import numpy as np
import task

CHUNK_BYTES = 1 << 20
SMALL_BYTES = 64 << 10
HEADER = struct.Struct("<II")
"""A chunk's number, and the round's."""


class Chunk:
    """A stretch of one tensor, or small tensors one behind the other."""

    def __init__(self, tensors: list[int], begin: int, elements: int) -> None:
        self.tensors, self.begin, self.elements = tensors, begin, elements
        self.server = 0


def plan(given: list[int], servers: int) -> list[Chunk]:
    """Return the chunks, each with its server, the same in every process."""
    chunks: list[Chunk] = []
    joined: Chunk | None = None
    for number, size in enumerate(given):
        if 4 * size > SMALL_BYTES:
            step = CHUNK_BYTES // 4
            chunks += [Chunk([number], at, min(step, size - at)) for at in range(0, size, step)]
        elif joined is None or 4 * (joined.elements + size) > CHUNK_BYTES:
            joined = Chunk([number], 0, size)
            chunks.append(joined)
        else:
            joined.tensors.append(number)
            joined.elements += size
    load = [0] * servers
    for chunk in sorted(chunks, key=lambda one: -one.elements):
        chunk.server = load.index(min(load))
        load[chunk.server] += chunk.elements
    return chunks


def receive(connection: socket.socket, into: memoryview) -> None:
    """Fill a buffer.

    Raises:
        EOFError: the other end has closed.
    """
    while len(into):
        count = connection.recv_into(into)
        if not count:
            raise EOFError
        into = into[count:]


def send(connection: socket.socket, header: bytes, payload: memoryview) -> None:
    """Send both, with one call if the kernel takes them."""
    sent = connection.sendmsg([header, payload])
    if sent < len(header) + len(payload):
        whole = header[sent:], payload[max(0, sent - len(header)) :]
        for part in whole:
            connection.sendall(part)


# --- a server --------------------------------------------------------------------------------


class Slot:
    """One chunk of one of two rounds in turn: nobody is two rounds ahead of who is behind."""

    def __init__(self, elements: int) -> None:
        self.sum = np.empty(elements, np.float32)
        self.bytes = memoryview(self.sum).cast("B")
        self.count = 0
        self.lock = threading.Lock()


def serve(case: task.Case, index: int, at: str) -> None:
    """Sum for all workers, until they close."""
    chunks = plan(task.sizes(case.tensors), case.servers)
    slots = {
        (number, turn): Slot(chunk.elements)
        for number, chunk in enumerate(chunks)
        for turn in (0, 1)
        if chunk.server == index
    }
    with socket.create_server((at, 0)) as listener:
        print(f"{at}:{listener.getsockname()[1]}", flush=True)
        peers = [listener.accept()[0] for _ in range(case.workers)]
    writing = [threading.Lock() for _ in peers]

    def sent(header: bytes, payload: memoryview) -> None:
        for peer, lock in zip(peers, writing, strict=True):
            with lock:
                send(peer, header, payload)

    def read(peer: socket.socket) -> None:
        header = bytearray(HEADER.size)
        largest = max(chunk.elements for chunk in chunks)
        spare = np.empty(largest, np.float32)
        while True:
            try:
                receive(peer, memoryview(header))
            except (EOFError, ConnectionError):
                return
            number, turn = HEADER.unpack(header)
            slot = slots[number, turn % 2]
            if take(peer, slot, spare, case.workers):
                sent(bytes(header), slot.bytes)

    threads = [threading.Thread(target=read, args=(peer,)) for peer in peers]
    for peer in peers:
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def take(peer: socket.socket, slot: Slot, spare: Any, workers: int) -> bool:
    """Receive a chunk and add it up; return whether that was the last worker's."""
    if slot.lock.acquire(blocking=False):
        # The first one's is the sum so far; who comes meanwhile receives beside it.
        if slot.count == 0:
            receive(peer, slot.bytes)
            return counted(slot, workers)
        slot.lock.release()
    mine = spare[: len(slot.sum)]
    receive(peer, memoryview(mine).cast("B"))
    slot.lock.acquire()
    if slot.count == 0:
        np.copyto(slot.sum, mine)
    else:
        np.add(slot.sum, mine, out=slot.sum)
    return counted(slot, workers)


def counted(slot: Slot, workers: int) -> bool:
    """Count a contribution under the slot's lock, and release it; was it the last?"""
    slot.count = (slot.count + 1) % workers
    last = slot.count == 0
    slot.lock.release()
    return last


# --- a worker --------------------------------------------------------------------------------


class Ways:
    """A worker's connections, each with a thread that receives sums and one that sends."""

    def __init__(self, chunks: list[Chunk], servers: list[str], given: list[Any]) -> None:
        self.chunks = chunks
        self.given, self.results = given, [np.empty_like(one) for one in given]
        self.joined = [self._joined(chunk, given) for chunk in chunks]
        self.sums = [None if one is None else np.empty_like(one) for one in self.joined]
        self.round = 0
        self.connections = []
        for server in servers:
            host, port = server.rsplit(":", 1)
            connection = socket.create_connection((host, int(port)))
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.connections.append(connection)
        self.outward = [self._part(chunk, given, self.joined) for chunk in chunks]
        self.inward = [self._part(chunk, self.results, self.sums) for chunk in chunks]

    def _joined(self, chunk: Chunk, given: list[Any]) -> Any:
        small = len(chunk.tensors) > 1 or 4 * len(given[chunk.tensors[0]]) <= SMALL_BYTES
        return np.empty(chunk.elements, np.float32) if small else None

    def _part(self, chunk: Chunk, whole: list[Any], joined: list[Any]) -> memoryview:
        own = joined[self.chunks.index(chunk)]
        if own is None:
            own = whole[chunk.tensors[0]][chunk.begin : chunk.begin + chunk.elements]
        return memoryview(own).cast("B")

    def _push(self, server: int) -> None:
        for number, chunk in enumerate(self.chunks):
            if chunk.server != server:
                continue
            if (joined := self.joined[number]) is not None:
                np.concatenate([self.given[one] for one in chunk.tensors], out=joined)
            header = HEADER.pack(number, self.round)
            send(self.connections[server], header, self.outward[number])

    def _pull(self, server: int) -> None:
        header = bytearray(HEADER.size)
        for _ in range(sum(chunk.server == server for chunk in self.chunks)):
            receive(self.connections[server], memoryview(header))
            number, _ = HEADER.unpack(header)
            receive(self.connections[server], self.inward[number])
            if (summed := self.sums[number]) is not None:
                begin = 0
                for one in self.chunks[number].tensors:
                    end = begin + len(self.results[one])
                    self.results[one][...] = summed[begin:end]
                    begin = end

    def once(self) -> None:
        """Send all gradients and receive all sums."""
        count = len(self.connections)
        jobs = [(self._push, at) for at in range(count)] + [(self._pull, at) for at in range(count)]
        threads = [threading.Thread(target=job, args=(at,)) for job, at in jobs[:-1]]
        for thread in threads:
            thread.start()
        # The last one's is this thread: a case with one server needs one more, not two.
        jobs[-1][0](jobs[-1][1])
        for thread in threads:
            thread.join()
        self.round += 1


def work(case: task.Case, rank: int, at: str) -> task.Told:
    """Send gradients that are there already."""
    given = task.sizes(case.tensors)
    ways = Ways(plan(given, case.servers), json.loads(at), task.gradients(given, rank))
    told = task.timed(case, rank, ways.once, lambda: task.check(ways.results, case))
    for connection in ways.connections:
        connection.close()
    return told


def drive(case: task.Case) -> list[task.Told]:
    """Run servers and workers."""
    servers = [
        task.started(case, "server", at, case.host("server", at)[0]) for at in range(case.servers)
    ]
    return task.crew(case, json.dumps([task.listening(server) for server in servers]))


if __name__ == "__main__":
    task.main(drive, work, serve)
