"""`zkv.jax`: JAX's face. A thin re-export, so that users need no other import."""

from __future__ import annotations

from zkv_workers.jax import Block as Block
from zkv_workers.jax import Optimizer as Optimizer
from zkv_workers.jax import SyncState as SyncState
from zkv_workers.jax import attach as attach

__all__ = ["Block", "Optimizer", "SyncState", "attach"]
