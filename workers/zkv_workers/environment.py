"""Numbers that a program may leave to its environment: an argument first, then variables."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from zkv.errors import ConfigError


def number(given: float | None, variables: Sequence[str], default: float) -> Any:
    """Return `given`, else the first variable that is set, else `default`.

    Variables that end with `_S` are seconds and may be fractions; others are whole numbers.

    Raises:
        ConfigError: a variable is no such number; its name and text are in the message.
    """
    if given is not None:
        return given
    for variable in variables:
        text = os.environ.get(variable)
        if text:
            try:
                return float(text) if variable.endswith("_S") else int(text)
            except ValueError as error:
                raise ConfigError(
                    f"environment variable {variable}={text!r} is not a number"
                ) from error
    return default


def prefetch(given: int | None) -> int:
    """Return how many batches ahead values are taken, 0 or 1.

    Raises:
        ConfigError: another number.
    """
    found: int = number(given, ("ZKV_PREFETCH",), 0)
    if found not in (0, 1):
        raise ConfigError(f"prefetch={found!r} (an argument, or ZKV_PREFETCH) is neither 0 nor 1")
    return found
