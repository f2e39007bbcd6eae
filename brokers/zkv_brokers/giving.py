"""How a grant is given: samples with it, room kept for what it will bring, and who is told."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zkv import control as c
from zkv.marks import Marks
from zkv.wire import MODEL
from zkv_brokers.decisions import Decisions

if TYPE_CHECKING:
    from zkv_brokers.group import Group


def give(
    group: Group, number: int, grant: int, version: int, out: Decisions, *, ahead: bool = False
) -> None:
    """Let a member compute on a version, and have the servers send it, where that is needed.

    `ahead`: the log has not reached that version. A member that finds no samples is given nothing.
    """
    incarnation = group.incarnations[number]
    samples = group.draws.take(number, grant, incarnation)
    if samples is None and group.draws.pool is not None:
        group.over.setdefault(incarnation, Marks()).settle(grant)
        return
    if not ahead:
        group.current[number] = grant
    group.reserved.add((number, grant))
    group.bases[number, grant] = version
    # Delay compensation needs the servers to keep what every grant was computed on.
    held = group.holdings.version(incarnation)
    known = held == version and not group.rules.staleness.compensation and not group.rules.tables
    follow = group.group == MODEL and not known
    on_demand = group.holdings.is_on_demand(incarnation)
    if follow:
        group.holdings.granted(incarnation, grant, version)
        out.log(c.Grant(incarnation, group.group, grant, version, [], held, on_demand))
    clocks = dict(group.sync.clocks)
    if ahead:
        # As they will be: whoever computes now will have finished.
        for worker in group.sync.computing():
            clocks[worker] += 1
    message = c.Granted(
        group=group.group,
        grant=grant,
        version=version,
        bytes_follow=follow,
        clock=clocks[number],
        slowest=min(clocks.values()),
        fastest=max(clocks.values()),
        index=out.index,
        kids=[],
        token=0,
        samples=samples,
        ahead=ahead,
        on_demand=on_demand,
        joint=group.together.waits(number, grant, group),
        **group.rules.coding.for_grants(),
    )
    out.tell(incarnation, message)
