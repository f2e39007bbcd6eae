"""What a worker does for its batches while it is not known from when on a setting of its own holds.

Servers must hear of the setting before they hear of what was pushed after it, and that needs the
place in the log that the answer names. Who waits for the answer never notices.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from zkv_workers import signals as s

WAITING = s.SendBlock | s.Finish | s.Withdraw | s.Begin | s.Barrier | s.Leave
"""What is sent of a batch, and what must not overtake its end."""


@dataclass(slots=True)
class Behind:
    """Inputs that wait for the answers to changes of settings, in order."""

    changes: set[int] = field(default_factory=set)
    """The calls whose answers are awaited."""
    waiting: list[s.Input] = field(default_factory=list)

    def takes(self, event: s.Input) -> bool:
        """Keep an input of the user's back, if it has to wait; return whether it has."""
        if isinstance(event, s.GiveUp):
            self.waiting = [one for one in self.waiting if _token(one) != event.token]
        if not self.changes or not isinstance(event, WAITING):
            return False
        self.waiting.append(event)
        return True

    def answered(self, token: int) -> list[s.Input]:
        """A call is answered: return the inputs that waited for it, and for no other."""
        self.changes.discard(token)
        if self.changes:
            return []
        waiting, self.waiting = self.waiting, []
        return waiting

    def clear(self) -> list[int]:
        """Nothing will be answered any more; return the calls among what has waited."""
        tokens = [token for one in self.waiting if (token := _token(one))]
        self.changes.clear()
        self.waiting.clear()
        return tokens


def _token(event: s.Input) -> int:
    token: int = getattr(event, "token", 0)
    return token
