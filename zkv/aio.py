"""`zkv.aio`: the asyncio face. A thin re-export, so that users need no other import."""

from __future__ import annotations

from zkv_workers.aio import AsyncBatch as AsyncBatch
from zkv_workers.aio import AsyncWorker as AsyncWorker
from zkv_workers.aio import connect as connect

__all__ = ["AsyncBatch", "AsyncWorker", "connect"]
