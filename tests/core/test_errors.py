"""Errors: one tree, drawn as it is; a refusal arrives as the class that was meant."""

from __future__ import annotations

import re

import pytest

from zkv import errors


def tree() -> set[type[errors.ZkvError]]:
    found: set[type[errors.ZkvError]] = set()
    todo: list[type[errors.ZkvError]] = [errors.ZkvError]
    while todo:
        one = todo.pop()
        found.add(one)
        todo += one.__subclasses__()
    return {one for one in found if one.__module__ == "zkv.errors"}


NAMES = sorted(one.__name__ for one in tree())
TRAVELLING = sorted(errors._BY_CODE)


def test_the_module_draws_the_tree_that_it_defines() -> None:
    drawn = set(
        re.findall(r"[A-Z]\w+", (errors.__doc__ or "").split("::")[1].split("`ValueError`")[0])
    )
    assert set(NAMES) <= drawn


@pytest.mark.parametrize("name", TRAVELLING)
def test_an_error_survives_its_code(name: str) -> None:
    error = errors.from_code(name, "what happened")
    assert type(error).__name__ == name
    assert str(error) == "what happened"
    assert errors.code_of(error) == name


@pytest.mark.parametrize(
    "error", [ValueError("x"), KeyError("x"), errors.Withdrawn("x"), OSError("x")], ids=repr
)
def test_what_has_no_code_travels_as_refused(error: Exception) -> None:
    assert errors.code_of(error) == "Refused"


@pytest.mark.parametrize("code", ["", "Exception", "SystemExit", "no such", "refused", "__class__"])
def test_an_unknown_code_is_a_refusal_and_never_another_class(code: str) -> None:
    error = errors.from_code(code, "text")
    assert type(error) is errors.Refused


@pytest.mark.parametrize(
    ("kind", "builtin"),
    [
        (errors.UnknownKey, KeyError),
        (errors.KeyMismatch, ValueError),
        (errors.PushRefused, ValueError),
        (errors.WaitTimeout, TimeoutError),
        (errors.ClusterNotReady, TimeoutError),
        (errors.ConfigError, ValueError),
    ],
)
def test_who_knows_only_pythons_own_classes_catches_ours(
    kind: type[Exception], builtin: type[Exception]
) -> None:
    with pytest.raises(builtin):
        raise kind("text")


def test_an_unknown_key_shows_its_text_without_quotes() -> None:
    assert str(errors.UnknownKey("unknown key 'x'")) == "unknown key 'x'"
    assert str(errors.UnknownKey()) == ""


def test_a_version_mismatch_is_a_protocol_error() -> None:
    assert issubclass(errors.VersionMismatch, errors.ProtocolError)
    assert not issubclass(errors.ProtocolError, errors.Refused)
