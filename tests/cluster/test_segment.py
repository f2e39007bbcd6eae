"""Memory that payloads go through: what is taken is what was put, or nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zkv.data_messages import Share, decode_data, encode_data
from zkv.errors import ProtocolError
from zkv_net.segment import COLUMNS, RECLAIM_S, SLOTS_MAX, Inbox, NotHere, Outbox, Place, Shape

pytestmark = pytest.mark.skipif(
    not hasattr(os, "memfd_create"), reason="this system has no memory files"
)
SHAPE = Shape(slots=3, slot_bytes=4096)
TOKEN = b"a token, 16 long"


@pytest.fixture
def outbox() -> Any:
    made = Outbox(SHAPE, TOKEN)
    yield made
    made.close()


def inbox_of(outbox: Outbox, column: int = 0) -> Inbox:
    return Inbox(os.getpid(), outbox.fd, outbox.shape, outbox.token, column)


def payload(number: int, nbytes: int = 100) -> Any:
    return np.full(nbytes, number % 251, np.uint8)


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["put", "put late", "take", "drop"]),
        st.integers(0, 2),
        st.integers(0, 5),
        st.integers(0, 4096),
    ),
    max_size=60,
)


@given(actions=ACTIONS)
def test_what_is_taken_is_what_was_put_or_nothing(actions: list[tuple[str, int, int, int]]) -> None:
    """Readers take in any order or not at all, some payloads are told to several of them, and what
    lies too long is written over."""
    outbox = Outbox(SHAPE, TOKEN)
    try:
        readers = [inbox_of(outbox, column) for column in range(3)]
        told: list[list[tuple[Place, bytes]]] = [[], [], []]
        lost: list[Place] = []
        arrays: dict[tuple[int, int], Any] = {}
        now = 0.0
        for at, (what, column, key, nbytes) in enumerate(actions):
            now += RECLAIM_S if what == "put late" else 0.0
            if what.startswith("put"):
                given = arrays.setdefault((key, nbytes), payload(at, nbytes)) if key else None
                sent = payload(at, nbytes) if given is None else given
                place = outbox.put(column, sent, (key, nbytes) if key else None, now)
                if place is not None:
                    told[column].append((place, sent.tobytes()))
                else:
                    waiting = [place for some in told for place, _ in some] + lost
                    assert len({one.slot for one in waiting}) == SHAPE.slots
            elif told[column] and what == "take":
                place, sent_bytes = told[column].pop(0)
                found = readers[column].take(place)
                assert found is None or found.tobytes() == sent_bytes
            elif told[column]:
                lost.append(told[column].pop()[0])
    finally:
        outbox.close()


def test_a_full_segment_has_room_again_when_something_was_taken(outbox: Outbox) -> None:
    inbox = inbox_of(outbox)
    places = [outbox.put(0, payload(at), None, 0.0) for at in range(3)]
    assert outbox.put(0, payload(9), None, 0.0) is None
    assert places[1] is not None
    assert inbox.take(places[1]).tolist() == [1] * 100
    fourth = outbox.put(0, payload(9), None, 0.0)
    assert fourth is not None
    assert fourth.slot == places[1].slot
    assert inbox.take(places[1]) is None
    assert inbox.take(fourth).tolist() == [9] * 100


def test_what_nobody_takes_is_written_over_in_the_end(outbox: Outbox) -> None:
    inbox = inbox_of(outbox)
    places = [outbox.put(0, payload(at), None, float(at)) for at in range(3)]
    assert outbox.put(0, payload(9), None, RECLAIM_S - 0.1) is None
    fourth = outbox.put(0, payload(9), None, RECLAIM_S + 0.5)
    assert [inbox.take(place) is None for place in places] == [True, False, False]
    assert inbox.take(fourth).tolist() == [9] * 100


def test_the_same_values_are_written_once_for_all_readers(outbox: Outbox) -> None:
    readers = [inbox_of(outbox, column) for column in (0, 1)]
    values = payload(7)
    first, second = (outbox.put(column, values, "block 1", 0.0) for column in (0, 1))
    assert first == second
    assert readers[0].take(first).tolist() == [7] * 100
    # It is not free yet, as the other one has not taken it.
    others = [outbox.put(0, payload(at), None, 0.0) for at in range(3)]
    assert others[2] is None
    assert readers[1].take(second).tolist() == [7] * 100
    assert outbox.put(0, payload(3), None, 0.0) == Place(first.slot, 4, 100)
    # What is written over is not told again.
    assert outbox.put(1, values, "block 1", 0.0) is None


def test_a_reader_that_is_gone_holds_nothing(outbox: Outbox) -> None:
    for at in range(3):
        outbox.put(0, payload(at), None, 0.0)
    outbox.forget(0)
    assert outbox.put(1, payload(5), None, 0.0) is not None


@pytest.mark.parametrize(
    "place", [Place(3, 1, 10), Place(2**63, 1, 10), Place(0, 1, 4097), Place(0, 1, 2**63)]
)
def test_a_place_outside_is_refused(outbox: Outbox, place: Place) -> None:
    outbox.put(0, payload(1), None, 0.0)
    with pytest.raises(ProtocolError, match="outside"):
        inbox_of(outbox).take(place)


@given(frame=st.binary(max_size=40))
def test_any_bytes_are_a_place_or_an_error(frame: bytes) -> None:
    try:
        place = Place.decode(frame)
    except ProtocolError:
        assert len(frame) != 24
    else:
        assert place.encode() == frame


# --- what is opened --------------------------------------------------------------------------


def test_only_its_own_user_can_open_it_and_nobody_can_cut_it(outbox: Outbox) -> None:
    assert os.fstat(outbox.fd).st_mode & 0o777 == 0o600
    for size in (0, SHAPE.nbytes + 1):
        with pytest.raises(PermissionError):
            os.ftruncate(outbox.fd, size)


def test_what_is_no_such_memory_is_not_opened(outbox: Outbox, tmp_path: Path) -> None:
    """A peer can tell any number: of a pipe, which would block, of a file, of another's memory."""
    reading, writing = os.pipe()
    file = os.open(tmp_path / "file", os.O_CREAT | os.O_RDWR)
    os.ftruncate(file, SHAPE.nbytes)
    foreign = os.memfd_create("zkv-payloads")
    os.ftruncate(foreign, SHAPE.nbytes)
    try:
        for fd, word in [
            (reading, "something else"),
            (file, "something else"),
            (foreign, "bytes"),
            (99_999, "not here"),
        ]:
            with pytest.raises(NotHere, match=word):
                Inbox(os.getpid(), fd, SHAPE, TOKEN, 0)
        with pytest.raises(NotHere, match="not here"):
            Inbox(2**22 + 1, outbox.fd, SHAPE, TOKEN, 0)
        with pytest.raises(NotHere, match="were told"):
            Inbox(os.getpid(), outbox.fd, Shape(4, 4096), TOKEN, 0)
        with pytest.raises(NotHere, match="another process's"):
            Inbox(os.getpid(), outbox.fd, SHAPE, b"another token...", 0)
        before = set(os.listdir("/proc/self/fd"))
        inbox_of(outbox)
        assert set(os.listdir("/proc/self/fd")) == before
    finally:
        for fd in (reading, writing, file, foreign):
            os.close(fd)


WRITER = """
import sys, numpy as np
from zkv_net.segment import Outbox, Shape
outbox = Outbox(Shape(3, 4096), b"a token, 16 long")
place = outbox.put(5, np.arange(100, dtype=np.uint8), None, 0.0)
print(outbox.fd, place.slot, place.number, place.nbytes, flush=True)
sys.stdin.read()
"""


def test_it_outlives_a_writer_that_is_killed_and_leaves_nothing() -> None:
    before = set(os.listdir("/dev/shm")) if Path("/dev/shm").exists() else set()
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert writer.stdout is not None
    fd, slot, number, nbytes = map(int, writer.stdout.readline().split())
    inbox = Inbox(writer.pid, fd, SHAPE, TOKEN, 5)
    writer.send_signal(signal.SIGKILL)
    writer.wait(10)
    writer.communicate()
    assert inbox.take(Place(slot, number, nbytes)).tolist() == list(range(100))
    with pytest.raises(NotHere):
        Inbox(writer.pid, fd, SHAPE, TOKEN, 5)
    assert before >= (set(os.listdir("/dev/shm")) if Path("/dev/shm").exists() else set())


def test_an_offer_names_no_more_than_there_can_be() -> None:
    def offer(column: int, slots: int) -> Share:
        return Share(0, 1, "here", 1, 1, slots, 4096, column, TOKEN)

    assert decode_data(encode_data(offer(COLUMNS - 1, SLOTS_MAX)), None) == offer(63, 4096)
    for beyond in (offer(COLUMNS, SLOTS_MAX), offer(0, SLOTS_MAX + 1), offer(0, 0)):
        with pytest.raises(ProtocolError):
            decode_data(encode_data(beyond), None)
