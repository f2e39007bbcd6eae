"""Where a server's values lie. What is sent to workers of the same machine may stay there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from zkv.dtypes import Array


def _never(values: Array) -> bool:
    return False


@dataclass(frozen=True, slots=True)
class Memory:
    """How arrays are made, and whether somebody outside of this process looks at one.

    `empty(size, dtype)` returns a flat array. One that is lent must not change.
    """

    empty: Callable[[int, Any], Array] = np.empty
    is_lent: Callable[[Array], bool] = _never
