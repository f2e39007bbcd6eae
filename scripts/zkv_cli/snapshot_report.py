"""What `zkv snapshot list` and `zkv snapshot show` say: read from manifests alone, unless asked to
look at each byte."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any

from zkv import snapshot as sn
from zkv.dtypes import DTYPES
from zkv.errors import BadSnapshot
from zkv.layout import size_of
from zkv.optimizer_spec import OptimizerSpec
from zkv.wire import MODEL
from zkv_cli.report import bytes_text
from zkv_cli.tables import table
from zkv_net import snapshot_folder as sf
from zkv_net.storage import folder

KEYS_SHOWN = 20


def listed(url: str, *, as_json: bool, check: bool) -> str:
    """Return the snapshots of a folder, the newest first; `check`: and whether each is whole.

    Raises:
        BadSnapshot, OSError: there are none, or the folder cannot be read.
    """
    found = sf.found(url)
    if not found:
        sf.chosen(url)
    rows = [_row(url, one, check) for one in found]
    if as_json:
        return json.dumps(rows, ensure_ascii=False, indent=2)
    cells = [
        (one["name"], str(one["version"]), one["at"], bytes_text(one["bytes"]), one["state"])
        for one in rows
    ]
    return "\n".join(table(("snapshot", "version", "taken at", "size", "state"), cells))


def _row(url: str, one: sf.Found, check: bool) -> dict[str, Any]:
    manifest, state = one.manifest, "broken: " + one.why
    if manifest is None:
        return {"name": one.name, "version": -1, "at": "-", "bytes": 0, "state": state}
    return {
        "name": one.name,
        "version": manifest.version,
        "at": _time(manifest),
        "bytes": manifest.nbytes,
        "state": _state(url, manifest, check),
    }


def _time(manifest: sn.Manifest) -> str:
    return datetime.fromtimestamp(manifest.at).isoformat(" ", "seconds")


def _state(url: str, manifest: sn.Manifest, check: bool) -> str:
    try:
        sf.check(folder(url), url, manifest, whole=check)
    except BadSnapshot as error:
        return f"broken: {error}"
    return "whole" if check else "sizes are right"


def shown(url: str, *, as_json: bool, check: bool) -> str:
    """Return what is in one snapshot.

    Raises:
        BadSnapshot, OSError: there is none, or it is not whole.
    """
    where, manifest = sf.chosen(url)
    if check:
        sf.check(folder(where), where, manifest)
    plain = plain_of(manifest) | {"folder": where, "checked": check}
    if as_json:
        return json.dumps(plain, ensure_ascii=False, indent=2)
    return "\n".join(_lines(plain))


def plain_of(manifest: sn.Manifest) -> dict[str, Any]:
    """Return what a manifest says, as plain data for people and programs."""
    settings = manifest.settings
    groups = {kid: group for group in manifest.groups for kid in group.kids}
    return {
        "name": manifest.name,
        "version": manifest.version,
        "at": _time(manifest),
        "zkv": manifest.zkv,
        "bytes": manifest.nbytes,
        "policy": settings.policy,
        "optimizer": str(OptimizerSpec.from_plain(settings.optimizer)),
        "staleness": settings.staleness,
        "codec": settings.codec,
        "codec_down": settings.codec_down,
        "topology": settings.topology,
        "files": [{"file": one.file, "bytes": one.nbytes} for one in manifest.parts],
        "keys": [
            {
                "key": entry.spec.key,
                "dtype": entry.spec.dtype,
                "shape": list(entry.spec.shape),
                "bytes": size_of(entry.spec) * DTYPES[entry.spec.dtype].itemsize,
                "plain": groups[entry.kid].group != MODEL if entry.kid in groups else False,
            }
            for init in manifest.inits
            for entry in init.keys
        ],
        "tables": [entry.spec.key for init in manifest.inits for entry in init.tables],
        "workers": [
            {"number": one.number, "name": one.name, "clock": one.clock, "state": _own(one)}
            for one in manifest.workers
        ],
        "pass": None if manifest.pool is None else manifest.pool.pass_number,
    }


def _own(worker: sn.WorkerState) -> str:
    return worker.part.file if worker.part is not None else f"lost: {worker.lost}"


def _lines(plain: dict[str, Any]) -> list[str]:
    keys, files = plain["keys"], plain["files"]
    lines = [
        f"snapshot   {plain['name']} in {plain['folder']}",
        f"taken at   {plain['at']}, by zkv {plain['zkv']}",
        f"version    {plain['version']}, {len(keys)} keys",
        f"policy     {plain['policy']}",
        f"optimizer  {plain['optimizer']}",
        f"codecs     {plain['codec']} up, {plain['codec_down']} down",
        f"files      {len(files)}, {bytes_text(plain['bytes'])}: "
        + ("every byte is as it was written" if plain["checked"] else "their sizes are right"),
    ]
    if plain["tables"]:
        lines.append("tables     " + ", ".join(map(repr, plain["tables"])))
    if plain["pass"] is not None:
        lines.append(f"samples    in pass {plain['pass']}")
    rows = [
        (
            repr(one["key"]),
            one["dtype"],
            str(tuple(one["shape"])),
            bytes_text(one["bytes"]),
            "plain" if one["plain"] else "",
        )
        for one in keys[:KEYS_SHOWN]
    ]
    lines += ["", *table(("key", "dtype", "shape", "size", ""), rows)]
    more = len(keys) - KEYS_SHOWN
    lines += [f"and {more} more: --json"] if more > 0 else []
    workers = [
        (str(one["number"]), repr(one["name"]), str(one["clock"]), one["state"])
        for one in plain["workers"]
    ]
    if workers:
        lines += ["", *table(("worker", "name", "clock", "its own state"), workers)]
    return lines
