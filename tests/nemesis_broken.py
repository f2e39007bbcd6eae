"""zkv with one rule removed, as processes: a nemesis that does not notice is worth nothing.

python tests/nemesis_broken.py RULE broker --bind ...     as `zkv broker --bind ...`
python tests/nemesis_broken.py RULE worker '{...}'        as `nemesis_worker.py '{...}'`
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from zkv.link import Link
from zkv_brokers import group, recovery
from zkv_brokers.contributions import Contributions
from zkv_workers.batch import AnyBatch

PROGRAM = str(Path(__file__))


def counts_repeats() -> None:
    """Servers and broker forget what they have settled and heard: what comes again counts again."""

    def take(self: Any, packet: Any) -> Any:
        self._ack_due = True
        self._expected = max(self._expected, packet.number + len(packet.messages))
        return packet.messages

    Link._take = take  # type: ignore[method-assign]
    Contributions.is_settled = lambda self, contribution, grant: False  # type: ignore[method-assign]
    group.Group.is_over = lambda self, incarnation, grant: False  # type: ignore[method-assign]


def told_early() -> None:
    """A batch is said to be committed as soon as it is finished."""
    outcome = AnyBatch.outcome

    def early(self: Any) -> str:
        found: str = outcome.fget(self)  # type: ignore[attr-defined]
        return "committed" if found == "pending" else found

    AnyBatch.outcome = property(early)  # type: ignore[assignment, method-assign]
    # Of no version it is said that it must have it.
    AnyBatch.update = property(lambda self: sys.maxsize)  # type: ignore[assignment, method-assign]


def forgets_turns() -> None:
    """The journal is written some time after what it promises was said."""
    recovery.Turns.must_be_kept = staticmethod(lambda actions: False)  # type: ignore[assignment]


def word_is_enough() -> None:
    """A contribution counts at its worker's word, whatever servers hold of it."""
    check = group.Group._check

    def believes(self: Any, arrival: Any, out: Any) -> None:
        arrival.held = set(self.servers)
        check(self, arrival, out)

    group.Group._check = believes  # type: ignore[method-assign]


RULES: dict[str, Callable[[], None]] = {
    one.__name__: one for one in (counts_repeats, told_early, forgets_turns, word_is_enough)
}


def main(arguments: list[str]) -> None:
    """Remove a rule, and be what the rest says."""
    rule, role, *rest = arguments
    RULES[rule]()
    if role == "worker":
        from nemesis_worker import main as worker

        worker(json.loads(rest[0]))
        return
    from zkv_cli.main import app

    sys.argv = ["zkv", role, *rest]
    app()


if __name__ == "__main__":
    main(sys.argv[1:])
