"""The broker's part in codecs: the width of all, and the books by key."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from single_blocks import layout, spec

from zkv import control as c
from zkv.layout import Layout
from zkv.wire import MODEL, ContributionId
from zkv_brokers.coding import Coding
from zkv_brokers.decisions import Arrival
from zkv_codecs.bits import Heuristic, Observation
from zkv_codecs.bits_learned import Learned


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def arrival(loss: float | None, weight: float = 1.0, nbytes: int = 100) -> Arrival:
    return Arrival(ContributionId(1, MODEL, 1), 0, weight=weight, loss=loss, nbytes=nbytes)


def coding(text: str) -> tuple[Coding, Clock]:
    clock = Clock()
    return Coding(text, "none", clock), clock


def test_grants_say_the_codec_of_the_step_that_a_schedule_is_at() -> None:
    made, clock = coding("bits:schedule=32@0,8@2;*.bias=none")
    assert made.widths is not None
    said = []
    for step in range(5):
        said.append(made.for_grants()["chosen"])
        clock.now = float(step)
        made.widths.updated([arrival(None)])
    # The first update has no update before it, so there are no seconds for a step.
    assert said == ["none", "none", "none", "int8+ef", "int8+ef"]
    assert made.for_grants()["codec"] == "bits:schedule=32@0,8@2;*.bias=none"


def test_grants_add_what_the_rule_makes_of_late_gradients_and_the_status_does_not() -> None:
    made = Coding("auto:owed=4.0;*.bias=none", rule="adam")
    assert made.for_grants()["codec"] == "auto:owed=4.0,late=0.5;*.bias=none"
    assert made.plain(Layout())["codec"] == "auto:owed=4.0;*.bias=none"
    assert Coding("auto", rule="sgd").for_grants()["codec"] == "auto"
    made.use_up("bits:learned")
    assert made.widths is not None
    assert made.widths.controller == Learned(late=0.5)


def test_a_fixed_codec_and_auto_have_no_width() -> None:
    for text in ("int8+ef", "auto"):
        made, _ = coding(text)
        assert made.widths is None
        assert made.for_grants() == {"codec": text, "codec_down": "none", "chosen": ""}


def test_the_controller_sees_mean_loss_all_bytes_and_seconds_between_updates() -> None:
    """(2 · 1.0 + 6 · 3.0) / 8 = 2.5."""
    made, clock = coding("bits:heuristic,every=5")
    assert made.widths is not None
    seen: list[Observation] = []

    class Spy(Heuristic):
        def observe(self, state: Any, seen_now: Observation) -> Any:
            seen.append(seen_now)
            return super().observe(state, seen_now)

    made.widths.controller = Spy(5)
    made.widths.updated([arrival(9.0)])
    clock.now = 0.5
    made.widths.updated([arrival(1.0, 2.0), arrival(3.0, 6.0), arrival(None, 5.0)])
    assert seen == [Observation(loss=2.5, nbytes=300.0, seconds=0.5)]


@pytest.mark.parametrize(
    ("losses", "mean"),
    [
        ([(math.nan, 1.0), (1.0, 1.0)], math.nan),
        ([(math.inf, 0.0), (1.0, 1.0)], 1.0),
        ([(math.inf, 1.0), (1.0, 1.0)], math.nan),
        ([(4.0, 0.0), (2.0, 0.0)], 3.0),
    ],
)
def test_losses_that_are_no_numbers_count_by_their_weight(
    losses: list[tuple[float, float]], mean: float
) -> None:
    from zkv_brokers.widths import _mean_loss

    got = _mean_loss([arrival(*one) for one in losses])
    assert got == mean or (math.isnan(got) and math.isnan(mean))


def test_without_losses_a_controller_that_needs_them_stays_where_it_starts() -> None:
    made, clock = coding("bits:heuristic,every=1")
    assert made.widths is not None
    for step in range(50):
        clock.now = float(step)
        made.widths.updated([arrival(None)])
    assert made.for_grants()["chosen"] == "none"
    assert made.widths.why == (
        "32 bits since step 0: training begins with exact gradients. No loss was told: call "
        "batch.set_loss(loss) in each batch."
    )


def test_updates_within_one_tick_of_the_clock_and_absurd_bytes_do_no_harm() -> None:
    made, _ = coding("bits:learned,seed=1,every=1")
    assert made.widths is not None
    for _ in range(20):
        made.widths.updated([arrival(1.0, nbytes=2**62)] * 9)
    assert made.for_grants()["chosen"] in ("ternary+ef", "int4+ef", "int8+ef", "fp16", "none")


# --- the books -----------------------------------------------------------------------------------


def account(kid: int, codec: str = "int8+ef", before: int = 400, **more: Any) -> c.Account:
    plain: dict[str, Any] = {"after": 104, "encode_s": 0.5, "residual_norm": 1.5, "why": "it pays"}
    return c.Account(kid, codec, before, **(plain | more))


def test_a_row_is_the_sum_over_workers_and_servers() -> None:
    made, _ = coding("auto")
    there = layout(spec("w"), spec("b"))
    made.told(7, [account(0), account(1, before=1000)])
    made.told(8, [account(0, "none", residual_norm=0.0), account(0, "int8+ef", after=96)])
    made.told(9, [account(0, "none", why="too fast")])
    made.decoding(0, [(0, 0.25), (1, 1.0)])
    made.decoding(1, [(0, 0.5)])
    rows = made.books(there)
    assert [row["key"] for row in rows] == ["w", "b"]
    assert rows[0] == {
        "key": "w",
        "codec": "int8+ef",
        "codecs": ["int8+ef", "none"],
        "bytes_before": 1200,
        "bytes_after": 304,
        "encode_s": 1.5,
        "decode_s": 0.75,
        "residual_norm": 1.5,
        "why": "it pays",
    }


def test_sums_of_what_workers_claim_can_be_told() -> None:
    """Each may say the largest number that there is; it costs the figures, and no status."""
    made, _ = coding("int8+ef")
    there = layout(spec("w"))
    for incarnation in (7, 8, 9):
        made.told(incarnation, [account(0, before=2**63 - 1, after=2**63 - 1)])
    made.left(7)
    made.left(8)
    (row,) = made.books(there)
    assert (row["bytes_before"], row["bytes_after"]) == (2**63 - 1, 2**63 - 1)


def test_what_a_worker_has_told_stays_when_it_leaves() -> None:
    made, _ = coding("int8+ef")
    there = layout(spec("w"))
    for incarnation in (7, 8):
        made.told(incarnation, [account(0)])
        made.left(incarnation)
    (row,) = made.books(there)
    assert (row["bytes_before"], row["encode_s"], row["residual_norm"]) == (800, 1.0, 0.0)
    made.left(99)


def test_books_are_bounded_and_keys_that_nobody_knows_are_left_out() -> None:
    made, _ = coding("int8+ef")
    there = layout(spec("w"))
    for incarnation in range(3):
        made.told(incarnation, [account(kid + 1000 * incarnation) for kid in range(600)])
        made.decoding(incarnation, [(kid, 0.1) for kid in range(600)])
        made.left(incarnation)
    assert [row["key"] for row in made.books(there)] == ["w"]
    assert len(made._gone) == c.KEYS_TOLD_MAX
    assert all(len(one) == c.KEYS_TOLD_MAX for one in made._decoding.values())
    assert np.isfinite(made.books(there)[0]["decode_s"])
