"""zkv: a parameter server for the machines you have.

This face is all that a user must know: `connect` (blocking) and `zkv.aio.connect` (asyncio) make a
worker, `local` starts a small cluster for tests and notebooks. Everything is imported when it is
first used (PEP 562), so that `import zkv` costs nothing and the core stays free of I/O.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from zkv.version import VERSION

if TYPE_CHECKING:
    from zkv import aio as aio
    from zkv import codecs as codecs
    from zkv import data as data
    from zkv import jax as jax
    from zkv import torch as torch
    from zkv.errors import Cancelled as Cancelled
    from zkv.errors import RolledBack as RolledBack
    from zkv.errors import ZkvError as ZkvError
    from zkv.sums import weighted_mean as weighted_mean
    from zkv.tables import Table as Table
    from zkv_cli.local import local as local
    from zkv_workers.blocking import Batch as Batch
    from zkv_workers.blocking import Worker as Worker
    from zkv_workers.blocking import connect as connect
    from zkv_workers.several import OnDevices as OnDevices

__version__ = VERSION

_WHERE = {
    "connect": ("zkv_workers.blocking", "connect"),
    "Worker": ("zkv_workers.blocking", "Worker"),
    "Batch": ("zkv_workers.blocking", "Batch"),
    "local": ("zkv_cli.local", "local"),
    "weighted_mean": ("zkv.sums", "weighted_mean"),
    "Table": ("zkv.tables", "Table"),
    "OnDevices": ("zkv_workers.several", "OnDevices"),
    "ZkvError": ("zkv.errors", "ZkvError"),
    "Cancelled": ("zkv.errors", "Cancelled"),
    "RolledBack": ("zkv.errors", "RolledBack"),
}
_MODULES = ("aio", "codecs", "data", "errors", "jax", "torch")

__all__ = [
    "Batch",
    "Cancelled",
    "OnDevices",
    "RolledBack",
    "Table",
    "Worker",
    "ZkvError",
    "aio",
    "codecs",
    "connect",
    "data",
    "errors",
    "local",
    "weighted_mean",
]


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        module, attribute = _WHERE[name]
        return getattr(importlib.import_module(module), attribute)
    if name in _MODULES:
        return importlib.import_module(f"zkv.{name}")
    raise AttributeError(f"module 'zkv' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
