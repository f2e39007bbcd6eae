"""What a program prints whatever Python's hash seed is, for tests of what is alike everywhere."""

from __future__ import annotations

import os
import subprocess
import sys


def printed(program: str) -> str:
    """Return what a program prints: the same in processes with three hash seeds."""
    told = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
            text=True,
        ).stdout
        for seed in ("0", "1", "12345")
    }
    (one,) = told
    return one
