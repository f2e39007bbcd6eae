"""The codecs that tests go through: one place to name a new one."""

from __future__ import annotations

PLAIN = ("none", "int8", "int8:1024", "powersgd:2", "zstd", "lz4", "int8+zstd")
"""Codecs without a memory."""

REMEMBERING = ("int8+ef", "powersgd:1+ef", "int8+zstd+ef", "powersgd:2+int8+ef")
"""Codecs with one."""

DOWN = tuple(text for text in PLAIN if "powersgd" not in text)
"""Codecs for parameters: their bits are the same on every machine."""
