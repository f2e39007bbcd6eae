"""Runs of the simulated cluster whose options a seed has drawn."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from codec_texts import DOWN, REMEMBERING
from simcluster import Options

POLICIES = ("bsp", "asp", "ssp:0", "ssp:1", "k-bsp:2", "k-batch-bsp:2", "k-asp:2", "k-batch-asp:2")
TOKENS = "a=none;b=none"
"""Of these keys every bit is looked at: they are sent as they are."""
EXACT = [text for text in (*DOWN, *REMEMBERING) if "powersgd" not in text]
"""Those whose bits do not depend on the library of the matrix product, which a replay checks."""
CODECS = ("none", *(f"{text};small=0;{TOKENS}" for text in EXACT))
CODECS_DOWN = ("none", *(f"{text};small=0;{TOKENS}" for text in DOWN))


def drawn(seed: int, **fixed: Any) -> Options:
    """Draw a run's options from its seed: workers, servers, faults, sizes."""
    rng = random.Random(seed)
    options: dict[str, Any] = {
        "policy": rng.choice(POLICIES),
        "workers": rng.choice((1, 2, 3, 4)),
        "servers": rng.choice((1, 2, 3)),
        "reorder": rng.random() < 0.5,
        "loss": rng.choice((0.0, 0.0, 0.02, 0.1)),
        "duplicate": rng.choice((0.0, 0.1, 0.3)),
        "crashes": rng.choice((0, 0, 1, 2)),
        "restart": rng.random() < 0.7,
        "uneven": rng.random() < 0.5,
        "window_bytes": rng.choice((1, 1 << 16, 1 << 20)),
        "budget_bytes": rng.choice((0, 0, 1 << 20)),
        "delay_s": rng.choice((0.001, 0.01, 0.05)),
        "optimizer": rng.choice(
            ("momentum:lr=0.1,momentum=0.9", "adam:lr=0.1", "sgd:lr=0.1,clip_global_norm=1.0")
        ),
        "withdraw": rng.choice((0.0, 0.2)),
        "void": rng.choice((0.0, 0.2)),
        "pull": rng.choice((0.0, 0.3)),
        "plain": rng.choice((0, 0, 3)),
        "barrier": rng.random() < 0.3,
        "staleness": rng.choice(
            ("none", "none", "scale", "dc:0.04", "drop:1", "scale+dc:0.5+drop:2")
        ),
        "broker_restarts": rng.choice((0, 0, 1, 2)),
        "codec": rng.choice(CODECS),
        "codec_down": rng.choice(CODECS_DOWN),
        "streaming": rng.random() < 0.8,
        "layer_s": rng.choice((0.0, 0.0, 0.02)),
        "undeclared": rng.choice((0.0, 0.0, 0.2)),
        "rates": rng.choice((0.0, 0.0, 0.2)),
        "measures": rng.random() < 0.5,
    }
    # Delay compensation needs what was granted.
    made = Options(**{**options, **fixed})
    if rng.random() < 0.3 and "dc" not in made.staleness and not made.on_demand:
        made = replace(made, prefetch=1)
    return made


def assert_caught(mutant: Callable[..., object], seeds: int, run: Callable[[int], object]) -> None:
    """Check that some drawn run of a broken variant fails, by what is compared there or by what a
    machine finds impossible."""
    for seed in range(seeds):
        try:
            run(seed)
        except (AssertionError, ValueError, KeyError):
            return
    pytest.fail(f"{mutant.__name__} was not caught in {seeds} runs")
