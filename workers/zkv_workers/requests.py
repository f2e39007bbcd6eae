"""The calls that a session has not answered yet: how long they wait, for what, and when that is
told.

Every wait is bounded, and says for whom. Pure: time comes in as `now`.
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from dataclasses import dataclass

from zkv import control as c
from zkv.errors import BrokerLost, ClusterNotReady, WaitTimeout, doctor_hint
from zkv_workers.config import SessionConfig
from zkv_workers.signals import Fail, Narrate, Output

OUT_OF_TOUCH_S = 1.5
"""After so much silence, three beats, the broker is named as who is waited for."""


@dataclass(slots=True)
class _Request:
    what: str
    since: float
    deadline: float | None
    narrate_at: float | None


class Requests:
    """Open calls by token. `reason` is the broker's last word on why this worker waits.

    `owing` names the servers that something is awaited of, in words; "": none.
    """

    def __init__(self, config: SessionConfig) -> None:
        self.reason = ""
        self.last_reason = ""
        """Why the wait before the newest grant was one; "" if it was not explained."""
        self.owing = ""
        self.trouble = ""
        """Why the broker cannot be reached, as far as the driver knows."""
        self.leaving = 0
        self.initialised = False
        """Whether any key exists, as far as this worker knows."""
        self._untouched = ""
        self._config = config
        self._open: dict[int, _Request] = {}

    def open(self, token: int, what: str, now: float, timeout_s: float | None = -1.0) -> None:
        """Note a call. `timeout_s` None: it is not a wait (nobody blocks); -1: the usual
        patience."""
        waits = timeout_s is not None
        patience = self._config.wait_timeout_s if timeout_s == -1.0 else timeout_s
        self._open[token] = _Request(
            what,
            now,
            None if patience is None else now + patience,
            now + self._config.narrate_after_s if waits else None,
        )

    def close(self, token: int) -> bool:
        """Forget a call; return whether it was open."""
        return self._open.pop(token, None) is not None

    def is_open(self, token: int) -> bool:
        """Return whether a call still waits for its answer."""
        return token in self._open

    def named(self, what: str) -> list[int]:
        """Return the open calls whose description begins so."""
        return [token for token, request in self._open.items() if request.what.startswith(what)]

    def all(self) -> list[int]:
        """Return all open calls, and forget them."""
        tokens = list(self._open)
        self._open.clear()
        return tokens

    def broker_lost(self, silent_s: float) -> BrokerLost:
        """Return the error of a broker that was not heard for so long."""
        broker = self._config.broker
        text = f"nothing was heard of the broker at {broker} for {silent_s:.1f} s"
        text += f": {self.trouble}" if self.trouble else ""
        return BrokerLost(f"{text}; {doctor_hint(broker)}")

    def owes(self, late: Set[int], servers: Iterable[c.ServerAt]) -> None:
        """Note of which servers something is awaited: a wrong address shows nowhere else."""
        self.owing = ", ".join(
            f"server {at.index} ({at.name!r} at {at.address})" for at in servers if at.index in late
        )

    def tick(self, now: float, *, joined: bool, heard: float | None) -> list[Output]:
        """Return what to say and which calls to end, because of the time."""
        out: list[Output] = []
        self._untouched = self._out_of_touch(0.0 if heard is None else now - heard)
        why = self._why(joined, heard is not None)
        for token, request in list(self._open.items()):
            if request.deadline is not None and now >= request.deadline:
                del self._open[token]
                # The limit, not how long it took until a busy thread looked.
                limit = f"{request.deadline - request.since:.1f} s"
                text = f"{request.what} did not come within {limit}: {why}"
                kind = WaitTimeout if joined else ClusterNotReady
                out.append(Fail(token, kind(text)))
            elif request.narrate_at is not None and now >= request.narrate_at:
                request.narrate_at = now + self._config.narrate_every_s
                waited = now - request.since
                out.append(
                    Narrate(
                        "warning",
                        f"waiting for {request.what} for {waited:.0f} s: {why}",
                    )
                )
        return out

    @property
    def whom(self) -> str:
        """Whom this worker waits for where it has asked nobody: for the fate of a batch, say. "":
        nobody has said, and everybody answers."""
        return self._untouched or self.reason or self._owed()

    def _out_of_touch(self, silent_s: float) -> str:
        """Return what is wrong with the way to the broker; "": nothing."""
        if self.trouble:
            return f"waiting for broker: {self.trouble}"
        if silent_s >= OUT_OF_TOUCH_S:
            broker = f"the broker at {self._config.broker}"
            return f"waiting for broker: nothing is heard of {broker} for {silent_s:.1f} s"
        return ""

    def _owed(self) -> str:
        if not self.owing:
            return ""
        return (
            f"{self.owing} owes an answer; can it be reached from here? "
            f"(a server's --advertise says where it is; {doctor_hint(self._config.broker)})"
        )

    def _why(self, joined: bool, heard: bool) -> str:
        if self._untouched:
            return self._untouched
        if not heard:
            return (
                f"waiting for broker: nothing has answered at {self._config.broker}; "
                "is it running, and is this the broker's address? "
                f"{doctor_hint(self._config.broker)}"
            )
        if self.reason:
            return self.reason
        if not self.initialised and joined:
            return "nothing is initialised yet: no worker has called init"
        if self.owing:
            return self._owed()
        return "it is on its way" if joined else "the broker has not let this worker in yet"
