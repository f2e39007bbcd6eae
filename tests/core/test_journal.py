"""The journal: what was being written when all ended is cut off, other damage is told; and files
that are for one broker alone."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zkv.errors import JournalError
from zkv_brokers.journal import HEAD_BYTES, MAGIC, contents, written
from zkv_brokers.journal_file import JournalFile

RECORDS = [b"first", b"", b"third" * 100, b"\x00" * 40, b"last"]


def whole(records: list[bytes] = RECORDS) -> bytes:
    return MAGIC + b"".join(written(at, one) for at, one in enumerate(records))


@given(st.lists(st.binary(max_size=50), max_size=6))
def test_records_come_back_as_they_were(records: list[bytes]) -> None:
    found = contents(whole(records))
    assert (found.records, found.torn) == (records, 0)


def test_whatever_the_last_record_lacks_it_is_cut_off_and_no_other() -> None:
    file = whole()
    start = len(file) - HEAD_BYTES - len(RECORDS[-1])
    for end in range(start, len(file)):
        found = contents(file[:end])
        assert found.records == RECORDS[:-1]
        assert (found.whole_bytes, found.torn) == (start, end - start)
        # A disk may have grown the file before the bytes were there.
        assert contents(file[:end] + bytes(len(file) - end)).records == RECORDS[:-1]


def test_a_file_that_was_just_begun_is_empty_and_any_other_is_no_journal() -> None:
    for end in range(len(MAGIC)):
        assert contents(MAGIC[:end]).records == []
    with pytest.raises(JournalError, match="does not begin as a journal"):
        contents(b"zkv recording 1")


def test_every_flipped_bit_before_the_last_record_is_told_with_its_record_and_byte() -> None:
    file = whole()
    starts = [len(MAGIC)]
    for one in RECORDS:
        starts.append(starts[-1] + HEAD_BYTES + len(one))
    for at in range(len(MAGIC), starts[-2]):
        broken = bytearray(file)
        broken[at] ^= 1 << at % 8
        number = sum(start <= at for start in starts) - 1
        with pytest.raises(JournalError) as told:
            contents(bytes(broken), "/var/zkv/journal")
        text = str(told.value)
        assert f"/var/zkv/journal is damaged at byte {starts[number]} (record {number})" in text
        assert "start all processes anew" in text


def test_records_that_were_left_out_or_changed_places_are_told() -> None:
    records = [written(at, one) for at, one in enumerate(RECORDS)]
    for wrong in ([0, 2, 3, 4], [1, 2, 3, 4], [0, 2, 1, 3, 4]):
        with pytest.raises(JournalError, match="damaged at byte"):
            contents(MAGIC + b"".join(records[at] for at in wrong))


@given(st.binary(max_size=200))
def test_any_bytes_are_a_journal_or_a_journal_error(rest: bytes) -> None:
    try:
        found = contents(MAGIC + rest)
    except JournalError:
        return
    assert found.whole_bytes + found.torn == len(MAGIC) + len(rest)


# --- files -----------------------------------------------------------------------------------


def opened(folder: Path, *records: bytes) -> JournalFile:
    file = JournalFile(folder)
    file.begin(records[0])
    for one in records[1:]:
        file.append(one)
    return file


def test_a_journal_is_for_its_owner_alone_and_for_one_broker_at_a_time(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    file = opened(folder, *RECORDS)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    for path in folder.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with pytest.raises(JournalError, match="another broker that is running, or was stopped"):
        JournalFile(folder)
    file.close()
    again = JournalFile(folder)
    assert again.read().records == RECORDS
    again.close()


def test_a_journal_that_is_written_anew_holds_nothing_of_the_old_one(tmp_path: Path) -> None:
    file = opened(tmp_path, *RECORDS)
    file.begin(b"state")
    file.append(b"one more")
    assert file.bytes == len(whole([b"state", b"one more"])) == file.path.stat().st_size
    file.close()
    assert JournalFile(tmp_path).read().records == [b"state", b"one more"]


def test_a_broker_that_dies_while_it_takes_a_journal_up_loses_nothing_of_it(tmp_path: Path) -> None:
    opened(tmp_path, *RECORDS).close()
    for _ in range(3):
        taking = JournalFile(tmp_path)
        assert taking.read().records == RECORDS
        taking.close()
    last = JournalFile(tmp_path)
    last.read()
    last.begin(b"state")
    last.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["journal", "lock"]


def test_a_broker_whose_journal_was_taken_says_nothing_more(tmp_path: Path) -> None:
    """Locks do not hold everywhere: here the one of the broker that was stopped did not."""
    stopped = opened(tmp_path, b"state")
    os.unlink(tmp_path / "lock")
    later = JournalFile(tmp_path)
    # What it writes before its journal is taken is read, and may be said.
    stopped.append(b"said")
    assert later.read().records == [b"state", b"said"]
    with pytest.raises(JournalError, match="another broker has taken"):
        stopped.append(b"must not be said")
    later.begin(b"anew")
    for speaks in (lambda: stopped.append(b"nor this"), lambda: stopped.begin(b"nor that")):
        with pytest.raises(JournalError, match="another broker has taken"):
            speaks()
    later.append(b"goes on")
    later.close()
    assert JournalFile(tmp_path).read().records == [b"anew", b"goes on"]


def test_files_that_are_not_the_users_alone_and_links_are_not_read(tmp_path: Path) -> None:
    opened(tmp_path, b"state").close()
    (tmp_path / "journal").chmod(0o644)
    file = JournalFile(tmp_path)
    with pytest.raises(JournalError, match="chmod 600"):
        file.read()
    (tmp_path / "journal.taken").rename(tmp_path / "elsewhere")
    (tmp_path / "journal").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(JournalError, match="cannot be read"):
        file.read()


def test_a_disk_that_is_full_or_fails_ends_it_and_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = opened(tmp_path, b"state")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fdatasync", full)
    with pytest.raises(JournalError, match="make room and start it again on the same address"):
        file.append(b"more")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(JournalError, match="could not be written"):
        file.begin(b"anew")
    monkeypatch.undo()
    file.close()
    assert JournalFile(tmp_path).read().records[0] == b"state"
