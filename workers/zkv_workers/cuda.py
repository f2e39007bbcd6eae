"""CuPy, imported when the first array on a GPU is seen."""

from __future__ import annotations

import importlib
from typing import Any


def cupy(array: Any = None) -> Any:
    """Return CuPy; `array` is what it is needed for.

    Raises:
        ImportError: it is not installed; the extras that bring it are named.
    """
    try:
        return importlib.import_module("cupy")
    except ImportError as error:
        what = "" if array is None else f" ({type(array).__module__}.{type(array).__name__})"
        raise ImportError(
            f"an array on a GPU{what} is read with CuPy: pip install 'zkv[cuda12]' or "
            "'zkv[cuda13]', or give its copy in the host's memory"
        ) from error
