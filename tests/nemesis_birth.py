"""Processes that begin within milliseconds: forks of one that has imported what all need.

A run starts dozens, and half a second of imports for each would leave no time to break anything.
They are processes like any other: memory, descriptors, signals and death are their own.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import random
import runpy
import sys
import threading
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from nemesis_relay import enter

PRELOAD = (
    *("numpy", "zkv", "zkv_workers.blocking", "zkv_brokers.broker", "zkv_brokers.server"),
    *(
        "__main__",
        "zkv_cli.main",
        "zkv_cli.roles",
        "nemesis_relay",
        "nemesis_birth",
        "runpy",
        "json",
    ),
)
ONE_THREAD = dict.fromkeys(
    ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS"), "1"
)
"""A process with threads must not be forked; numpy's libraries would make some."""


_one_at_a_time = threading.Lock()


def deliver(*what: Any) -> Any:
    """Start a process that is `born` with these arguments, and return it; the first call starts
    what all are forked from."""
    # Standard input is a lifeline: they end with who has started them, even if that is killed.
    os.environ.update(ONE_THREAD, ZKV_LIFELINE="stdin")
    os.environ["PYTHONPATH"] = os.pathsep.join(one for one in sys.path if one)
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOAD))
    process = context.Process(target=born, args=what)
    main = vars(sys.modules["__main__"])
    with _one_at_a_time:
        # Else each would run this process's program again, to have what it defines.
        kept = {name: main.get(name) for name in ("__file__", "__spec__")}
        main.update(dict.fromkeys(kept))
        try:
            process.start()
        finally:
            main.update(kept)
    return process


def born(place: int, streams: Sequence[Connection], errors: Path, words: Sequence[str]) -> None:
    """In the new process: go to a place (the process that holds it), and be `python WORDS`.

    `streams` are its standard input and output. Of Python's own options only -m is understood.
    """
    enter(place)
    os.setsid()
    log = os.open(errors, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    for number, descriptor in ((0, streams[0].fileno()), (1, streams[1].fileno()), (2, log)):
        os.dup2(descriptor, number)
    os.close(log)
    for stream in streams:
        stream.close()
    # Forks would all draw the same.
    random.seed()
    sys.stdin = os.fdopen(0, closefd=False)
    sys.stdout, sys.stderr = (os.fdopen(at, "w", 1, closefd=False) for at in (1, 2))
    if words[0] == "-m":
        sys.argv = list(words[1:])
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = list(words)
        runpy.run_path(words[0], run_name="__main__")
