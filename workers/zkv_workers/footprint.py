"""How much memory a worker's process has taken at most, and what of it is zkv's own."""

from __future__ import annotations

import contextlib
import importlib
import sys
from pathlib import Path
from typing import Any

from zkv.dtypes import Array
from zkv_workers.encoding import Encoder
from zkv_workers.session import Session

MIB = 2**20

_resource: Any = None
with contextlib.suppress(ImportError):  # There is none on Windows.
    _resource = importlib.import_module("resource")


def peak_mib() -> float:
    """Return the most memory that this process has had in RAM at once, in MiB; 0: not known.

    On Linux it is VmHWM of proc(5): getrusage's figure is also that of the process that has
    started this one.
    """
    try:
        for line in Path("/proc/self/status").read_bytes().splitlines():
            if line.startswith(b"VmHWM:"):
                return int(line.split()[1]) / 1024
    except (OSError, ValueError, IndexError):
        pass
    if _resource is None:
        return 0.0
    told = float(_resource.getrusage(_resource.RUSAGE_SELF).ru_maxrss)
    return told / MIB if sys.platform == "darwin" else told / 1024


def footprint(session: Session, encoder: Encoder) -> dict[str, Any]:
    """Return plain data: the peak in MiB, and in bytes what is zkv's own at present.

    `values_bytes`: the model as it was received, for the newest grant and, with `codec_down`, for
    the one that deltas are added to. The arrays of `batch.params` are copies of them, and the
    program's. `frames_bytes`: what servers have not acknowledged yet. `residual_bytes`: what codecs
    remember between batches.
    """
    arrays: dict[int, Array] = {}
    for blocks in (session.made.cycle.blocks, session.downloads.held_blocks):
        arrays |= {id(one): one for one in list(blocks.values())}
    return {
        "peak_mib": round(peak_mib(), 3),
        "values_bytes": sum(one.nbytes for one in arrays.values()),
        "frames_bytes": sum(session.uploads.unacknowledged().values()),
        "residual_bytes": encoder.memories.nbytes(),
    }
