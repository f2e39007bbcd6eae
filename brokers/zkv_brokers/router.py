"""The router: all that the broker is, without its sockets.

Frames and the time come in; `handle` is the one method that changes anything; frames to send come
out. It knows the members, the catalog of keys, and one `Group` for each set of keys with a version
of its own; it writes the one ordered log. It must not know sockets, clocks, files or chance.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from zkv import control as c
from zkv.errors import ProtocolError, Refused, code_of
from zkv.heartbeat import link_resend_s
from zkv.layout import Layout
from zkv.optimizer_spec import optimizer
from zkv.policy import SyncPolicy
from zkv.staleness import staleness
from zkv.topology import topology
from zkv.wire import MODEL, SEEDS
from zkv_brokers import meeting, offers, requests, standing
from zkv_brokers.catalog import Catalog
from zkv_brokers.coding import Coding
from zkv_brokers.config import RouterConfig as RouterConfig
from zkv_brokers.decisions import Decisions, Pins
from zkv_brokers.door import Door
from zkv_brokers.fleet import Fleet
from zkv_brokers.gatekeeper import Gatekeeper
from zkv_brokers.group import Group
from zkv_brokers.groups import Groups
from zkv_brokers.hub import Hub
from zkv_brokers.hub import Note as Note
from zkv_brokers.hub import Send as Send
from zkv_brokers.loads import Loads
from zkv_brokers.log import Log
from zkv_brokers.members import Members, Server, Worker
from zkv_brokers.moves import Moves
from zkv_brokers.optimizers_in_force import MODEL_DEFAULT, PLAIN_DEFAULT
from zkv_brokers.rearranging import rearrange
from zkv_brokers.replicas import Replicas
from zkv_brokers.restoring import Restoring, as_restored
from zkv_brokers.returning import Returning
from zkv_brokers.rolling import Rolling
from zkv_brokers.signals import Action as Action
from zkv_brokers.signals import Ask, Written
from zkv_brokers.signals import Event as Event
from zkv_brokers.signals import Found as Found
from zkv_brokers.signals import Keys as Keys
from zkv_brokers.signals import Received as Received
from zkv_brokers.signals import Restarted as Restarted
from zkv_brokers.signals import ServerLink as ServerLink
from zkv_brokers.signals import ServersChanged as ServersChanged
from zkv_brokers.signals import Tick as Tick
from zkv_brokers.snapshots import Snapshots
from zkv_brokers.taking_over import handed_over


class Router:
    """The broker's state. `term` must be higher than that of any broker before."""

    def __init__(
        self, config: RouterConfig, *, term: int, instance: int, before: Router | None = None
    ) -> None:
        self.config = config = as_restored(config)
        self.members = Members(term, config.servers, config.workers, workers_min=config.min_workers)
        self.layout = Layout()
        self.model_spec = optimizer(config.optimizer or MODEL_DEFAULT)
        self.plain_spec = optimizer(config.optimizer or PLAIN_DEFAULT)
        self.staleness = staleness(config.staleness)
        resend_s, members = link_resend_s(config.beat_s), config.max_members
        self.hub = Hub(instance, resend_s=resend_s, members=members, lasts=config.lasts)
        self.line_passed = False
        if before is not None:
            self.members, self.hub, self.line_passed = handed_over(before, term)
        codecs = config.codec, config.codec_down
        self.coding = Coding(*codecs, self._clock, self.model_spec.rule.name)
        self.topology = topology(config.topology)
        places = (self.topology.placement(config.placement), self.members.names)
        self.catalog = Catalog(self.layout, self.coding, config.block_bytes, *places)
        self.catalog.pieces = partial(self.topology.pieces, workers=config.workers)
        parts = (self.layout, self.catalog, self.members, config.policy)
        self.groups = Groups(*parts, Pins(config.versions_pinned_max), self._prepare)
        self.log = Log(keep=config.keep_log)
        self.decided: list[c.Entry] = []  # What the last turn has written into the log.
        self.failed: c.Fatal | None = None
        self.door, self.gatekeeper = Door(self), Gatekeeper(self, config.key)
        self.fleet, self.moves, self.loads = Fleet(self), Moves(self), Loads()
        self.restoring, self.rolling = Restoring(self), Rolling(self)
        self.snapshots, self.returning = Snapshots(self), Returning(self)
        self.replicas = Replicas(self)
        self.successor: Router | None = None
        """The router that has taken this one's place: the run has gone back to a snapshot."""
        self.groups.house, self.catalog.closed = self.moves.house, self.fleet.closed
        self.groups.regroups = self._leaves_group
        self.about: dict[str, object] = {}  # What its process says of itself, for `status` alone.
        self._told: dict[int, str] = {}
        self._shortage, self._next_beat = "", 0.0
        requests.log_configuration(self, Decisions(0))

    @property
    def policy(self) -> SyncPolicy:
        """The policy in force."""
        return self.groups.policy

    def _clock(self) -> float:
        return self.hub.now

    # --- in and out --------------------------------------------------------------------------

    def handle(self, event: Event, now: float) -> list[Action]:
        """Take one event in and return what to do, in order."""
        return self.turn([event], now)

    def turn(self, events: Sequence[Event], now: float) -> list[Action]:
        """Take all events of a turn of the loop in: what they decide travels together (rule 1)."""
        self.hub.now = now
        out = Decisions(len(self.log))
        for at, event in enumerate(events):
            first = self.rolling.found(event) if isinstance(event, Found) else None
            if self.successor is not None and first is not None:
                # What this turn has decided besides was told to nobody.
                return [*first, *self.successor.turn(events[at + 1 :], now)]
            self._one(event, now, out)
        return self._flush(out)

    def _one(self, event: Event, now: float, out: Decisions) -> None:
        match event:
            case Received(route, frame, key):
                peer, messages = self.hub.receive(route, frame, key)
                for message in messages:
                    try:
                        self._take(peer, message, out)
                    except (ProtocolError, Refused, ValueError, MemoryError) as error:
                        self.refuse(peer, getattr(message, "token", 0), error)
            case Tick():
                self._tick(now, out)
            case Keys(holders):
                self.gatekeeper.learn(holders, out)
            case ServerLink(index, up):
                self.members.link_changed(index, up)
            case Ask() | Written():
                self.snapshots.hear(event)
            case Restarted(term, instance):
                self.returning.begin(term, instance)
        parts = (self.returning, self.restoring, self.moves, self.fleet, self.replicas)
        for part in (*parts, self.rolling):
            part.look(out)
        meeting.look(self, out)
        self.snapshots.look(out)
        if self.groups.model is not None:
            self.groups.draws.circulate(self.groups.model, out)

    def _flush(self, out: Decisions) -> list[Action]:
        self.decided = out.entries
        self.log.extend(out.entries)
        if self.members.complete:
            for server in self.members.servers.values():
                if server.index_sent < len(self.log):
                    fresh = self.log.since(server.index_sent)
                    entry = c.Log(self.members.term, server.index_sent, fresh)
                    self.hub.send(server.peer, entry)
                    server.index_sent = len(self.log)
            self.log.forget(len(self.log))
        for incarnation, message in out.messages:
            worker = self.members.workers.get(incarnation)
            if worker is not None:
                self.hub.send(worker.peer, message)
        files = [*self.snapshots.actions(), *self.rolling.actions()]
        return [*self.fleet.actions(), *files, *self.hub.outgoing()]

    def refuse(self, peer: int, token: int, error: Exception) -> None:
        """Turn a request down, and say why to both sides."""
        who = self.members.by_peer.get(peer, "a newcomer")
        self.hub.note("warning", f"refused a request of {who}: {error}")
        if token or not isinstance(who, Server):  # A server passes on what some worker has sent.
            self.hub.send(peer, c.Refusal(token, code_of(error), str(error)[:4000]))

    # --- messages ----------------------------------------------------------------------------

    def _take(self, peer: int, message: c.Message, out: Decisions) -> None:
        who = self.members.by_peer.get(peer)
        self.gatekeeper.check(peer, message, who)
        if self.rolling.is_of_old(peer, message):
            return
        match message:
            case c.WorkerHello() | c.ServerHello() if who is not None:
                pass  # Said twice: a process is one member.
            case c.WorkerHello():
                self.door.knock(peer, message, out)
            case c.ServerHello() if self.returning.holds(peer, message):
                pass
            case c.ServerHello() if self.rolling.holds(peer, message):
                pass
            case c.ServerHello():
                if self.fleet.hello(peer, message, out):
                    self.fleet.changed()
                    self.door.open(out)
            case c.Beat():
                self.hub.echo(peer, message)
                self.members.beaten(peer, message)
            case _ if self.hub.is_closing(peer):
                # It was let go, and had sent this before it knew.
                pass
            case c.Status(token=token):
                self.hub.send(peer, c.Reply(token, standing.status(self)))
            case c.Change():
                number = who.number if isinstance(who, Worker) else -1
                value = requests.change(self, message, number, out)
                self.hub.send(peer, c.Reply(message.token, value, out.index))
            case c.TakeSnapshot(token=token):
                self.snapshots.ask(peer, token)
            case c.GoBack():
                self.rolling.ask(peer, message)
            case c.Rearrange(token=token):
                self.hub.send(peer, c.Reply(token, rearrange(self, message)))
            case c.Saved() if who is not None:
                self.snapshots.saved(who, message)
            case _ if isinstance(who, Worker):
                self._from_worker(who, message, out)
            case _ if isinstance(who, Server):
                self._from_server(who, message, out)
            case _:
                raise Refused(f"{type(message).__name__} came before any hello; join first")

    def _from_worker(self, worker: Worker, message: c.Message, out: Decisions) -> None:
        match message:
            case c.Offer():
                offers.offer(self, worker, message, out)
            case c.UsePool():
                trained = bool(self.groups.begun) or self.groups.model is not None
                self.groups.draws.use(message, worker, trained=trained)
                self.hub.send(worker.peer, c.Reply(message.token, "used"))
            case c.Begin(on_demand=on_demand):
                self.groups.draws.check_begin(worker)
                worker.barrier_token = 0  # It has given its barrier up (interrupt, time-out).
                self.groups.come_back(out)
                self.groups.ask(worker.incarnation, on_demand=on_demand)
                self.begin(out)
            case c.Plain(key=key):
                # `Regrouped` is the answer; a reply would end the push that asked, unsettled.
                self.groups.make_plain(self.layout.kid(key), out)
            case c.Finish(contribution=name):
                requests.check_finish(self.groups[name.group], message, worker, self.moves.floor)
                self.groups[name.group].finish(message, worker.number, out)
                self._settle_leavers(out)
            case c.Withdraw(contribution=name, grant=grant):
                requests.check_owner(name, worker)
                self.groups[name.group].withdraw(name, grant, out)
            case c.Received():
                requests.received(self, worker, message, out)
            case c.Pull():
                requests.pull(self, worker, message, out)
            case c.Accounts(accounts=accounts, spent=spent):
                self.coding.told(worker.incarnation, accounts)
                worker.spent = spent or worker.spent
            case c.Followed():
                self.moves.followed(worker, message)
            case c.Barrier(token=token, number=number):
                worker.barrier, worker.barrier_token = number, token
                self.groups.rest(worker)
                self.begin(out)
                meeting.at_barrier(self, worker, out)
                self._settle_leavers(out)
            case c.Listens() | c.CutOff():
                meeting.hear(self, worker, message, out)
            case c.Leave():
                worker.leaving, worker.leaving_at = True, self.hub.now
                self._settle_leavers(out)
            case _:
                raise ProtocolError(f"{type(message).__name__} is not for a worker to send")

    def _from_server(self, server: Server, message: c.Message, out: Decisions) -> None:
        match message:
            case c.Held(contributions=names):
                self.gatekeeper.norms.told(message)
                for name, grant in names:
                    if name.group == SEEDS:
                        offers.held(self, name.batch, server.index, out)
                    elif (worker := self.members.workers.get(name.incarnation)) is not None:
                        group = self.groups[name.group]
                        group.held(name, worker.number, grant, server.index, message.index, out)
                self._settle_leavers(out)
            case c.Void(contribution=name, grant=grant, key=key, reason=reason):
                worker = self.members.workers.get(name.incarnation)
                text = f"{worker}: key {key!r}: {reason}"
                self.hub.note("warning", f"push refused: {text}")
                if worker is not None and name.group == SEEDS:
                    self.hub.send(worker.peer, c.Refusal(0, "PushRefused", text))
                elif worker is not None:
                    self.groups[name.group].void(name, worker.number, grant, text, out)
                    self._settle_leavers(out)
            case c.Unsound():
                meeting.unsound(self, server, message, out)
            case c.SquareSums():
                self.groups[message.group].square_sums(server.index, message, out)
            case c.Decoding(seconds=seconds):
                self.coding.decoding(server.index, seconds)
                server.updates, server.update_s = message.updates, message.update_s
                server.rows = message.rows
            case c.Traffic(blocks=blocks):
                self.loads.told(server.index, blocks, self.hub.now)
            case c.Restored():
                self.restoring.restored(server, message, out)
            case c.Copied():
                self.moves.copied(server, message, out)
            case c.Trouble(reason=reason) | c.Bye(reason=reason):
                self.fleet.stopped(server, reason, out)
            case _:
                raise ProtocolError(f"{type(message).__name__} is not for a server to send")

    # --- keys --------------------------------------------------------------------------------

    def _leaves_group(self, kid: int, out: Decisions) -> None:
        """A key is about to leave its group, and its bucket: nothing of it may be on its way."""
        why = f"key {self.layout.entries[kid].spec.key!r} gets a group of its own"
        self.moves.abandon(self.layout.blocks_of_key[kid], why, out)
        self.moves.let_go(self.layout.blocks_of_key[kid], out)

    def _prepare(self, model: Group) -> None:
        """Set what the model's group has to know before anybody is granted anything."""
        model.rules = requests.rules(self)
        meeting.prepare(self, model)

    def begin(self, out: Decisions) -> None:
        """Let those who asked for batches in, once there is a model and room for its gradients."""
        if self.replicas.holds_back() or not self.groups.begin(out):
            return
        self.note_shortage()
        group = self.groups[MODEL]
        room = group.rules.capacity
        if room is not None and room < group.need():
            self.fail("ConfigError", requests.budget_text(self, group, self.policy))

    def note_shortage(self) -> None:
        """Warn, once for each pair of numbers, that k is larger than the members."""
        text = self.groups.shortage()
        if text and text != self._shortage:
            self.hub.note("warning", text)
        self._shortage = text

    # --- members -----------------------------------------------------------------------------

    def log_epoch(self, out: Decisions) -> None:
        """Write down who is a member from here on."""
        out.log(c.Epoch(self.members.epoch, self.members.incarnations(), self.groups.kept()))

    def remove(self, worker: Worker, why: str, out: Decisions) -> None:
        """Let a worker go, or give it up."""
        self.hub.note("info" if worker.leaving else "warning", f"{worker} is gone: {why}")
        self.members.remove(worker)
        self._told.pop(worker.incarnation, None)
        self.log_epoch(out)
        self.coding.left(worker.incarnation)
        self.catalog.lost(worker.incarnation, self.members.places, self.model_spec, out)
        self.groups.leave(worker, out)
        short = "" if worker.leaving or worker.hello.observer else self.members.shortage()
        if short and self.config.on_short == "fail":
            self.fail("WorkersLost", f"{worker} is gone: {why}; {short}")
        self.begin(out)
        last = c.Bye(why) if worker.leaving else c.Refusal(0, "Evicted", f"{worker}: {why}")
        self.hub.send(worker.peer, last)
        self.hub.close(worker.peer)

    def _settle_leavers(self, out: Decisions) -> None:
        """Let go who wants to leave and open barriers, where all that was finished has arrived."""
        self.groups.pause(out)
        for worker in [w for w in self.members.workers.values() if w.leaving]:
            if not self.groups.unfinished(worker):
                self.remove(worker, "it left", out)
            else:
                meeting.leaves(self, worker, out)
        training = self.members.training()
        self.line_passed = self.line_passed or len(training) >= self.members.expected
        if self.line_passed:
            meeting.open_barriers(self, training, out)

    def fail(self, code: str, text: str) -> None:
        """The run cannot go on: tell everybody why, once."""
        if self.failed is None:
            self.failed = c.Fatal(code, text[:4000])
            self.hub.note("error", text)
            for peer in self.hub.peers():
                self.hub.send(peer, self.failed)

    def _tick(self, now: float, out: Decisions) -> None:
        for worker in list(self.members.workers.values()):
            silent = self.hub.overdue_s(worker.peer, self.config.worker_lost_s)
            if silent and not self.returning.waiting:
                self.remove(worker, f"nothing was heard of it for {silent:.1f} s", out)
                self.note_shortage()
        self.door.settle(out)
        self._settle_leavers(out)
        self.fleet.tick(out)
        self.door.forget_silent()
        if now >= self._next_beat:
            self._next_beat = now + self.config.beat_s
            for peer in self.hub.peers():
                self.hub.send(peer, c.Beat(now))
            requests.explain(self, self.door.outside, self._told)
