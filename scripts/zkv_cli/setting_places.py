"""Where a setting was given, for messages about mistakes: a flag, a variable, a line of a file."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

PREFIX = "ZKV_"

Flags = Mapping[tuple[str, str], Any]
"""Values by (section, key); None: not given."""


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
