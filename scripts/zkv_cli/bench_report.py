"""What `zkv bench` tells: rows, a table, and what to set, in words. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from zkv.sizes import exact
from zkv_cli.bench_choice import PASSES_LEAST, Choice, Figures, Variant, default_blocks
from zkv_cli.tables import table

COLUMNS = (
    *("payloads", "blocks", "I/O threads", "socket buffers"),
    *("round, ms", "passes", "CPU s/GB", "to default", "passes", ""),
)
THROUGH = {"memory": "memory", "tcp": "sockets"}
VERDICTS = {-1: "quicker", 0: "", 1: "slower"}


def rows(found: Iterable[Figures], part: int, total_bytes: int) -> list[dict[str, Any]]:
    """Return a row of plain data for each variant; sizes in bytes, and `block_bytes` those that
    were used."""
    return [
        {
            "part": part,
            "transport": one.variant.transport,
            "block_bytes": one.variant.block_bytes or default_blocks(total_bytes),
            "io_threads": one.variant.io_threads,
            "socket_bytes": one.variant.socket_bytes,
            "default": not one.variant.set_,
            "passes": one.passes,
            "median_ms": round(one.median_ms, 3),
            "min_ms": round(one.low_ms, 3),
            "max_ms": round(one.high_ms, 3),
            "cpu_s_per_gb": None if one.cpu_s_per_gb is None else round(one.cpu_s_per_gb, 3),
            "to_default": round(one.ratio, 4),
            "to_default_min": round(one.ratio_low, 4),
            "to_default_max": round(one.ratio_high, 4),
            "verdict": "default" if not one.variant.set_ else VERDICTS[one.differs] or "same",
        }
        for one in found
    ]


def as_table(plain: Sequence[dict[str, Any]]) -> list[str]:
    """Return the lines of a table of such rows."""
    return table(
        COLUMNS,
        [
            (
                THROUGH[one["transport"]],
                exact(one["block_bytes"]),
                str(one["io_threads"]),
                exact(one["socket_bytes"]) if one["socket_bytes"] else "the system's",
                f"{one['median_ms']:.1f}",
                f"{one['min_ms']:.1f} to {one['max_ms']:.1f}",
                "-" if one["cpu_s_per_gb"] is None else f"{one['cpu_s_per_gb']:.2f}",
                f"{one['to_default']:.2f}",
                f"{one['to_default_min']:.2f} to {one['to_default_max']:.2f}",
                "" if one["verdict"] == "same" else one["verdict"],
            )
            for one in plain
        ],
    )


def words(variant: Variant) -> str:
    """Return what a variant sets, such as "blocks of 1MiB, 2 I/O threads"."""
    parts = {
        "block_bytes": f"blocks of {exact(variant.block_bytes)}",
        "io_threads": f"{variant.io_threads} I/O threads",
        "socket_bytes": f"socket buffers of {exact(variant.socket_bytes)}",
    }
    return ", ".join(parts[name] for name in variant.set_)


def commands(variant: Variant) -> list[str]:
    """Return how to set it: of whom, with what."""
    changed = variant.set_
    everywhere = [
        *([f"--io-threads {changed['io_threads']}"] if "io_threads" in changed else []),
        *(
            [f"--socket-buffer {exact(changed['socket_bytes'])}"]
            if "socket_bytes" in changed
            else []
        ),
    ]
    blocks = [f"--block-bytes {exact(changed['block_bytes'])}"] if "block_bytes" in changed else []
    lines = [" ".join(["zkv broker", *blocks, *everywhere])] if changed else []
    if everywhere:
        lines.append(" ".join(["zkv server", *everywhere]))
        options = [f"{name}={changed[name]}" for name in changed if name != "block_bytes"]
        lines.append(f"zkv.connect({', '.join(options)})")
    return lines


def advice(choice: Choice) -> list[str]:
    """Return what to set for one transport, and how sure that is, as lines."""
    one = choice.figures
    way = f"Payloads through {THROUGH[one.variant.transport]}: "
    if choice.differs:
        return [
            f"{way}{words(one.variant)}. That took {_ratio(one)} of the default's time, which is "
            "more than the spread. To set it (zkv up and zkv run take all of it as well):",
            *(f"    {line}" for line in commands(one.variant)),
        ]
    keep = f"{way}leave the defaults. "
    if choice.nearest is None:
        return [keep + "Nothing else was measured."]
    if one.passes < PASSES_LEAST:
        return [
            f"{keep}Of fewer than {PASSES_LEAST} passes the spread is not known: --passes and "
            "--seconds give more."
        ]
    near = choice.nearest
    if near.ratio >= 1:
        return [keep + f"Nothing was quicker; next came {words(near.variant)}: {_ratio(near)}."]
    return [
        keep + "Nothing was quicker by more than the spread; the quickest was "
        f"{words(near.variant)}, with {_ratio(near)} of their time."
    ]


def _ratio(one: Figures) -> str:
    return f"{one.ratio:.2f} ({one.ratio_low:.2f} to {one.ratio_high:.2f} in {one.passes} passes)"


def plain_choice(choice: Choice, total_bytes: int) -> dict[str, Any]:
    """Return a choice as plain data."""
    one = choice.figures
    return {
        "transport": one.variant.transport,
        "block_bytes": one.variant.block_bytes or default_blocks(total_bytes),
        "io_threads": one.variant.io_threads,
        "socket_bytes": one.variant.socket_bytes,
        "differs": choice.differs,
        "to_default": round(one.ratio, 4),
        "to_default_min": round(one.ratio_low, 4),
        "to_default_max": round(one.ratio_high, 4),
        "commands": commands(one.variant),
        "words": " ".join(line.strip() for line in advice(choice)),
    }
