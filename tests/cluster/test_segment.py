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
from zkv_net.inbox import Inbox, NotHere
from zkv_net.segment import ENTRIES_MAX, PAGE, RECLAIM_S, Outbox, Place, Shape

pytestmark = pytest.mark.skipif(
    not hasattr(os, "memfd_create"), reason="this system has no memory files"
)
SLOTS, SLOT_BYTES = 3, PAGE
SHAPE = Shape(entries=5, data_bytes=(SLOTS + 2) * PAGE)
TOKEN = b"a token, 16 long"


def outbox_of(shape: Shape = SHAPE) -> Outbox:
    return Outbox(shape, TOKEN, slots=SLOTS, slot_bytes=SLOT_BYTES)


@pytest.fixture
def outbox() -> Any:
    made = outbox_of()
    yield made
    made.close()


def inbox_of(outbox: Outbox) -> Inbox:
    return Inbox(os.getpid(), outbox.fd, outbox.shape, outbox.token)


def payload(number: int, nbytes: int = 100) -> Any:
    return np.full(nbytes, number % 251, np.uint8)


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["put", "put late", "put own", "take", "stay", "leave", "drop"]),
        st.integers(0, 2),
        st.integers(0, 5),
        st.integers(1, SLOT_BYTES),
    ),
    max_size=60,
)


@given(actions=ACTIONS)
def test_what_is_taken_is_what_was_put_or_nothing(actions: list[tuple[str, int, int, int]]) -> None:
    """Readers take in any order or not at all, or look at what lies there as long as they like;
    some payloads are told to several of them, and what lies too long untaken is written over."""
    outbox = outbox_of()
    own = [outbox.allocate(PAGE) for _ in range(2)]
    try:
        readers = [inbox_of(outbox) for _ in range(3)]
        told: list[list[tuple[Place, bytes]]] = [[], [], []]
        lost: list[Place] = []
        stayed: list[tuple[Any, bytes]] = []
        arrays: dict[tuple[int, int], Any] = {}
        now = 0.0
        for at, (what, reader, key, nbytes) in enumerate(actions):
            now += RECLAIM_S if what == "put late" else 0.0
            if what == "put own":
                array = own[key % 2]
                if not outbox.is_lent(array, now):
                    array[:] = at % 251
                sent = array[:nbytes]
            elif what.startswith("put"):
                given = arrays.setdefault((key, nbytes), payload(at, nbytes)) if key else None
                sent = payload(at, nbytes) if given is None else given
            if what.startswith("put"):
                named = (key, nbytes) if key and what != "put own" else None
                place = outbox.put(reader, sent, named, now)
                if place is not None:
                    assert place.stays == (what == "put own")
                    told[reader].append((place, sent.tobytes()))
                else:
                    waiting = [place for some in told for place, _ in some] + lost
                    full = len({one.at for one in waiting if not one.stays}) == SLOTS
                    assert full or len(waiting) + len(stayed) >= SHAPE.entries
            elif what in ("take", "stay") and told[reader]:
                place, sent_bytes = told[reader].pop(0)
                found = readers[reader].take(place, stay=what == "stay")
                assert found is None or found.tobytes() == sent_bytes
                if found is not None and what == "stay" and place.stays:
                    assert not found.flags.writeable
                    stayed.append((found, sent_bytes))
                del found
            elif what == "leave" and stayed:
                stayed.pop(key % len(stayed))
            elif what == "drop" and told[reader]:
                lost.append(told[reader].pop()[0])
            assert all(found.tobytes() == sent_bytes for found, sent_bytes in stayed)
        stayed.clear()
        outbox.sweep(now + RECLAIM_S)
        assert not any(outbox.is_lent(array, now) for array in own)
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
    assert fourth.at == places[1].at
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
    readers = [inbox_of(outbox) for _ in range(2)]
    values = payload(7)
    first, second = (outbox.put(reader, values, "block 1", 0.0) for reader in (0, 1))
    assert first is not None
    assert second is not None
    assert first.at == second.at
    assert readers[0].take(first).tolist() == [7] * 100
    # It is not free yet, as the other one has not taken it.
    others = [outbox.put(0, payload(at), None, 0.0) for at in range(3)]
    assert others[2] is None
    assert readers[1].take(second).tolist() == [7] * 100
    fifth = outbox.put(0, payload(3), None, 0.0)
    assert fifth is not None
    assert fifth.at == first.at
    # What is written over is not told again.
    assert outbox.put(1, values, "block 1", 0.0) is None


def test_what_lives_there_is_not_copied_and_lent_until_the_last_reader_has_let_go(
    outbox: Outbox,
) -> None:
    readers, own = [inbox_of(outbox) for _ in range(2)], outbox.allocate(PAGE)
    assert own is not None
    own[:] = 1
    places = [outbox.put(at, own, None, 0.0) for at in range(2)]
    found = [
        reader.take(place, stay=True)
        for reader, place in zip(readers, places, strict=True)
        if place
    ]
    own[:] = 2
    assert [one.tolist() for one in found if one is not None] == [[2] * PAGE] * 2
    for _ in range(2):
        assert outbox.is_lent(own, 2 * RECLAIM_S)
        view = found.pop()[5:].reshape(1, -1)
        assert outbox.is_lent(own, 2 * RECLAIM_S)
        del view
    assert not outbox.is_lent(own, 0.0)
    assert outbox.allocate(PAGE) is not None
    assert outbox.allocate(1) is None


def test_a_reader_that_is_gone_holds_nothing(outbox: Outbox) -> None:
    own = outbox.allocate(PAGE)
    assert own is not None
    outbox.put(0, own, None, 0.0)
    for at in range(3):
        outbox.put(0, payload(at), None, 0.0)
    outbox.forget(0)
    assert not outbox.is_lent(own, 0.0)
    assert outbox.put(1, payload(5), None, 0.0) is not None


@pytest.mark.parametrize(
    "place",
    [
        Place(5, 1, 0, 10, False),
        Place(2**63, 1, 0, 10, False),
        Place(0, 1, 0, SHAPE.data_bytes + 1, False),
        Place(0, 1, SHAPE.data_bytes, 1, True),
        Place(0, 1, 2**63, 2**63, True),
    ],
)
def test_a_place_outside_is_refused(outbox: Outbox, place: Place) -> None:
    outbox.put(0, payload(1), None, 0.0)
    with pytest.raises(ProtocolError, match="outside"):
        inbox_of(outbox).take(place)


@given(frame=st.binary(max_size=40) | st.binary(min_size=33, max_size=33))
def test_any_bytes_are_a_place_or_an_error(frame: bytes) -> None:
    try:
        place = Place.decode(frame)
    except ProtocolError:
        assert len(frame) != 33
    else:
        assert place.encode()[:32] == frame[:32]


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
                Inbox(os.getpid(), fd, SHAPE, TOKEN)
        with pytest.raises(NotHere, match="not here"):
            Inbox(2**22 + 1, outbox.fd, SHAPE, TOKEN)
        with pytest.raises(NotHere, match="were told"):
            Inbox(os.getpid(), outbox.fd, Shape(4, 4096), TOKEN)
        with pytest.raises(NotHere, match="another process's"):
            Inbox(os.getpid(), outbox.fd, SHAPE, b"another token...")
        before = set(os.listdir("/proc/self/fd"))
        inbox_of(outbox)
        assert set(os.listdir("/proc/self/fd")) == before
    finally:
        for fd in (reading, writing, file, foreign):
            os.close(fd)


WRITER = """
import sys, numpy as np
from zkv_net.segment import Outbox, Shape
outbox = Outbox(Shape(5, 5 * 4096), b"a token, 16 long", slots=3, slot_bytes=4096)
own = outbox.allocate(4096)
own[:100] = np.arange(100, dtype=np.uint8)
places = [outbox.put(5, own[:100], None, 0.0), outbox.put(5, own[:100] + 1, None, 0.0)]
print(outbox.fd, *(one.encode().hex() for one in places), flush=True)
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
    fd, *told = writer.stdout.readline().split()
    inbox = Inbox(writer.pid, int(fd), SHAPE, TOKEN)
    own, copied = (Place.decode(bytes.fromhex(one)) for one in told)
    staying = inbox.take(own, stay=True)
    writer.send_signal(signal.SIGKILL)
    writer.wait(10)
    writer.communicate()
    assert inbox.take(copied).tolist() == list(range(1, 101))
    assert staying.tolist() == list(range(100))
    with pytest.raises(NotHere):
        Inbox(writer.pid, int(fd), SHAPE, TOKEN)
    assert before >= (set(os.listdir("/dev/shm")) if Path("/dev/shm").exists() else set())


def test_an_offer_names_no_more_than_there_can_be() -> None:
    def offer(entries: int, nbytes: int = 4096) -> Share:
        return Share(0, 1, "here", 1, 1, entries, nbytes, TOKEN)

    assert decode_data(encode_data(offer(ENTRIES_MAX)), None) == offer(65_536)
    for beyond in (offer(ENTRIES_MAX + 1), offer(0), offer(1, 4095), offer(1, 2**40 + 1)):
        with pytest.raises(ProtocolError):
            decode_data(encode_data(beyond), None)
