"""A worker's encoding beside its caller: jobs one after the other, on a thread of their own.

What is queued is bounded by bytes: who hands over more waits until there is room, so that encoding
that is slower than computing cannot fill the memory. The thread starts with the first job.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from zkv.errors import WaitTimeout

Job = Callable[[], None]


class Pipeline:
    """Jobs in order. Jobs must not raise: what they find they keep for whoever looks."""

    def __init__(self, *, bytes_max: int, patience_s: float) -> None:
        self._bytes_max = bytes_max
        self._patience_s = patience_s
        self._pool: ThreadPoolExecutor | None = None
        self._held = 0
        self._jobs = 0
        self._changed = threading.Condition()

    @property
    def idle(self) -> bool:
        """Whether every job is done."""
        return self._jobs == 0

    def put(self, job: Job, nbytes: int = 0) -> Future[None]:
        """Queue a job that holds so many bytes, once there is room for them.

        One job alone may hold more than all the room there is.

        Raises:
            WaitTimeout: there was no room in time.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self._admits(nbytes), self._patience_s):
                raise WaitTimeout(
                    f"the encoder has had {self._held} bytes to do for {self._patience_s:g} s, so "
                    f"there is no room for {nbytes} more; is this process starved of CPU?"
                )
            if self._pool is None:
                self._pool = ThreadPoolExecutor(1, thread_name_prefix="zkv-encoder")
            self._held += nbytes
            self._jobs += 1
            return self._pool.submit(self._run, job, nbytes)

    def _admits(self, nbytes: int) -> bool:
        return self._held == 0 or self._held + nbytes <= self._bytes_max

    def _run(self, job: Job, nbytes: int) -> None:
        try:
            job()
        finally:
            with self._changed:
                self._held -= nbytes
                self._jobs -= 1
                self._changed.notify_all()

    def wait(self) -> bool:
        """Wait until every job is done, or patience is at an end; return whether they are."""
        with self._changed:
            return self._changed.wait_for(lambda: self._jobs == 0, self._patience_s)

    def drain(self) -> None:
        """Wait until every job is done.

        Raises:
            WaitTimeout: they are not done in time.
        """
        if not self.wait():
            raise WaitTimeout(
                f"{self._jobs} blocks were not encoded within {self._patience_s:g} s; is this "
                "process starved of CPU?"
            )

    def close(self) -> None:
        """End the thread when the present job is done; the others never run."""
        with self._changed:
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(wait=True, cancel_futures=True)
            with self._changed:
                self._held = self._jobs = 0
                self._changed.notify_all()
