"""Rows are updated as values are that stand alone: the same bits, with each row's own count."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from zkv.optim import init_slots, rule, update
from zkv.optimizer_spec import optimizer
from zkv.row_rules import PIECE_ELEMENTS, POWERS_MAX, check_rule, init_rows, refusal, update_rows

RULES = (
    "sgd",
    "adagrad",
    "adagrad:initial=0.5,lr_decay=0.25",
    "adam",
    "adam:beta1=0.3,beta2=0.5,eps=0.001",
    "adam:beta1=0",
)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("text", RULES)
def test_each_row_has_the_bits_of_a_value_of_its_own(text: str, dtype: Any) -> None:
    """Some rows in each update, so that their counts differ; a NumPy reference for each row."""
    chosen, rng, dim = rule(text), np.random.default_rng(5), 3
    values = rng.standard_normal((12, dim)).astype(dtype)
    slots = init_rows(chosen, 12, dim, np.dtype(dtype))
    counts = np.zeros(12, np.int64)
    expected = [row.copy() for row in values]
    state = [init_slots(chosen, row) for row in expected]
    for turn in range(30):
        named = np.flatnonzero(rng.random(12) < 0.4)
        gradients = rng.standard_normal((named.size, dim)).astype(dtype)
        gradients[rng.random(gradients.shape) < 0.2] = 0
        rate = 0.1 / (turn + 1)
        counts[named] += 1
        part, own = values[named], tuple(slot[named] for slot in slots)
        update_rows(chosen, part, own, gradients, lr=rate, counts=counts[named])
        values[named] = part
        for slot, fresh in zip(slots, own, strict=True):
            slot[named] = fresh
        for one, gradient in zip(named.tolist(), gradients, strict=True):
            expected[one], state[one] = update(
                chosen, expected[one], state[one], gradient, lr=rate, count=int(counts[one])
            )
    assert len(set(counts.tolist())) > 3
    assert values.tobytes() == np.stack(expected).tobytes()
    for at, slot in enumerate(slots):
        assert slot.tobytes() == np.stack([one[at] for one in state]).tobytes()


def test_many_rows_are_updated_as_few_are() -> None:
    chosen, rng = rule("adam"), np.random.default_rng(6)
    dim, count = 7, PIECE_ELEMENTS // 3
    values = rng.standard_normal((count, dim)).astype(np.float32)
    gradients = rng.standard_normal((count, dim)).astype(np.float32)
    counts = rng.integers(1, 5, count)
    slots = init_rows(chosen, count, dim, np.dtype(np.float32))
    one_by_one = values.copy(), tuple(slot.copy() for slot in slots)
    update_rows(chosen, values, slots, gradients, lr=0.1, counts=counts)
    for at in range(0, count, 997):
        cut = slice(at, at + 1)
        part = tuple(slot[cut] for slot in one_by_one[1])
        row = one_by_one[0][cut]
        update_rows(chosen, row, part, gradients[cut], lr=0.1, counts=counts[cut])
        assert row.tobytes() == values[cut].tobytes()


def test_a_row_with_very_many_updates_is_updated_like_others() -> None:
    chosen = rule("adam")
    for count in (POWERS_MAX - 1, POWERS_MAX, 10 * POWERS_MAX):
        values, gradient = np.ones((1, 2), np.float32), np.ones((1, 2), np.float32)
        slots = init_rows(chosen, 1, 2, np.dtype(np.float32))
        alone = update(
            chosen, values[0].copy(), init_slots(chosen, values[0]), gradient[0], lr=1, count=count
        )
        update_rows(chosen, values, slots, gradient, lr=1, counts=np.asarray([count]))
        assert values[0].tobytes() == alone[0].tobytes()


def test_overflow_is_silent() -> None:
    values, huge = np.ones((1, 2), np.float32), np.full((1, 2), 3e38, np.float32)
    for text in RULES:
        slots = init_rows(rule(text), 1, 2, np.dtype(np.float32))
        update_rows(rule(text), values, slots, huge, lr=1e30, counts=np.asarray([1]))


@pytest.mark.parametrize("text", ["momentum", "nesterov", "adamw", "assign"])
def test_a_rule_that_is_not_for_tables_is_refused_with_a_way_out(text: str) -> None:
    words = refusal("emb", rule(text))
    assert f"table 'emb': rule {text} is not for tables" in words
    assert "sgd, adagrad, adam are" in words
    assert "give the table a rule of its own" in words


def test_weight_decay_is_refused_unless_the_table_is_excepted() -> None:
    with pytest.raises(ValueError, match="weight decay is not for tables"):
        check_rule("emb", optimizer("adam:weight_decay=0.1"))
    check_rule("emb", optimizer("adam:weight_decay=0.1;emb:weight_decay=0"))
