"""Why somebody waits, as a value: the rule, whom it waits for, and what is still missing.

Pure: made by whoever decides, told in words or as plain data. It must not know how anything is
decided, nor links, sockets or clocks.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from typing import Any

NAMES_MAX = 4
"""How many are named; the others are counted."""
GIST_MAX = 200
ON_THEIR_WAY = "contributions that are still on their way to the servers"


def gist(text: str) -> str:
    """Return what of a reason's text stays the same from wait to wait: whom, and under which rule.

    What changes stands in brackets, and after "it has".
    """
    head = text.partition("; it has ")[0].removeprefix("the next batch waits for ")
    return re.sub(r" \([^()]*\)", "", head)[:GIST_MAX]


@dataclass(frozen=True, slots=True)
class Who:
    """One member that is waited for; `last_heard_s` is how long ago it was heard, in seconds.

    `clock` is the number of its finished batches; `address` is where a server listens, "" for a
    worker, which nobody dials.
    """

    number: int
    name: str
    host: str
    clock: int = 0
    last_heard_s: float = 0.0
    role: str = "worker"
    address: str = ""

    def text(self) -> str:
        """Return who it is, where, how far it is and when it was heard."""
        if self.role == "server":
            return (
                f"server {self.number} ({self.name!r} at {self.address}, "
                f"last heard {self.last_heard_s:.1f} s ago)"
            )
        return (
            f"worker {self.number} ({self.name!r} on {self.host}, clock {self.clock}, "
            f"last heard {self.last_heard_s:.1f} s ago)"
        )


@dataclass(frozen=True, slots=True)
class Reason:
    """Why a wait is not over: `rule` wants `need` and has `have`, because of `on`.

    At most NAMES_MAX are in `on`; `more` counts the others. `need` and `have` are in the rule's own
    unit (contributions, members, clocks), None where it counts nothing. `what` is what is waited
    for, `whom` says in words what no member stands for, and `words`, if any, tell all of it better
    than the parts put together.
    """

    rule: str
    on: tuple[Who, ...] = ()
    need: int | None = None
    have: int | None = None
    what: str = ""
    whom: str = ""
    words: str = ""
    more: int = 0

    def text(self) -> str:
        """Return the reason in plain words."""
        if self.words:
            return self.words
        named = ", ".join(who.text() for who in self.on)
        whom = self.whom or named + (f" and {self.more} more" if self.more else "")
        return f"{self.what} waits for {whom}: {self.rule}; it has {self.have} of {self.need}"

    def to_plain(self) -> dict[str, Any]:
        """Return plain data for JSON: rule, on, more, need, have and the text."""
        on = [
            {name: value for name, value in asdict(who).items() if name != "address" or value}
            | {"last_heard_s": round(who.last_heard_s, 3)}
            for who in self.on
        ]
        return {
            "rule": self.rule,
            "on": on,
            "more": self.more,
            "need": self.need,
            "have": self.have,
            "text": self.text(),
        }
