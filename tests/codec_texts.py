"""The codecs that tests go through: one place to name a new one."""

from __future__ import annotations

PLAIN = (
    "none",
    "fp16",
    "sfp16",
    "bf16",
    "fp8_e4m3",
    "fp8_e5m2",
    "int8",
    "int4",
    "uint8:64",
    "int8:1024",
    "qsgd:127",
    "qsgd:8:64",
    "natural",
    "ternary",
    "onebit",
    "twomeans",
    "majority",
    "topk:0.25",
    "topk_sampled:0.1",
    "randomk:0.3",
    "threshold:0.01",
    "topk:0.1+int8",
    "topk:0.1+fp16",
    "randomk:0.5+int4",
    "randomk:0.5+ternary",
    "powersgd:2",
    "zstd",
    "lz4",
    "int8+zstd",
)
"""Codecs without a memory."""

REMEMBERING = (
    "int8+ef",
    "fp16+ef",
    "sfp16+ef",
    "bf16+ef",
    "fp8_e4m3+ef",
    "int4+ef",
    "uint8+ef",
    "onebit+ef",
    "twomeans+ef",
    "ternary+ef",
    "mx1bit",
    "mx2bit:0.5",
    "topk:0.01+ef",
    "topk:0.1+int8+ef",
    "topk:0.2+onebit+zstd+ef",
    "topk_sampled:0.1+ef",
    "randomk:0.1+ef",
    "randomk:0.3+int8+lz4+ef",
    "threshold:0.5+ef",
    "powersgd:1+ef",
    "int8+zstd+ef",
    "powersgd:2+int8+ef",
    "powersgd:2+int4+ef",
)
"""Codecs with one."""

MOMENTUM = ("topk:0.1+dgc:0.9", "topk:0.05+int8+dgc:0.5,warmup=4", "randomk:0.2+dgc:0")
"""Codecs that send more than they are given, by a factor of momentum."""

DOWN = tuple(text for text in PLAIN if "powersgd" not in text and text != "majority")
"""Codecs for parameters: their bits are the same on every machine."""
