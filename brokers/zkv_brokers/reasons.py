"""Why somebody waits, in words: who is missing, since when, where, and under which rule.

Pure text from the broker's state; decides nothing.
"""

from __future__ import annotations

from collections.abc import Callable

from zkv_brokers.group import Group
from zkv_brokers.members import Members, Worker

NAMES_MAX = 4


def servers_missing(members: Members, address: str) -> str:
    """Return which servers have not announced themselves, and how to start one."""
    missing = [index for index in range(members.servers_wanted) if index not in members.servers]
    if not missing:
        return ""
    which = ", ".join(str(index + 1) for index in missing)
    plural = "servers" if len(missing) > 1 else "server"
    return (
        f"waiting for {plural} {which} of {members.servers_wanted}: nothing has announced "
        f"itself at {address}; "
        f"start one with: zkv server --broker {address}"
    )


def workers_missing(members: Members) -> str:
    """Return how many workers the start line still waits for; "" if none."""
    here = members.training()
    if len(here) >= members.expected:
        return ""
    names = _named(here)
    count = f"{members.expected - len(here)} of {members.expected}"
    return f"waiting for {count} workers to join; here are {names}"


def _named(workers: list[Worker]) -> str:
    names = [f"{w.number} ({w.hello.name!r} on {w.hello.host})" for w in workers[:NAMES_MAX]]
    more = f" and {len(workers) - NAMES_MAX} more" if len(workers) > NAMES_MAX else ""
    return ", ".join(names) + more if names else "none"


def blocked(
    group: Group, worker: Worker, members: Members, silent_s: Callable[[Worker], float], what: str
) -> str:
    """Return why this member of a group has no grant; "" if it has one."""
    if group.incarnations.get(worker.number) != worker.incarnation:
        return ""
    waiting = group.sync.waiting(worker.number)
    if waiting is None:
        return group.held_because() if group.is_held(worker.number) else ""
    missing = workers_missing(members)
    if missing:
        return missing
    clocks = group.sync.clocks
    guilty = []
    for number in waiting.on[:NAMES_MAX]:
        other = members.numbered(number)
        if other is None:
            continue
        guilty.append(
            f"worker {number} ({other.hello.name!r} on {other.hello.host}, clock "
            f"{clocks.get(number, 0)}, "
            f"last heard {silent_s(other):.1f} s ago)"
        )
    more = f" and {len(waiting.on) - NAMES_MAX} more" if len(waiting.on) > NAMES_MAX else ""
    absent = [w for w in members.training() if group.incarnations.get(w.number) != w.incarnation]
    if not guilty and absent:
        guilty = [f"workers that have not asked for a batch yet: {_named(absent)}"]
    whom = (
        ", ".join(guilty) + more
        if guilty
        else "contributions that are still on their way to the servers"
    )
    return f"{what} waits for {whom}: {waiting.rule}; it has {waiting.have} of {waiting.need}"
