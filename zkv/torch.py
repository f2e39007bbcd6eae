"""`zkv.torch`: PyTorch's face. A thin re-export, so that users need no other import."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from zkv_workers.torch import Block as Block
from zkv_workers.torch import Optimizer as Optimizer
from zkv_workers.torch import attach as attach

if TYPE_CHECKING:
    from zkv_workers.torch_ddp import State as State
    from zkv_workers.torch_ddp import comm_hook as comm_hook

__all__ = ["Block", "Optimizer", "State", "attach", "comm_hook"]


def __getattr__(name: str) -> Any:
    # Not every build of PyTorch has torch.distributed.
    if name in ("State", "comm_hook"):
        return getattr(importlib.import_module("zkv_workers.torch_ddp"), name)
    raise AttributeError(f"module 'zkv.torch' has no attribute {name!r}")
