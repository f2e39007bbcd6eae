"""The C library's heap, told to keep what is freed: for processes that are the project's own."""

from __future__ import annotations

import ctypes
import platform

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3
"""Numbers of glibc's `mallopt`."""
_MMAP_MAX_BYTES = 32 * 1024 * 1024
"""The largest that it takes."""
_STEP_BYTES = 64 * 1024 * 1024
_NEVER = 2**31 - 1


def keep() -> bool:
    """Let freed memory stay with the process; return whether the C library can do that.

    A server makes and frees arrays of a block each, as many as the model has, at every update. By
    default they go back to the system, and each page of the next ones is a fault.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    settings = (
        (_MMAP_THRESHOLD, _MMAP_MAX_BYTES),
        (_TRIM_THRESHOLD, _NEVER),
        (_TOP_PAD, _STEP_BYTES),
    )
    return all(mallopt(*setting) for setting in settings)
