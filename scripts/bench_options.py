"""Kinds of command-line arguments that benchmarks share."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from peers.task import sizes


def some(of: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    """Return what reads a list with commas, each of whose parts `of` reads."""

    def taken(text: str) -> list[Any]:
        return list(dict.fromkeys(of(one) for one in text.split(",")))

    return taken


def positive(text: str) -> int:
    """Read a whole number above 0."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is no whole number above 0")
    return int(text)


def above_zero(text: str) -> float:
    """Read a number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is no number above 0")
    return value


def set_name(text: str) -> str:
    """Read a set's name (`peers.task.sizes`)."""
    try:
        sizes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return text
