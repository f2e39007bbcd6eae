"""Where each worker's time went, as `zkv run` and `zkv status` tell it: from figures to plain data.

Each life of a worker has left its own; here they become one split for each worker, and what
`zkv plan advise` reads beside it. Pure: files and processes are elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from zkv import time_split

NAMES = ("time", "time_by_batch", "sent", "memory")
"""What a worker's figures have of its time; those of an earlier version have nothing."""


def of_life(plain: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return what one life's figures say of its time; None if they say nothing.

    Raises:
        TypeError, ValueError, KeyError: they are not what `worker.stats()` gives.
    """
    if any(name not in plain for name in NAMES):
        return None
    found: dict[str, Any] = {name: plain[name] for name in NAMES}
    time_split.shares(found["time"])
    return found


def of_worker(lives: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Return one split for all lives of a worker, and its latest batches; None if nothing is
    known."""
    if not lives:
        return None
    sent: dict[str, dict[str, float]] = {}
    for life in lives:
        for server, flight in life["sent"].items():
            mine = sent.setdefault(server, {"bytes": 0, "busy_s": 0.0})
            for name in mine:
                mine[name] += flight[name]
    return {
        "time": time_split.added([life["time"] for life in lives]),
        "time_by_batch": lives[-1]["time_by_batch"],
        "sent": sent,
        "memory": lives[-1]["memory"],
    }


def of_servers(
    after: Mapping[str, Any] | None, before: Mapping[str, Any] | None
) -> list[dict[str, Any]]:
    """Return what each server holds, and how long how many updates took it during a run."""
    old = {one["index"]: one for one in (before or {}).get("servers", ())}
    return [
        {
            "index": one["index"],
            "value_bytes": one["value_bytes"],
            "updates": one["updates"] - old.get(one["index"], one | {"updates": 0})["updates"],
            "update_s": one["update_s"] - old.get(one["index"], one | {"update_s": 0})["update_s"],
        }
        for one in (after or {}).get("servers", ())
    ]


def plain_of(
    workers: Sequence[Mapping[str, Any] | None],
    after: Mapping[str, Any] | None,
    before: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """Return what a run's JSON has of its time: lists by worker, null where nothing is known."""
    status = after or {}
    return {
        **{name: [one and one[name] for one in workers] for name in NAMES},
        "codec": status.get("codec"),
        "codec_down": status.get("codec_down"),
        "codecs": status.get("codecs", []),
        "servers": of_servers(after, before),
    }


def lines(splits: Iterable[tuple[str, Mapping[str, Any] | None]]) -> list[str]:
    """Return a heading and a line for each worker whose time is known; nothing if none is."""
    known = [(name, split) for name, split in splits if split is not None and split["batches"]]
    if not known:
        return []
    width = max(len(name) for name, _ in known)
    rows = [f"{name.ljust(width)}  {time_split.line(split)}" for name, split in known]
    return ["where the time goes, by batch", *rows]
