"""How many file descriptors a process needs, and when it says that they run out."""

from __future__ import annotations

import errno

import pytest

from zkv.descriptors import AGAIN_S, Alarm, fit, need, too_few
from zkv_net import descriptors


def test_each_member_needs_two_and_a_process_has_its_own():
    assert need(0) == 64
    assert need(100) == 264


def test_as_many_fit_as_have_what_they_need():
    assert [fit(need(100) + more) for more in (-1, 0, 1, 2)] == [99, 100, 100, 101]
    assert fit(10) == 0


def test_one_below_the_need_is_too_few_and_says_both_figures():
    assert too_few(264, 100) == ""
    text = too_few(263, 100)
    assert "at most 263" in text
    assert "100 members need 264" in text
    assert "ulimit -Hn 264" in text


def test_the_alarm_begins_at_four_fifths():
    assert Alarm().look(79, 100, 0.0) == ""
    assert "80 of at most 100" in Alarm().look(80, 100, 0.0)


def test_the_alarm_repeats_itself_once_a_minute():
    alarm = Alarm()
    assert alarm.look(90, 100, 5.0)
    assert alarm.look(91, 100, 5.0 + AGAIN_S / 2) == ""
    assert "92 of" in alarm.look(92, 100, 5.0 + AGAIN_S)


def test_an_alarm_that_was_over_begins_again_at_once():
    alarm = Alarm()
    assert alarm.look(90, 100, 0.0)
    assert alarm.look(10, 100, 1.0) == ""
    assert alarm.look(90, 100, 2.0)


def test_where_none_is_left_to_look_with_all_are_open(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(folder: str) -> list[str]:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(descriptors, "limits", lambda: (256, 256))
    monkeypatch.setattr(descriptors.os, "listdir", none_left)
    assert descriptors.opened() == 256
