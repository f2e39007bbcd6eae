"""Hypothesis strategies for kernels: flat arrays with all that is known for trouble."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from zkv.dtypes import Array

SPECIAL = (0.0, -0.0, 1e-45, -1e-40, 1.4e-36, 1.6e-36, 0.5, 1.0, -63.5, 127.0, -3e37, 3e37)
"""Zeros, subnormals, both sides of the smallest block that is sent, ties, and numbers so large that
three of them are still finite."""

orders = st.integers(0, 2**64 - 1)
"""Which of a kernel's threads come first."""


@st.composite
def float_arrays(draw: st.DrawFn, count: int, size_max: int = 1500) -> tuple[Array, ...]:
    """Draw float32 arrays of one size, read-only: normal values of some magnitude, and special
    ones among them, alone, or none."""
    size = draw(st.integers(0, size_max))
    chance = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    arrays = []
    for _ in range(count):
        values = chance.normal(size=size) * 10.0 ** draw(st.integers(-42, 30))
        share = draw(st.sampled_from([0.0, 0.02, 0.5, 1.0]))
        special = chance.choice(SPECIAL, size=size)
        array = np.where(chance.random(size) < share, special, values).astype(np.float32)
        array.setflags(write=False)
        arrays.append(array)
    return tuple(arrays)
