"""Positions."""

from typing import Any

best: Any = None
encode: Any = None
decode: Any = None
