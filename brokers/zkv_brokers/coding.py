"""The codecs in force, up and down, and the books of what they have saved and cost, by key.

Workers and servers tell their own figures since they joined; here they are put together for the
status. Pure: the time comes in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from zkv import control as c
from zkv.dtypes import DTYPES
from zkv.layout import Layout, size_of
from zkv.wire import INT_MAX, KeySpec
from zkv_brokers.widths import Widths, widths
from zkv_codecs.auto import Auto
from zkv_codecs.deltas import down_plan
from zkv_codecs.plan import NONE, Plan, plan


def _never() -> float:
    return 0.0


@dataclass(slots=True)
class Coding:
    """Plans as text come in; grants, the log and the status come out."""

    up_text: str = "none"
    down_text: str = "none"
    clock: Callable[[], float] = _never
    rule: str = ""
    """The update rule of the model, by name: `auto` weighs what comes late by it."""
    up: Plan = field(init=False)
    down: Plan = field(init=False)
    widths: Widths | None = field(init=False)
    """What chooses the width of all workers, if the plan says `bits:...`."""
    _accounts: dict[int, dict[int, c.Account]] = field(default_factory=dict)
    """By incarnation, then by key."""
    _gone: dict[int, c.Account] = field(default_factory=dict)
    """Sums of workers that have left, by key."""
    _decoding: dict[int, dict[int, float]] = field(default_factory=dict)
    """Seconds by server, then by key."""

    def __post_init__(self) -> None:
        self.use_up(self.up_text)
        self.use_down(self.down_text)

    def use_up(self, text: str) -> None:
        """Encode gradients by this plan from the next grants on; ValueError if it is none."""
        self.up = plan(text)
        self.widths = widths(self.up, self.clock, self.rule)

    def use_down(self, text: str) -> None:
        """Send parameters by this plan; ValueError if it is none."""
        self.down = down_plan(text)

    def for_grants(self) -> dict[str, str]:
        """Return what grants say of codecs."""
        granted, adaptive = self.up, self.up.adaptive
        if isinstance(adaptive, Auto):
            granted = replace(granted, adaptive=adaptive.under(self.rule))
        chosen = "" if self.widths is None else self.widths.codec
        return {"codec": granted.text, "codec_down": self.down.text, "chosen": chosen}

    def apart(self, spec: KeySpec) -> tuple[str, str]:
        """Return what sets a key apart from others whose codec is that for all, up and down.

        A bucket has one codec, so keys of which this differs share none; whatever the codec for all
        is, as that may change later. Integers have no codec.
        """
        if not DTYPES[spec.dtype].floating:
            return "", ""
        size = size_of(spec)
        return self.up.exempt(spec.key, size), self.down.exempt(spec.key, size)

    def is_dense(self, spec: KeySpec) -> bool:
        """Whether a key travels as it is, both ways."""
        size = size_of(spec)
        plans = (self.up, self.down)
        return not DTYPES[spec.dtype].floating or all(
            one.adaptive is None and one.for_key(spec.key, size) == NONE for one in plans
        )

    # --- the books ---------------------------------------------------------------------------

    def told(self, incarnation: int, accounts: Iterable[c.Account]) -> None:
        """A worker's figures."""
        mine = self._accounts.setdefault(incarnation, {})
        for one in accounts:
            if one.kid in mine or len(mine) < c.KEYS_TOLD_MAX:
                mine[one.kid] = one

    def decoding(self, server: int, seconds: Iterable[tuple[int, float]]) -> None:
        """A server's figures."""
        mine = self._decoding.setdefault(server, {})
        for kid, spent in seconds:
            if kid in mine or len(mine) < c.KEYS_TOLD_MAX:
                mine[kid] = spent

    def left(self, incarnation: int) -> None:
        """A worker is gone: its figures stay, but for what it kept back."""
        for kid, one in self._accounts.pop(incarnation, {}).items():
            before = self._gone.get(kid)
            if before is None and len(self._gone) >= c.KEYS_TOLD_MAX:
                continue
            self._gone[kid] = c.Account(
                kid,
                one.codec,
                _sum([one.before, before.before if before else 0]),
                _sum([one.after, before.after if before else 0]),
                one.encode_s + (before.encode_s if before else 0.0),
                0.0,
                one.why,
            )

    def books(self, layout: Layout) -> list[dict[str, Any]]:
        """Return one row for each key that codecs have encoded, those of most bytes first.

        Bytes and seconds are sums over workers (servers for decoding), what is kept back is the
        largest of theirs; the reason is that of the first worker with the most frequent codec.
        """
        rows = []
        for kid in sorted(self._gone.keys() | {k for one in self._accounts.values() for k in one}):
            if kid not in layout.entries:
                continue
            there = [one[kid] for _, one in sorted(self._accounts.items()) if kid in one]
            parts = [*there, *([self._gone[kid]] if kid in self._gone else [])]
            texts = [one.codec for one in there or parts]
            codec = max(texts, key=texts.count)
            rows.append(
                {
                    "key": layout.entries[kid].spec.key,
                    "codec": codec,
                    "codecs": sorted(set(texts)),
                    "bytes_before": _sum(one.before for one in parts),
                    "bytes_after": _sum(one.after for one in parts),
                    "encode_s": round(sum(one.encode_s for one in parts), 6),
                    "decode_s": round(_total(self._decoding, kid), 6),
                    "residual_norm": max(one.residual_norm for one in parts),
                    "why": next(one.why for one in there or parts if one.codec == codec),
                }
            )
        return sorted(rows, key=lambda row: -row["bytes_before"])

    def plain(self, layout: Layout) -> dict[str, Any]:
        """Return the status's part on codecs."""
        return {
            "codec": self.up.text,
            "codec_down": self.down.text,
            "codec_chosen": "" if self.widths is None else self.widths.codec,
            "codec_why": "" if self.widths is None else self.widths.why,
            "codecs": self.books(layout),
        }


def _total(by_server: Mapping[int, Mapping[int, float]], kid: int) -> float:
    return sum(one.get(kid, 0.0) for one in by_server.values())


def _sum(counts: Iterable[int]) -> int:
    """Return a sum that can still be told: what one worker says may be the largest there is."""
    return min(sum(counts), INT_MAX)
