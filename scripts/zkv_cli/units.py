"""Quantities with their units, as a person types and reads them. Pure.

Bits are "b" or "bit", bytes are "B": the one place where upper and lower case differ, since the
factor of 8 between them is the classic mistake. k, M, G and T are decimal; sizes may also be KiB
and so on. This module must not know what the quantities are for.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction
from typing import TypeVar

from zkv.errors import ConfigError

Value = TypeVar("Value")

PREFIXES = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
SIZES = PREFIXES | {"K": 10**3, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
TIMES = {"": Fraction(1), "s": Fraction(1), "ms": Fraction(1, 10**3), "us": Fraction(1, 10**6)}
TIMES |= {"ns": Fraction(1, 10**9), "min": Fraction(60)}
_NUMBER = r"(-?\d{1,18}(?:_\d{1,3}){0,6}(?:\.\d{1,18})?(?:[eE][+-]?\d{1,2})?)"


def _parts(text: str, unit: str, forms: str) -> tuple[Fraction, re.Match[str]]:
    match = re.fullmatch(rf"{_NUMBER}\s*{unit}", text.strip(), re.ASCII)
    if match is None:
        raise ValueError(f"{text!r} is none of {forms}")
    return Fraction(match[1].replace("_", "")), match


def count(text: str) -> int:
    """Return a whole number, such as "100M", "1.5G" or "8"."""
    forms = "8, 1_000_000, 100M, 1.5G"
    number, match = _parts(text, "([kMGT]?)", forms)
    value = number * PREFIXES[match[2]]
    if value.denominator != 1:
        raise ValueError(f"{text!r} is no whole number, as {forms} are")
    return int(value)


def number(text: str) -> float:
    """Return a number, such as "0.01" or "40"; a share may be given as "1%"."""
    value, match = _parts(text, "(%?)", "0.01, 1%, 40")
    return float(value / 100 if match[2] else value)


def size_bytes(text: str) -> int:
    """Return bytes, rounded, from "400MB", "1.5 GiB" or "4096"; bits are refused."""
    value, match = _parts(text, "(?:(Ki|Mi|Gi|Ti|[kKMGT]?)B)?", "4096, 400MB, 2GiB")
    return round(value * SIZES[match[2] or ""])


def bits_per_s(text: str) -> float:
    """Return bits per second from "10Gb/s", "10 Gbit/s", "10Gbps" (bits) or "16GB/s" (bytes)."""
    unit = "([kMGT]?)(bit/s|b/s|bps|B/s)"
    value, match = _parts(text, unit, "10Gb/s, 100Mbit/s, 10Gbps (bits), 16GB/s (bytes)")
    return float(value * PREFIXES[match[2]] * (8 if match[3] == "B/s" else 1))


def seconds(text: str) -> float:
    """Return seconds from "60ms", "150us", "1.5 s" or "2"; a bare number is seconds."""
    value, match = _parts(text, "(ms|us|ns|min|s|)", "60ms, 150us, 1.5s, 2")
    return float(value * TIMES[match[2]])


def each(read: Callable[[str], Value], text: str) -> list[Value]:
    """Return a comma-separated list, each element read by `read`."""
    return [read(part) for part in text.split(",")]


def option(name: str, read: Callable[[str], Value], text: str) -> Value:
    """Return `read(text)`; a ValueError becomes a ConfigError with the option's name."""
    try:
        return read(text)
    except ValueError as error:
        raise ConfigError(f"{name}: {error}") from error


def plain(value: float) -> str:
    """Return a number with at most six significant digits; whole ones in full up to 10**15."""
    if value == round(value) and abs(value) < 10**15:
        return f"{round(value):,}"
    return f"{value:.6g}"


def _scaled(value: float, unit: str) -> str:
    for prefix, factor in reversed(PREFIXES.items()):
        if value >= factor:
            return f"{plain(value / factor)} {prefix}{unit}"
    return f"{plain(value)} {unit}"


def size_text(value: float) -> str:
    """Return bytes in decimal units, such as "12.5 MB"."""
    return _scaled(value, "B")


def bits_text(value: float) -> str:
    """Return a link's speed in bits, such as "10 Gb/s"."""
    return _scaled(value, "b/s")


def time_text(value: float) -> str:
    """Return a time in the largest of s, ms, us and ns that leaves at least 1, such as "320 ms"."""
    for unit in ("s", "ms", "us"):
        factor = float(1 / TIMES[unit])
        if value >= 1 / factor or value == 0:
            return f"{plain(value * factor)} {unit}"
    return f"{plain(value * 1e9)} ns"
