"""The status's part on placement: what servers hold and carry, and how many are asked. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import Any

from zkv.dtypes import DTYPES
from zkv.fitting import empty
from zkv.layout import Layout, size_of
from zkv.placement import imbalance, segments_load
from zkv.placements import Placement
from zkv.wire import MODEL, BlockSpec

PART_MAX = 64.0
"""No codec makes that much more of a gradient; a worker may say anything."""


def key_parts(books: Sequence[Mapping[str, Any]]) -> dict[str | int, float]:
    """Return which part of their bytes has travelled of the keys that codecs have encoded."""
    parts = {one["key"]: one["bytes_after"] / (one["bytes_before"] or 1) for one in books}
    return {key: min(part, PART_MAX) for key, part in parts.items()}


class Placed:
    """All blocks of a layout on `servers` servers, without those of the numbers `closed`. `books`
    are the codecs' (`Coding.books`).

    The load of a key is what one contribution to it brings: its bytes, and of a key that codecs
    have encoded the part of them that has travelled. How often a key is pushed is not counted.
    """

    def __init__(
        self,
        placement: Placement,
        layout: Layout,
        servers: int,
        books: Sequence[Mapping[str, Any]],
        closed: Set[int] = frozenset(),
    ) -> None:
        self._placement, self._layout = placement, layout
        self._here = [server for server in range(servers) if server not in closed]
        self._blocks = list(layout.blocks.values())
        self._specs = {kid: entry.spec for kid, entry in layout.entries.items()}
        self._sizes = {kid: size_of(spec) for kid, spec in self._specs.items()}
        parts = key_parts(books)
        self._loads = {
            kid: self._sizes[kid] * DTYPES[spec.dtype].itemsize * parts.get(spec.key, 1.0)
            for kid, spec in self._specs.items()
        }
        self._shares = empty(servers)
        for block in self._blocks:
            share = self._shares[block.server]
            share.blocks += 1
            share.nbytes += layout.block_bytes(block)
            share.load += self._load(block)

    def _load(self, block: BlockSpec) -> float:
        return segments_load(block.segments, self._loads, self._sizes)

    def of_server(self, index: int) -> dict[str, Any]:
        """Return what one server holds: bytes, blocks, and its load in bytes."""
        share = self._shares[index]
        return {
            "value_bytes": share.nbytes,
            "blocks": share.blocks,
            "load": round(share.load),
        }

    def plain(self) -> dict[str, Any]:
        """Return the placement in force, and figures of all servers.

        `fan_out` counts servers: those that a batch of the model needs, those that one key lies on
        (the mean and the most), and those of each group of keys that are to stay together.
        """
        layout = self._layout
        counts = [len(self._servers_of(kid)) for kid in layout.blocks_of_key]
        return {
            "placement": self._placement.text,
            "imbalance": self._imbalance([one.nbytes for one in self._shares]),
            "load_imbalance": self._imbalance([one.load for one in self._shares]),
            "fan_out": {
                "batch": len({block.server for block in layout.blocks_in(MODEL)}),
                "key_mean": round(sum(counts) / len(counts), 4) if counts else 0.0,
                "key_max": max(counts, default=0),
                "together": self._groups(),
            },
        }

    def _imbalance(self, held: Sequence[float]) -> float:
        held = [held[server] for server in self._here]
        blocks = [BlockSpec(at, at, []) for at in range(len(held))]
        return round(imbalance(blocks, len(held), lambda block: held[block.server]), 4)

    def _servers_of(self, kid: int) -> set[int]:
        return {self._layout.blocks[bid].server for bid in self._layout.blocks_of_key[kid]}

    def _groups(self) -> dict[str, int]:
        """Return on how many servers the keys of each group lie, by the group's text."""
        found: dict[str, set[int]] = {"|".join(one): set() for one in self._placement.together}
        if found:
            for kid, spec in self._specs.items():
                for at in self._placement.groups_of(spec.key):
                    found["|".join(self._placement.together[at])] |= self._servers_of(kid)
        return {name: len(servers) for name, servers in found.items()}
