"""`zkv.torch`: PyTorch's face. A thin re-export, so that users need no other import."""

from __future__ import annotations

from zkv_workers.torch import Block as Block
from zkv_workers.torch import Optimizer as Optimizer
from zkv_workers.torch import attach as attach

__all__ = ["Block", "Optimizer", "attach"]
