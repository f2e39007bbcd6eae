"""Answers of the router that need only a look at its state: welcomes, pulls, checks, reasons."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

from zkv import control as c
from zkv.errors import ProtocolError, Refused, UnknownKey
from zkv.policy import SyncPolicy, policy
from zkv.reasons import Reason
from zkv.staleness import staleness
from zkv.wire import MODEL, NO_BATCH, PULLS, ContributionId
from zkv_brokers import reasons
from zkv_brokers.decisions import Decisions
from zkv_brokers.group import Group
from zkv_brokers.members import Server, Worker
from zkv_brokers.rules import Rules
from zkv_brokers.taking_over import cohort_reason

if TYPE_CHECKING:
    from zkv_brokers.router import Router


def welcome(router: Router, worker: Worker) -> c.Welcome:
    """Return what a new member needs to know."""
    members = router.members
    return c.Welcome(
        number=worker.number,
        incarnation=worker.incarnation,
        rank=worker.number,
        world=members.world,
        term=members.term,
        servers=[
            c.ServerAt(s.index, s.hello.name, s.hello.address) for s in members.servers.values()
        ],
        data_address=router.config.data_address,
        policy=str(router.policy),
        topology=str(router.topology),
        saves=bool(router.config.snapshot_dir),
        state=router.restoring.state_of(worker),
        beat_s=router.config.beat_s,
    )


def rules(router: Router) -> Rules:
    """Return what the model's group has to know of the settings in force."""
    norms, trains = router.gatekeeper.norms, bool(router.layout.kids_in(MODEL))
    return Rules(
        capacity=capacity(router),
        clips=router.model_spec.clip_global_norm is not None,
        staleness=router.staleness,
        coding=router.coding,
        # Of rows nothing is sent ahead; a model of tables alone would be granted for nothing.
        # The norm of a contribution is known when all of it is there.
        streaming=router.config.streaming and trains and not norms.limit,
        norms=norms,
        tables=bool(router.layout.tables),
    )


def check_owner(name: ContributionId, worker: Worker) -> None:
    """Check that a contribution is of the worker that speaks of it."""
    if name.incarnation != worker.incarnation:
        raise ProtocolError(f"{worker} spoke of a contribution of incarnation {name.incarnation}")


def check_finish(group: Group, said: c.Finish, worker: Worker, floor: int) -> None:
    """Check that a worker finishes a batch of its own, once, under a grant that is open for it, and
    in no placement that it has said it is through with (`floor`)."""
    name, grant = said.contribution, said.grant
    check_owner(name, worker)
    if group.is_over(name.incarnation, grant):
        return
    if said.placement < floor:
        raise Refused(
            f"{worker} finished batch {name.batch} in placement {said.placement}, though it had "
            f"nothing open before placement {floor}"
        )
    done = {(a.number, a.grant) for a in group.arrivals.values() if a.finished}
    known = group.arrivals.get(name)
    again = (worker.number, grant) in done or (known is not None and known.finished)
    if again or not group.is_open(worker.number, grant):
        raise Refused(
            f"{worker} finished batch {name.batch} under grant {grant}, which is not open for it"
        )


def pull(router: Router, worker: Worker, message: c.Pull, out: Decisions) -> None:
    """Grant a read of some keys (none named: the whole model) at one point of the log (rule 4)."""
    layout = router.layout
    kids = sorted({layout.kid(key) for key in message.keys})
    if not message.keys and not message.rows:
        kids = layout.kids_in(MODEL)
    if not kids and not (message.rows and layout.has_model):
        raise UnknownKey(
            "there is no model yet: nothing was initialised, or all keys are plain, or tables, "
            "whose rows are read by worker.rows"
        )
    model = router.groups.model
    if model is not None and 0 < model.ahead.version <= message.seen:
        # It computes on a version that is on its way into the log: it must not read an older one.
        model.ahead.then.append(partial(pull, router, worker, message))
        return
    if worker.incarnation not in router.members.workers:
        return
    version = router.groups.version
    rows = message.rows
    out.log(c.Grant(worker.incarnation, PULLS, message.token, version, kids, rows=rows))
    clocks = model.sync.clocks if model is not None else {}
    granted = c.Granted(
        group=PULLS,
        grant=message.token,
        version=version,
        bytes_follow=True,
        clock=clocks.get(worker.number, 0),
        slowest=min(clocks.values(), default=0),
        fastest=max(clocks.values(), default=0),
        index=out.index,
        kids=kids,
        token=message.token,
    )
    out.tell(worker.incarnation, granted)


def received(router: Router, worker: Worker, message: c.Received, out: Decisions) -> None:
    """A worker has all that it was granted: its version is no longer pinned for it."""
    if message.group == PULLS:
        # It was for rows of tables, and servers have pinned them.
        out.log(c.Discard(worker.incarnation, PULLS, message.grant, NO_BATCH))
    elif message.group in router.groups.by_number:
        router.groups[message.group].received(worker.incarnation, message.grant, out)


def configuration(router: Router) -> c.Configure:
    """Return the entry that tells servers the settings in force."""
    return c.Configure(
        {
            "model": router.model_spec.to_plain(),
            "plain": router.plain_spec.to_plain(),
            "staleness": str(router.staleness),
            "codec": router.coding.up.text,
            "codec_down": router.coding.down.text,
            "policy": str(router.policy),
        }
        | ({"norms": True} if router.gatekeeper.norms.limit else {})
    )


def log_configuration(router: Router, out: Decisions, *, late: bool = False) -> None:
    """Write the settings in force into the log; `late`: behind the next commit, if foreseen."""
    entry = configuration(router)
    if router.groups.model is not None:
        router.groups.model.configure(entry, out, late=late)
    elif not len(router.log):
        router.log.extend([entry])
    else:
        out.log(entry)


def change(router: Router, message: c.Change, number: int, out: Decisions) -> dict[str, Any]:
    """Change a live setting, as the worker with this number asks (-1: somebody else does); return
    from which model version it holds.

    Raises:
        Refused, ValueError: no such setting, or not a value for it.
    """
    group, late = router.groups.model, False
    match message.setting:
        case "lr":
            rate = positive(message.value, "lr")
            router.model_spec = router.model_spec.with_lr(rate)
            router.plain_spec = router.plain_spec.with_lr(rate)
            late = group is not None and group.ahead.defers(number, group)
            if group is not None and message.inside and not late:
                group.ahead.drop(group, out)
            log_configuration(router, out, late=late)
        case "policy":
            chosen = policy(message.value)
            check_budget(router, chosen)
            router.groups.switch(chosen, out)
            router.note_shortage()
            log_configuration(router, out)
        case "staleness":
            router.staleness = staleness(message.value)
            if group is not None:
                group.ahead.drop(group, out)
                group.rules.staleness = router.staleness
            log_configuration(router, out)
        case "codec":
            router.coding.use_up(message.value)
            log_configuration(router, out)
        case "codec_down":
            router.coding.use_down(message.value)
            if group is not None:
                group.ahead.drop(group, out)
                group.holdings.forget()
            log_configuration(router, out)
        case other:
            raise Refused(
                f"there is no live setting {other!r}; there are: codec, codec_down, lr, policy, "
                "staleness"
            )
    version = group.ahead.version if late and group is not None else router.groups.version
    router.hub.note("info", f"{message.setting} is {message.value} from version {version} on")
    return {"setting": message.setting, "value": message.value, "version": version}


def positive(text: str, setting: str) -> float:
    """Return a setting's number.

    Raises:
        Refused: it is none, or negative or not finite.
    """
    try:
        value = float(text)
    except ValueError as error:
        raise Refused(f"{setting}={text!r} is not a number") from error
    if not math.isfinite(value) or value < 0:
        raise Refused(f"{setting}={text!r} must be finite and not negative")
    return value


def contribution_bytes(router: Router) -> dict[int, int]:
    """Return the bytes of one contribution to the model at each server."""
    per_server = dict.fromkeys(router.members.servers, 0)
    mirrored = router.moves.targets()
    for block in router.layout.blocks_in(MODEL):
        for server in {block.server, *mirrored.get(block.bid, ())}:
            per_server[server] += router.layout.block_bytes(block)
    return per_server


def capacity(router: Router) -> int | None:
    """Return how many contributions fit into the servers' budgets (rule 11); None if any number."""
    rooms = [
        router.members.servers[index].hello.budget_bytes // size
        for index, size in contribution_bytes(router).items()
        if size and router.members.servers[index].hello.budget_bytes
    ]
    return min(rooms, default=None)


def check_budget(router: Router, chosen: SyncPolicy) -> None:
    """Check that the servers' budgets have room for what a policy needs.

    Raises:
        Refused: they have not, and its updates could never be made; both figures are named.
    """
    group = router.groups.model
    if (
        group is not None
        and group.rules.capacity is not None
        and group.rules.capacity < group.need(chosen)
    ):
        raise Refused(budget_text(router, group, chosen))


def budget_text(router: Router, group: Group, chosen: SyncPolicy) -> str:
    """Return which server's budget is too small for a policy, with both figures."""
    sizes, need = contribution_bytes(router), group.need(chosen)
    index = min(
        (i for i, size in sizes.items() if size),
        key=lambda i: router.members.servers[i].hello.budget_bytes // sizes[i],
    )
    server = router.members.servers[index]
    return (
        f"{server} has a budget of {server.hello.budget_bytes} bytes for contributions, but policy "
        f"{chosen} with {len(group.sync.live)} workers needs {need} x {sizes[index]} = "
        f"{need * sizes[index]} bytes there; start servers with a larger --budget, or more servers"
    )


def why_waiting(router: Router, worker: Worker) -> Reason | None:
    """Return why a worker has no grant, or why its barrier is closed, or who cannot be reached, for
    whose part in an update it may wait; None if nothing is known to be in the way."""
    group = router.groups.model
    together = router.rolling.reason or cohort_reason(router, worker)
    if together is not None:
        return together
    if worker.incarnation in router.groups.begun:
        pending = bool(router.catalog.pending)
        return router.replicas.waited_for() or reasons.nothing_yet(pending)

    def silent_s(other: Worker | Server) -> float:
        return router.hub.silent_s(other.peer)

    draws = router.groups.draws
    if draws.idle.get(worker.number) == worker.incarnation:
        return reasons.out_of_samples(draws, router.members, silent_s)
    if worker.barrier_token:
        clocks = group.sync.clocks if group is not None else {}
        return reasons.at_barrier(worker, router.members, lambda n: clocks.get(n, 0), silent_s)
    for number, one in router.groups.by_number.items():
        if number == MODEL and one is group:
            what = "the next batch"
        else:
            kids = router.layout.kids_in(number)
            what = f"key {router.layout.entries[kids[0]].spec.key!r}" if kids else f"group {number}"
        reason = reasons.blocked(one, worker, router.members, silent_s, what)
        if reason is not None:
            return reason
    return reasons.out_of_touch(worker, router.members, silent_s)


def text_of(reason: Reason | None) -> str:
    """Return a reason in words; "" for none."""
    return reason.text() if reason is not None else ""


def explain(router: Router, outside: Iterable[int], told: dict[int, str]) -> None:
    """Tell those who wait why: newcomers (peers) always, members when the reason has changed."""
    members, address = router.members, router.config.address
    missing = text_of(router.rolling.reason or reasons.servers_missing(members, address))
    for peer in outside:
        router.hub.send(peer, c.Waiting(missing))
    for worker in router.members.training():
        reason = text_of(why_waiting(router, worker))
        if reason != told.get(worker.incarnation, ""):
            told[worker.incarnation] = reason
            router.hub.send(worker.peer, c.Waiting(reason[:4000]))
