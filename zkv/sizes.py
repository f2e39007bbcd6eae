"""Sizes in bytes as settings write them: "2GiB", "500 MB", "1048576". Pure."""

from __future__ import annotations

import re

UNITS = {"": 1, "B": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
UNITS |= {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


def size(text: object) -> int:
    """Return a size in bytes: a whole number, or text such as "2GiB" or "500 MB".

    Raises:
        ValueError: not of that form, or negative.
    """
    match = re.fullmatch(r"(\d{1,15}(?:\.\d{1,6})?)\s*([A-Za-z]{0,3})", str(text).strip(), re.ASCII)
    factor = UNITS.get(match[2].upper()) if match else None
    if match is None or factor is None:
        raise ValueError(f"size {text!r} is none of 1048576, 512MiB, 2GiB, 1.5GB")
    return int(float(match[1]) * factor) if "." in match[1] else int(match[1]) * factor


def exact(nbytes: int) -> str:
    """Return the shortest text that `size` reads as just so many bytes, such as "1GiB"."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        count, rest = divmod(nbytes, UNITS[unit.upper()])
        if count and not rest:
            return f"{count}{unit}"
    return str(nbytes)
