"""What it costs in steps that a codec keeps something back: it comes, but late.

Error feedback leaves the sum of all gradients as it was. Under SGD that is nearly all that counts,
as updates are sums of gradients (with momentum too, while the rate is far from too high). Adam
divides by the root of a running mean of squares of what arrives, and that is not what was given: of
an element whose gradients are small it is mostly the codec's noise. With a residual of ρ gradients
an update is up to √(1 + ρ²) times shorter there, and as long as it was where gradients are large.
(1 + ρ²)^¼, the geometric middle, is about what was measured on a text; to a loss that hardly falls
any more, with the last layer in the codec too, it was up to the square of that, and less with that
layer dense (`scripts/bench_adaptive --what late`; docs/codecs.md). That error feedback and Adam do
not go together is the observation of 1-bit Adam (Tang et al., ICML 2021, arXiv:2102.02888).
"""

from __future__ import annotations

import math

LATE = 0.5
ROOT_MEAN_SQUARE = ("adam", "adamw", "adagrad")
"""The rules of `zkv.optim` that divide by a root mean square (or sum of squares)."""


def late_under(rule: str) -> float:
    """Return the weight of what comes late where the servers apply a rule of this name."""
    return LATE if rule in ROOT_MEAN_SQUARE else 0.0


def steps_for_one(error: float, late: float) -> float:
    """Return how many steps are worth one of dense gradients: (1 + error²)^(late/2), at least 1.

    `error` is the norm of what is kept back, in gradients.
    """
    worth: float = math.hypot(1.0, error) ** late
    return worth


def most_steps_for_one(error: float, late: float) -> float:
    """Return the most that it may be: by how much the shortest updates are shorter, which is the
    square of the geometric middle."""
    return steps_for_one(error, 2 * late)
