"""How a command ends: exit codes, and errors as one line for a person instead of a traceback."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from zkv.errors import ConfigError, ZkvError

FAILED = 1
MISUSED = 2
INTERRUPTED = 130
SIGNAL_BASE = 128
EPILOG = (
    "Settings: flags win over ZKV_SECTION__KEY variables (such as ZKV_BROKER__POLICY=ssp:2), "
    "these over the TOML file (--config FILE, else ./zkv.toml if there is one; tables [broker], "
    "[server], [join], [run], [log]), and that over the defaults. ZKV_BROKER is the address of "
    "the broker to join. Exit codes: 0 success; 1 failed while running; 2 wrong use or "
    "configuration (a port in use included); 129, 130 and 143 ended by SIGHUP, Ctrl-C and "
    "SIGTERM; `zkv run` gives the exit code of the worker that failed first."
)


class CommandFailed(ZkvError):
    """A command ends with a message and an exit code of its own."""

    def __init__(self, text: str, code: int = FAILED) -> None:
        super().__init__(text)
        self.code = code


@contextmanager
def reporting(command: str) -> Iterator[None]:
    """Turn expected errors into a line on standard error and an exit code."""
    try:
        yield
    except CommandFailed as error:
        code, text = error.code, str(error)
    except ConfigError as error:
        code, text = MISUSED, str(error)
    except (ZkvError, OSError) as error:
        code, text = FAILED, str(error)
    except KeyboardInterrupt:
        code, text = INTERRUPTED, ""
    else:
        return
    if text:
        print(f"zkv {command}: error: {text}", file=sys.stderr, flush=True)
    raise SystemExit(code)


def say(text: str, *, error: bool = False) -> None:
    """Print a line at once; nobody reading any more is no reason to stop."""
    stream = sys.stderr if error else sys.stdout
    try:
        print(text, file=stream, flush=True)
    except BrokenPipeError:
        # The interpreter would complain once more when it flushes at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
