"""Keeps processes from outliving who started them. Needs the standard library only.

A launcher holds the write end of a pipe that is its child's standard input, and writes nothing to
it. However the launcher ends, kill -9 included, the pipe closes, and the child reads the end of
the file. The broker and the servers watch that pipe themselves (`watch_lifeline`); a user's program
cannot be asked to, so it runs below this file as a program, which ends the whole process group.
Knows nothing of zkv.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

LIFELINE = "ZKV_LIFELINE"
"""The variable that tells a broker or a server that its standard input is a lifeline."""
HURRY_S = 2.5
"""How long a process that lost its launcher may take to stop in good order."""


def watch_lifeline() -> None:
    """End this process soon after its launcher, if `ZKV_LIFELINE` says that there is one."""
    if os.environ.pop(LIFELINE, None):
        threading.Thread(target=_follow, name="zkv-lifeline", daemon=True).start()


def _follow() -> None:
    _end_of_input()
    threading.Timer(HURRY_S, os._exit, [128 + signal.SIGTERM]).start()
    os.kill(os.getpid(), signal.SIGTERM)


def _end_of_input() -> None:
    try:
        while os.read(0, 4096):
            continue
    except OSError:
        return


def exit_code(returncode: int) -> int:
    """Return a process's exit code as a shell shows it: 128 + the signal that ended it."""
    return 128 - returncode if returncode < 0 else returncode


def _kill_group() -> None:
    _end_of_input()
    if hasattr(os, "killpg"):
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


def main(command: list[str]) -> int:
    """Run a command to its end and return its exit code; end it when the lifeline breaks."""
    # Signals go to the whole group: the command answers them, and this process only reports how.
    # A handler instead of SIG_IGN, since an ignored signal would stay ignored in the command.
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), lambda number, frame: None)
    try:
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    except OSError as error:
        print(f"cannot start {command[0]}: {error.strerror}", file=sys.stderr)
        return 127
    threading.Thread(target=_kill_group, daemon=True).start()
    return exit_code(child.wait())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
