"""The file of settings, and where a setting was given: a flag, a variable, a line of that file."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zkv.errors import ConfigError

PREFIX = "ZKV_"

Flags = Mapping[tuple[str, str], Any]
"""Values by (section, key); None: not given."""


def read_file(path: Path) -> dict[str, Any]:
    """Return what a file of settings says.

    Raises:
        ConfigError: it cannot be read, or is no TOML file.
    """
    try:
        text = path.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not a TOML file: {error}") from error
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"{path}: cannot be read: {why}") from error
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        # Also a number of thousands of digits, or brackets in brackets without end.
        raise ConfigError(f"{path}: not a TOML file: {error}") from None


class Places:
    """Where a setting was given: a flag, a variable, or a line of the file."""

    def __init__(self, flags: Flags, path: Path | None) -> None:
        self._flags = flags
        self._path = path
        self._lines = path.read_text("utf-8").splitlines() if path is not None else []

    def of(self, location: tuple[Any, ...]) -> str:
        """Return the place of a setting, by (section, key)."""
        section, key = [*map(str, location), "", ""][:2]
        if self._flags.get((section, key)) is not None:
            return f"--{key.removesuffix('_s').replace('_', '-')}"
        names = {name.upper(): name for name in os.environ}
        if (section, key) == ("join", "broker") and "ZKV_BROKER" in names:
            return "environment variable ZKV_BROKER"
        variable = names.get(f"{PREFIX}{section}__{key}".upper())
        if variable is not None:
            return f"environment variable {variable}"
        line = self._line(section, key)
        where = f"[{section}] {key}" if key else f"[{section}]"
        return f"{self._path}{f', line {line}' if line else ''}, {where}"

    def _line(self, section: str, key: str) -> int:
        """Return the line that sets it, from 1; 0 if the file writes it in some other way."""
        current = ""
        for number, line in enumerate(self._lines, start=1):
            header = re.match(r"\s*\[\s*\"?([\w-]+)\"?\s*\]", line)
            if header:
                current = header[1]
                if current == section and not key:
                    return number
            name = re.match(r"\s*\"?([\w.-]+)\"?\s*=", line)
            if name:
                full = f"{current}.{name[1]}" if current else name[1]
                if full == (f"{section}.{key}" if key else section):
                    return number
        return 0
