"""Update rules for rows: how rows of a table, their state and one gradient each become the next.

Only rows that a contribution names are updated, and each has its own count of updates. So `sgd` and
`adagrad` give what they give for a dense value whose other rows have a gradient of zero. `adam` is
the lazy one, as PyTorch's SparseAdam: mean and square of a row stand still while nobody names it,
and its bias is corrected by its own count. Rules that move what has no gradient (momentum,
nesterov, adamw, weight decay) or take the aggregate for the value (assign) are not for tables.

The order of operations is that of `zkv.update_pieces`, so that a row has the bits of a value that
is updated by itself. This module must not know tables, servers or versions.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np

from zkv.dtypes import Array
from zkv.optim import Rule
from zkv.optimizer_spec import OptimizerSpec
from zkv.tables import RULES_OF_TABLES
from zkv.update_pieces import Slots

PIECE_ELEMENTS = 32 * 1024
"""Elements worked on at a time: the pieces of all arrays of a rule stay in a core's own cache."""
POWERS_MAX = 1 << 16
"""Powers that are kept; those of rows with more updates are computed each time."""


def refusal(key: str | int, rule: Rule) -> str:
    """Return why a table cannot be updated by a rule, and what to do; "" if it can."""
    take = f"give the table a rule of its own, such as zkv.Table(…, rule='{RULES_OF_TABLES[1]}')"
    if rule.name not in RULES_OF_TABLES:
        return (
            f"table {key!r}: rule {rule.name} is not for tables, whose rows without a gradient "
            f"stay as they are ({', '.join(RULES_OF_TABLES)} are); {take}"
        )
    if dict(rule.hyper)["weight_decay"]:
        return (
            f"table {key!r}: weight decay is not for tables: it would change rows without a "
            f"gradient; {take}, or weight_decay=0 for its name"
        )
    return ""


def check_rule(key: str | int, spec: OptimizerSpec) -> None:
    """Check that an optimizer can update a table.

    Raises:
        ValueError: it cannot.
    """
    problem = refusal(key, spec.for_key(key)[0])
    if problem:
        raise ValueError(problem)


def init_rows(rule: Rule, count: int, dim: int, dtype: np.dtype[np.float64]) -> Slots:
    """Return new state for `count` rows of `dim` elements, in the order of `rule.slots`."""
    initial = dict(rule.hyper).get("initial", 0.0)
    return tuple(np.full((count, dim), initial, dtype) for _ in rule.slots)


def update_rows(
    rule: Rule, values: Array, slots: Slots, gradients: Array, *, lr: float, counts: Array
) -> None:
    """Update rows in place: `values`, each of `slots` and `gradients` are (rows, dim) of one dtype.

    `counts` is how many updates each row will have had after this one. Overflow follows IEEE 754
    without a warning.
    """
    step = max(1, PIECE_ELEMENTS // values.shape[1])
    with np.errstate(all="ignore"):
        for start in range(0, len(values), step):
            cut = slice(start, start + step)
            part = tuple(slot[cut] for slot in slots)
            _PIECES[rule.name](rule, values[cut], part, gradients[cut], lr, counts[cut])


def _sgd(rule: Rule, x: Array, slots: Slots, g: Array, lr: float, counts: Array) -> None:
    x += g * x.dtype.type(-lr)


def _adagrad(rule: Rule, x: Array, slots: Slots, g: Array, lr: float, counts: Array) -> None:
    hyper, scalar = dict(rule.hyper), x.dtype.type
    rates = (-lr / (1.0 + (counts - 1) * hyper["lr_decay"])).astype(x.dtype)[:, None]
    (total,) = slots
    total += g * g
    x += (g * rates) / (np.sqrt(total) + scalar(hyper["eps"]))


def _adam(rule: Rule, x: Array, slots: Slots, g: Array, lr: float, counts: Array) -> None:
    hyper, scalar = dict(rule.hyper), x.dtype.type
    beta1, beta2 = hyper["beta1"], hyper["beta2"]
    rates = (-lr / (1.0 - _powers(beta1, counts))).astype(x.dtype)[:, None]
    biases = np.sqrt(1.0 - _powers(beta2, counts)).astype(x.dtype)[:, None]
    mean, square = slots
    if beta1 > 0.5:
        mean += (g - mean) * scalar(1.0 - beta1)
    else:
        np.subtract(g, (g - mean) * scalar(beta1), out=mean)
    fresh = g * scalar(1.0 - beta2)
    fresh *= g
    square *= scalar(beta2)
    square += fresh
    x += (mean * rates) / (np.sqrt(square) / biases + scalar(hyper["eps"]))


_PIECES = {"sgd": _sgd, "adagrad": _adagrad, "adam": _adam}


def _powers(base: float, counts: Array) -> Array:
    """Return base ** count, as Python computes it: NumPy's power may differ in the last bit."""
    most = int(counts.max())
    if most < POWERS_MAX:
        # A power of two, so that few tables are ever made.
        found: Array = _power_table(base, 1 << most.bit_length())[counts]
        return found
    return np.asarray([math.pow(base, count) for count in counts.tolist()])


@lru_cache(maxsize=64)
def _power_table(base: float, size: int) -> Array:
    return np.asarray([math.pow(base, count) for count in range(size)])
