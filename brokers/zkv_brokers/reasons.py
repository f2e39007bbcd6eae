"""Why somebody waits: who is missing, where, since when silent, and under which rule.

Values (`zkv.reasons`) from the broker's state; decides nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from zkv.reasons import NAMES_MAX, ON_THEIR_WAY, Reason, Who
from zkv_brokers.draws import Draws
from zkv_brokers.group import Group
from zkv_brokers.members import Members, Server, Worker

OUT_OF_TOUCH_S = 1.5
"""After so much silence, three beats, somebody is named in answers to why others wait."""
Silence = Callable[[Worker | Server], float]
"""For how long nothing was heard of a member, in seconds."""


def servers_missing(members: Members, address: str) -> Reason | None:
    """Return which servers have not announced themselves, and how to start one."""
    missing = [index for index in range(members.servers_wanted) if index not in members.servers]
    if members.complete:
        return None
    which = ", ".join(str(index + 1) for index in missing)
    plural = "servers" if len(missing) > 1 else "server"
    return Reason(
        "every server must be here",
        need=members.servers_wanted,
        have=len(members.servers),
        words=f"waiting for {plural} {which} of {members.servers_wanted}: nothing has announced "
        f"itself at {address}; "
        f"start one with: zkv server --broker {address}",
    )


def workers_missing(members: Members) -> Reason | None:
    """Return how many workers the start line still waits for; None if it does not."""
    here = members.training()
    if len(here) >= members.expected:
        return None
    count = f"{members.expected - len(here)} of {members.expected}"
    return Reason(
        f"the first start needs {members.expected} workers",
        need=members.expected,
        have=len(here),
        words=f"waiting for {count} workers to join; here are {_named(here)}",
    )


def _named(workers: list[Worker]) -> str:
    names = [f"{w.number} ({w.hello.name!r} on {w.hello.host})" for w in workers[:NAMES_MAX]]
    more = f" and {len(workers) - NAMES_MAX} more" if len(workers) > NAMES_MAX else ""
    return ", ".join(names) + more if names else "none"


def nothing_yet(pending: bool) -> Reason:
    """Return why no first batch can begin: no values, or (`pending`) not all of them yet."""
    return Reason(
        "every server must hold the initial values",
        words="the values of the model are not at every server yet: the initialiser is still "
        "sending"
        if pending
        else "nothing is initialised yet: no worker has called init",
    )


def at_barrier(
    worker: Worker, members: Members, clock: Callable[[int], int], silent_s: Silence
) -> Reason:
    """Return whom a worker's barrier waits for."""
    missing = workers_missing(members)
    if missing is not None:
        return missing
    training = members.training()
    behind = [w for w in training if w.barrier < worker.barrier]
    whom = ", ".join(map(str, behind[:NAMES_MAX])) or "contributions on their way to the servers"
    return Reason(
        "a barrier opens when every worker is there",
        tuple(_who(w, clock(w.number), silent_s) for w in behind[:NAMES_MAX]),
        need=len(training),
        have=len(training) - len(behind),
        words=f"barrier {worker.barrier} waits for {whom}",
        more=max(0, len(behind) - NAMES_MAX),
    )


def out_of_samples(draws: Draws, members: Members, silent_s: Silence) -> Reason:
    """Return who has samples that the next batch could be of, if they come back."""
    held = sorted(draws.pool.unsettled.items()) if draws.pool is not None else []
    known = [other for number, _ in held if (other := members.numbered(number)) is not None]
    return Reason(
        "all samples are handed out; some may come back",
        tuple(_who(other, 0, silent_s) for other in known[:NAMES_MAX]),
        need=1,
        have=0,
        what="the next batch",
        whom=f"the batches of {_named(known)}" if known else ON_THEIR_WAY,
        more=max(0, len(known) - NAMES_MAX),
    )


def blocked(
    group: Group, worker: Worker, members: Members, silent_s: Silence, what: str
) -> Reason | None:
    """Return why this member of a group has no grant; None if it has one."""
    if group.incarnations.get(worker.number) != worker.incarnation:
        return None
    waiting = group.sync.waiting(worker.number)
    if waiting is None:
        held = group.held_because() if group.is_held(worker.number) else ""
        return Reason("room for one more grant", words=held) if held else None
    missing = workers_missing(members)
    if missing is not None:
        return missing
    clocks = group.sync.clocks
    known = [other for n in waiting.on[:NAMES_MAX] if (other := members.numbered(n)) is not None]
    on = tuple(_who(other, clocks.get(other.number, 0), silent_s) for other in known)
    more, whom = max(0, len(waiting.on) - NAMES_MAX), ""
    if not on:
        absent = [
            w for w in members.training() if group.incarnations.get(w.number) != w.incarnation
        ]
        chosen, more = absent[:NAMES_MAX], max(0, len(absent) - NAMES_MAX)
        on = tuple(_who(w, clocks.get(w.number, 0), silent_s) for w in chosen)
        whom = f"workers that have not asked for a batch yet: {_named(absent)}"
        if not absent:
            on, whom = _unheld(group, members, silent_s), ON_THEIR_WAY
    return Reason(waiting.rule, on, waiting.need, waiting.have, what, whom, more=more)


def _unheld(group: Group, members: Members, silent_s: Silence) -> tuple[Who, ...]:
    """Return the servers that do not hold all of what was finished."""
    late: set[int] = set()
    for arrival in group.arrivals.values():
        if arrival.finished and not arrival.arrived:
            late |= group.homes.at(arrival.placement) - arrival.held
    found: Iterable[Server] = (members.servers[i] for i in sorted(late) if i in members.servers)
    return tuple(_server(server, silent_s) for server in list(found)[:NAMES_MAX])


def _server(server: Server, silent_s: Silence) -> Who:
    hello = server.hello
    silent = silent_s(server)
    return Who(server.index, hello.name, hello.host, 0, silent, "server", hello.address)


def out_of_touch(worker: Worker, members: Members, silent_s: Silence) -> Reason | None:
    """Return of whom else nothing is heard: updates that are under way wait for them, too."""
    everybody: list[Worker | Server] = [*members.servers.values(), *members.training()]
    silent = [one for one in everybody if one is not worker and silent_s(one) >= OUT_OF_TOUCH_S]
    if not silent:
        return None
    named = ", ".join(f"{one} for {silent_s(one):.1f} s" for one in silent[:NAMES_MAX])
    more = max(0, len(silent) - NAMES_MAX)
    return Reason(
        "an update needs every server, and those who take part in it",
        tuple(_any(one, silent_s) for one in silent[:NAMES_MAX]),
        words=f"nothing is heard of {named}" + (f" and {more} more" if more else ""),
        more=more,
    )


def _any(one: Worker | Server, silent_s: Silence) -> Who:
    return _who(one, 0, silent_s) if isinstance(one, Worker) else _server(one, silent_s)


def _who(worker: Worker, clock: int, silent_s: Silence) -> Who:
    return Who(worker.number, worker.hello.name, worker.hello.host, clock, silent_s(worker))
