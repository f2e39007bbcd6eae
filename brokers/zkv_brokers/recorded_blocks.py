"""The model of a recorded run on its servers, and what another placement would change.

The broker lives again up to the end of its recording; then its model is placed anew, on servers
that hold nothing, by the catalog that a broker with that placement would have. Blocks are cut as
large as the largest that the run had.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from glob import escape
from pathlib import Path
from typing import Any

from zkv import control as c
from zkv.assignment import reason
from zkv.dtypes import DTYPES
from zkv.errors import ProtocolError, ZkvError
from zkv.layout import Layout, size_of
from zkv.placement import BUCKET_BYTES
from zkv.placements import ByLoad, Placement
from zkv.wire import MODEL, KeyEntry
from zkv.wishes import Wishes
from zkv_brokers.catalog import Catalog, Pending
from zkv_brokers.decisions import Decisions
from zkv_brokers.placed import Placed, key_parts
from zkv_brokers.recorded_times import of_a_broker
from zkv_brokers.recording import FORMAT, records
from zkv_brokers.replay import router_of
from zkv_brokers.router import Router


def recorded_blocks(
    path: Path, wanted: Placement | None = None, servers: int | None = None
) -> dict[str, Any]:
    """Return the figures of a broker's recording, "before", and those of its model under another
    placement, "after", with the keys that have "moved": bytes, from where to where, and why. "text"
    is that placement as a broker reads it.

    `path` is a recording, or a folder with one of a broker. `servers`: as many as the run had.
    By load without loads, those that the run has told are taken, and are in the text.

    Raises:
        ProtocolError: no recording of a broker of this version, a damaged one, or one without a
            model; the file is named.
        ConfigError: the placement cannot be met.
        ValueError: a folder without a broker's recording, or with several.
        OSError: the file cannot be read.
    """
    file = of_a_broker(path)
    router = _live_again(file)
    model = _model(router)
    if not model.blocks:
        raise ProtocolError(f"{file}: no model was initialised in it")
    books = router.coding.books(router.layout)
    count = max(router.config.servers, router.members.places)
    found: dict[str, Any] = {
        "before": _figures(router.catalog.placement, model, count, books),
        "after": None,
        "text": None,
        "moved": [],
    }
    if wanted is None and servers in (None, count):
        return found
    asked = wanted or router.catalog.placement
    count = servers or count
    names = router.members.names()
    loaded = _with_loads(asked, model, books)
    found["text"] = loaded.text
    placed = _placed(router, model, loaded, count, names)
    found["after"] = _figures(asked, placed, count, books)
    wishes = Wishes(asked, count, (entry.spec.key for entry in model.entries.values()), names)
    found["moved"] = _moved(model, placed, wishes)
    return found


def _live_again(file: Path) -> Router:
    found = [record for _, record in records(file)]
    if not found or found[0][0] != FORMAT or found[0][1] != "broker":
        raise ProtocolError(f"{file} is no recording of a broker of this version ({FORMAT!r})")
    try:
        return router_of(found[0], found[1:])[0]
    except (TypeError, ValueError, KeyError, IndexError) as error:
        raise ProtocolError(f"{file} is damaged: {error}") from error


def _model(router: Router) -> Layout:
    """Return the part of the layout that is trained in batches."""
    layout = router.layout
    kids = set(layout.kids_in(MODEL))
    model = Layout()
    model.add(
        [entry for kid, entry in sorted(layout.entries.items()) if kid in kids],
        layout.blocks_in(MODEL),
    )
    return model


def _figures(
    placement: Placement, layout: Layout, servers: int, books: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    placed = Placed(placement, layout, servers, books)
    return {**placed.plain(), "servers": [placed.of_server(index) for index in range(servers)]}


def _with_loads(
    placement: Placement, model: Layout, books: Sequence[Mapping[str, Any]]
) -> Placement:
    """Return the placement with the loads that a run has told, if it is by load and has none."""
    if not isinstance(placement.rule, ByLoad) or placement.rule.loads:
        return placement
    parts = key_parts(books)
    loads = tuple(
        (_pattern(entry.spec.key), _bytes(entry) * parts.get(entry.spec.key, 1.0))
        for entry in model.entries.values()
    )
    return replace(placement, rule=ByLoad(loads))


def _pattern(key: str | int) -> str:
    """Return a pattern that matches this key; what a placement's text cannot hold is `?`."""
    return "".join("?" if one in ";," or one.isspace() else one for one in escape(str(key)))


def _bytes(entry: KeyEntry) -> int:
    return size_of(entry.spec) * DTYPES[entry.spec.dtype].itemsize


def _placed(
    router: Router, model: Layout, placement: Placement, servers: int, names: Sequence[str]
) -> Layout:
    """Return the model placed anew."""
    largest = max(model.block_bytes(block) for block in model.blocks.values())
    block_bytes = router.config.block_bytes or max(largest, BUCKET_BYTES)
    catalog = Catalog(Layout(), router.coding, block_bytes, placement.text, lambda: names)
    keys = [entry.spec for entry in model.entries.values()]
    offer = c.Offer(0, keys, False)
    made = catalog.offer(0, offer, False, servers, router.model_spec, Decisions(0))
    if isinstance(made, ZkvError):
        raise made
    assert isinstance(made, Pending)
    layout = Layout()
    layout.add(made.entries, made.blocks)
    return layout


def _runs(layout: Layout) -> dict[str | int, list[tuple[int, int, int]]]:
    """Return (start, stop, server) of each run of each key, in order."""
    found: dict[str | int, list[tuple[int, int, int]]] = {}
    for block in layout.blocks.values():
        for one in block.segments:
            key = layout.entries[one.kid].spec.key
            found.setdefault(key, []).append((one.start, one.stop, block.server))
    return {key: sorted(runs) for key, runs in found.items()}


def _moved(before: Layout, after: Layout, wishes: Wishes) -> list[dict[str, Any]]:
    """Return which keys have how many bytes on other servers, those of most bytes first."""
    new = _runs(after)
    itemsize = {
        entry.spec.key: DTYPES[entry.spec.dtype].itemsize for entry in before.entries.values()
    }
    rows = []
    for key, runs in _runs(before).items():
        elements, gone, come = 0, set[int](), set[int]()
        for start, stop, old in runs:
            for begin, end, server in new[key]:
                common = min(stop, end) - max(start, begin)
                if server != old and common > 0:
                    elements += common
                    gone.add(old)
                    come.add(server)
        if elements:
            rows.append(
                {
                    "key": key,
                    "bytes": elements * itemsize[key],
                    "from": ", ".join(map(str, sorted(gone))),
                    "to": ", ".join(map(str, sorted(come))),
                    "why": reason(wishes, key),
                }
            )
    return sorted(rows, key=lambda row: -int(row["bytes"]))
