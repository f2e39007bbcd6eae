"""Ten thousand spoiled frames at the broker's border, and at a server's; `scripts/fuzz` tries a
million."""

from __future__ import annotations

from fuzzing_frames import run


def test_spoiled_frames_change_nothing_and_end_nothing() -> None:
    refused = run(10_000, seed=1)
    assert 5_000 < refused < 19_900
