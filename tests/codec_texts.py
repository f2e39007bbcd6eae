"""The codecs that tests go through: one place to name a new one."""

from __future__ import annotations

PLAIN = (
    "none",
    "int8",
    "int8:1024",
    "qsgd:127",
    "qsgd:4:64",
    "natural",
    "ternary",
    "onebit",
    "twomeans",
    "majority",
    "powersgd:2",
    "zstd",
    "lz4",
    "int8+zstd",
)
"""Codecs without a memory."""

REMEMBERING = (
    "int8+ef",
    "onebit+ef",
    "twomeans+ef",
    "ternary+ef",
    "mx1bit",
    "mx2bit:0.5",
    "powersgd:1+ef",
    "int8+zstd+ef",
    "powersgd:2+int8+ef",
)
"""Codecs with one."""
