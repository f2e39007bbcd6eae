"""A worker's pushes: what waits for the pace of a link, and what for no link."""

from __future__ import annotations

import numpy as np
import pytest
from strategies import placed

from zkv.pace import FIRST_BYTES
from zkv.wire import MODEL, ContributionId, KeySpec
from zkv_workers.config import SessionConfig
from zkv_workers.encoding import Sealed
from zkv_workers.transfers import Uploads

BLOCK_BYTES = 2**20


@pytest.mark.parametrize("near", [False, True])
def test_on_one_machine_only_the_window_bounds_what_is_on_its_way(near: bool) -> None:
    blocks = 2 * FIRST_BYTES // BLOCK_BYTES
    spec = KeySpec("w", "float32", (blocks * BLOCK_BYTES // 4,))
    layout = placed([spec], 1, block_bytes=BLOCK_BYTES).layout
    uploads = Uploads(layout, SessionConfig("w", "tcp://127.0.0.1:1", near=near))
    values = np.zeros(BLOCK_BYTES // 4, np.float32)
    for bid in range(blocks):
        uploads.push(ContributionId(1, MODEL, 1), 1, bid, Sealed(values), 0)
    assert len(uploads.ready(0.0)) == (blocks if near else FIRST_BYTES // BLOCK_BYTES)
