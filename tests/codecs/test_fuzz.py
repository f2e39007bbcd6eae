"""Ten thousand spoiled payloads; `scripts/fuzz` tries a million."""

from __future__ import annotations

from fuzzing import run


def test_spoiled_payloads_are_refused_or_decode_to_numbers() -> None:
    refused = run(10_000, seed=1)
    assert 2_000 < refused < 9_900
