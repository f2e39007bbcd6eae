"""The router: all that the broker is, without its sockets.

Frames and the time come in; `handle` is the one method that changes anything; frames to send come
out. It knows the members, the catalog of keys, and one `Group` for each set of keys with a version
of its own; it writes the one ordered log. It must not know sockets, clocks, files or chance.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from zkv import control as c
from zkv.errors import ProtocolError, Refused, VersionMismatch, ZkvError, code_of
from zkv.layout import Layout
from zkv.link import Link
from zkv.optimizer_spec import OptimizerSpec, optimizer
from zkv.policy import SyncPolicy, policy
from zkv.wire import MODEL, SEEDS, open_envelope
from zkv_brokers import reasons, requests
from zkv_brokers.catalog import Catalog, Pending
from zkv_brokers.group import Decisions, Group, Pins
from zkv_brokers.members import Members, Server, Worker
from zkv_brokers.store import MODEL_DEFAULT, PLAIN_DEFAULT


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """What a broker is started with. Times in seconds, sizes in bytes."""

    address: str
    """Where workers and servers reach it; for messages."""
    policy: SyncPolicy
    servers: int = 1
    workers: int = 1
    """The start line: nobody is granted a first batch before so many are here."""
    optimizer: str | None = None
    data_address: str = ""
    versions_pinned_max: int = 8
    worker_lost_s: float = 10.0
    server_lost_s: float = 5.0
    beat_s: float = 0.5
    link_resend_s: float = 1.0


@dataclass(frozen=True, slots=True)
class Received:
    """A control frame has come in over this route."""

    route: bytes
    frame: bytes


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


Event = Received | Tick


@dataclass(frozen=True, slots=True)
class Send:
    """Send this control frame over this route."""

    route: bytes
    frame: bytes


@dataclass(frozen=True, slots=True)
class Note:
    """Tell the operator; `level` is a logging level's name."""

    level: str
    text: str


@dataclass(frozen=True, slots=True)
class ServersChanged:
    """The data port (route `broker`) must know these servers, by index."""

    addresses: tuple[tuple[int, str], ...]


Action = Send | Note | ServersChanged


class Router:
    """The broker's state. `term` must be higher than that of any broker before."""

    def __init__(self, config: RouterConfig, *, term: int, instance: int) -> None:
        self.config = config
        self.members = Members(term, config.servers, config.workers)
        self.layout = Layout()
        self.catalog = Catalog(self.layout)
        self.pins = Pins(config.versions_pinned_max)
        self.model_spec = optimizer(config.optimizer or MODEL_DEFAULT)
        self.plain_spec = optimizer(config.optimizer or PLAIN_DEFAULT)
        self.policy = config.policy
        self.groups: dict[int, Group] = {}
        self.entries: list[c.Entry] = []
        self.failed: c.Fatal | None = None
        self.now = 0.0
        self._instance = instance
        self._links: dict[int, Link] = {}
        self._routes: dict[int, bytes] = {}
        self._queued_hellos: dict[int, c.WorkerHello] = {}
        self._begun: set[int] = set()
        self._told: dict[int, str] = {}
        self._closing: set[int] = set()
        self._pausing: set[int] = set()
        self._line_passed = False
        self._notes: list[Action] = []
        self._next_beat = 0.0
        self._next_group = 1
        self._log_configuration(Decisions(0))

    # --- in and out --------------------------------------------------------------------------

    def handle(self, event: Event, now: float) -> list[Action]:
        """Take one event in and return what to do, in order."""
        self.now = now
        out = Decisions(len(self.entries))
        match event:
            case Received(route, frame):
                self._receive(route, frame, out)
            case Tick():
                self._tick(out)
        return self._flush(out)

    def _receive(self, route: bytes, frame: bytes, out: Decisions) -> None:
        try:
            packet = c.decode_messages(open_envelope(frame))
        except VersionMismatch as error:
            self._note("warning", f"refused a peer: {error}")
            refusal = c.Refusal(0, "VersionMismatch", str(error))
            self._notes.append(
                Send(route, c.encode_packet(c.Packet(self._instance, 0, 1, 1, [refusal])))
            )
            return
        except ProtocolError as error:
            self._note("warning", f"dropped a control frame of {len(frame)} bytes: {error}")
            return
        link = self._links.get(packet.source)
        if link is None:
            if packet.source == 0 or packet.target not in (0, self._instance):
                # A peer of an earlier broker: the bare answer tells it that this one is new.
                answer = Link(self._instance, peer=packet.source)
                answer.receive(packet, self.now)
                self._notes += [Send(route, c.encode_packet(p)) for p in answer.outgoing(self.now)]
                return
            link = self._links[packet.source] = Link(
                self._instance, peer=packet.source, resend_s=self.config.link_resend_s
            )
        self._routes[packet.source] = route
        _, messages = link.receive(packet, self.now)
        for message in messages:
            try:
                self._take(packet.source, message, out)
            except (ProtocolError, Refused, ValueError) as error:
                self._refuse(packet.source, getattr(message, "token", 0), error)

    def _flush(self, out: Decisions) -> list[Action]:
        self.entries += out.entries
        for server in self.members.servers.values() if self.members.complete else ():
            if server.index_sent < len(self.entries):
                fresh = self.entries[server.index_sent :]
                self._links[server.peer].send(c.Log(self.members.term, server.index_sent, fresh))
                server.index_sent = len(self.entries)
        for incarnation, message in out.messages:
            worker = self.members.workers.get(incarnation)
            if worker is not None:
                self._links[worker.peer].send(message)
        actions, self._notes = self._notes, []
        for peer, link in self._links.items():
            route = self._routes[peer]
            actions += [Send(route, c.encode_packet(packet)) for packet in link.outgoing(self.now)]
        for peer in [p for p in self._closing if self._links[p].idle]:
            self._forget(peer)
        return actions

    def _forget(self, peer: int) -> None:
        self._links.pop(peer, None)
        self._routes.pop(peer, None)
        self._closing.discard(peer)
        self._queued_hellos.pop(peer, None)

    def _note(self, level: str, text: str) -> None:
        self._notes.append(Note(level, text))

    def send(self, peer: int, message: c.Message) -> None:
        """Queue a control message for a peer, if it is still known."""
        link = self._links.get(peer)
        if link is not None:
            link.send(message)

    def _refuse(self, peer: int, token: int, error: Exception) -> None:
        self._note(
            "warning",
            f"refused a request of {self.members.by_peer.get(peer, 'a newcomer')}: {error}",
        )
        self.send(peer, c.Refusal(token, code_of(error), str(error)[:4000]))

    # --- messages ----------------------------------------------------------------------------

    def _take(self, peer: int, message: c.Message, out: Decisions) -> None:
        who = self.members.by_peer.get(peer)
        match message:
            case c.WorkerHello():
                self._hello_worker(peer, message, out)
            case c.ServerHello():
                self._hello_server(peer, message, out)
            case c.Beat():
                pass
            case c.Status(token=token):
                self.send(peer, c.Reply(token, requests.status(self)))
            case c.Change():
                self.send(peer, c.Reply(message.token, self._change(message, out)))
            case _ if isinstance(who, Worker):
                self._from_worker(who, message, out)
            case _ if isinstance(who, Server):
                self._from_server(who, message, out)
            case _:
                raise Refused(f"{type(message).__name__} came before any hello; join first")

    def _hello_worker(self, peer: int, hello: c.WorkerHello, out: Decisions) -> None:
        if self.failed is not None:
            self.send(peer, self.failed)
            return
        if not self.members.complete:
            self._queued_hellos[peer] = hello
            return
        silent = self.members.named(hello.name)
        if silent is not None and self._silent_s(silent.peer) > 3 * self.config.beat_s:
            self._remove(silent, f"its name {hello.name!r} came back with a new process", out)
        admitted = self.members.admit(peer, hello)
        if isinstance(admitted, ZkvError):
            raise admitted
        self._note("info", f"{admitted} joined")
        self._log_epoch(out)
        out.tell(admitted.incarnation, requests.welcome(self, admitted))
        for told in self.catalog.history:
            out.tell(admitted.incarnation, told)
            if isinstance(told, c.Layout):
                out.tell(admitted.incarnation, c.Ready(told.init))
        if not hello.observer:
            for number, group in self.groups.items():
                if number != MODEL:
                    group.join(admitted.number, admitted.incarnation, out)

    def _hello_server(self, peer: int, hello: c.ServerHello, out: Decisions) -> None:
        if hello.started:
            self._fail(
                "BrokerLost",
                f"server {hello.name!r} at {hello.address} holds a model of an earlier broker, whose log is lost; "
                "stop all processes and start the run again",
            )
            self.send(peer, self.failed or c.Bye(""))
            return
        enrolled = self.members.enrol(peer, hello)
        if isinstance(enrolled, ZkvError):
            raise enrolled
        self._note(
            "info", f"{enrolled} is here, {len(self.members.servers)} of {self.config.servers}"
        )
        self.send(peer, c.ServerWelcome(enrolled.index, self.config.servers, self.members.term))
        if self.members.complete:
            addresses = tuple((s.index, s.hello.address) for s in self.members.servers.values())
            self._notes.append(ServersChanged(addresses))
            waiting, self._queued_hellos = self._queued_hellos, {}
            for worker_peer, worker_hello in waiting.items():
                try:
                    self._hello_worker(worker_peer, worker_hello, out)
                except ZkvError as error:
                    self._refuse(worker_peer, 0, error)

    def _from_worker(self, worker: Worker, message: c.Message, out: Decisions) -> None:
        match message:
            case c.Offer():
                self._offer(worker, message, out)
            case c.Begin():
                self._begun.add(worker.incarnation)
                self._begin(out)
            case c.Plain(token=token, key=key):
                self.send(worker.peer, c.Reply(token, self._make_plain(self.layout.kid(key), out)))
            case c.Finish(contribution=name, grant=grant, weight=weight):
                requests.check_owner(name, worker)
                self._group(name.group).finish(name, worker.number, grant, weight, out)
                self._settle_leavers(out)
            case c.Withdraw(contribution=name, grant=grant):
                requests.check_owner(name, worker)
                self._group(name.group).withdraw(name, grant, out)
            case c.Received(group=number, grant=grant):
                if number in self.groups:
                    self.groups[number].received(worker.incarnation, grant, out)
            case c.Pull():
                requests.pull(self, worker, message, out)
            case c.Barrier(token=token, number=number):
                worker.barrier, worker.barrier_token = number, token
                self._pause(worker, out)
                self._settle_leavers(out)
            case c.Leave():
                worker.leaving = True
                self._settle_leavers(out)
            case _:
                raise ProtocolError(f"{type(message).__name__} is not for a worker to send")

    def _from_server(self, server: Server, message: c.Message, out: Decisions) -> None:
        match message:
            case c.Held(contributions=names):
                for name, grant in names:
                    if name.group == SEEDS:
                        self._seeded(self.catalog.held(name.batch, server.index), out)
                    elif (worker := self.members.workers.get(name.incarnation)) is not None:
                        self._group(name.group).held(name, worker.number, grant, server.index, out)
                self._settle_leavers(out)
            case c.Void(contribution=name, grant=grant, key=key, reason=reason):
                worker = self.members.workers.get(name.incarnation)
                text = f"{worker}: key {key!r}: {reason}"
                self._note("warning", f"push refused: {text}")
                if worker is not None and name.group == SEEDS:
                    self.send(worker.peer, c.Refusal(0, "PushRefused", text))
                elif worker is not None:
                    self._group(name.group).void(name, worker.number, grant, text, out)
                    self._settle_leavers(out)
            case c.SquareSums():
                self._group(message.group).square_sums(server.index, message, out)
            case c.Trouble(reason=reason) | c.Bye(reason=reason):
                self._fail("ServerLost", f"{server} stopped: {reason}")
            case _:
                raise ProtocolError(f"{type(message).__name__} is not for a server to send")

    def _group(self, number: int) -> Group:
        group = self.groups.get(number)
        if group is None:
            raise ProtocolError(f"there is no group {number}")
        return group

    # --- keys --------------------------------------------------------------------------------

    def _offer(self, worker: Worker, message: c.Offer, out: Decisions) -> None:
        plain = message.plain or MODEL in self.groups
        taken = self.catalog.offer(
            worker.incarnation,
            replace_plain(message, plain),
            self.config.servers,
            self.plain_spec if plain else self.model_spec,
            out,
        )
        if isinstance(taken, ZkvError):
            raise taken
        if taken is None:
            self.send(worker.peer, c.Reply(message.token, "known"))

    def _seeded(self, done: Pending | None, out: Decisions) -> None:
        if done is None:
            return
        told = self.catalog.complete(done, out.index)
        for incarnation in self.members.incarnations():
            out.tell(incarnation, told)
            out.tell(incarnation, c.Ready(done.init))
        for incarnation, token in done.waiting:
            mine = incarnation == done.incarnation
            out.tell(incarnation, c.Reply(token, "seeded" if mine else "known"))
        if done.plain:
            for entry in done.entries:
                if entry.spec.same_as is None:
                    self._make_plain(entry.kid, out, at_birth=True)
        self._begin(out)

    def _make_plain(self, kid: int, out: Decisions, *, at_birth: bool = False) -> int:
        """Give a key a group of its own (at its first plain push); return the group's number."""
        number = self.layout.group_of[kid]
        if number != MODEL:
            return number
        key = self.layout.entries[kid].spec.key
        if MODEL in self.groups and not at_birth:
            raise Refused(
                f"key {key!r} belongs to the model, which is trained in batches; a plain push would tear "
                "its version: push it inside a batch, or initialise it with plain=True"
            )
        number, bid = self._next_group, self.catalog.next_block()
        self._next_group += 1
        out.log(c.Regroup(kid, number, bid))
        self.layout.regroup(kid, number, bid)
        told = c.Regrouped(kid, number, bid, out.index)
        self.catalog.history.append(told)
        for incarnation in self.members.incarnations():
            out.tell(incarnation, told)
        servers = {block.server for block in self.layout.blocks_in(number)}
        group = self.groups[number] = Group(
            number, self.policy, members_min=self.members.expected, servers=servers, pins=self.pins
        )
        for worker in self.members.training():
            group.join(worker.number, worker.incarnation, out)
        return number

    def _begin(self, out: Decisions) -> None:
        """Let those who asked for batches into the model's group, once there is a model."""
        if not self._begun or not self.layout.kids_in(MODEL) or self.catalog.pending:
            return
        group = self.groups.get(MODEL)
        if group is None:
            blocks = self.layout.blocks_in(MODEL)
            group = self.groups[MODEL] = Group(
                MODEL,
                self.policy,
                members_min=self.members.expected,
                servers={block.server for block in blocks},
                pins=self.pins,
            )
            group.capacity = requests.capacity(self)
            group.clips = self.model_spec.clip_global_norm is not None
        for incarnation in sorted(self._begun):
            worker = self.members.workers.get(incarnation)
            if worker is not None and not worker.hello.observer:
                group.join(worker.number, incarnation, out)
        self._begun.clear()
        if group.capacity is not None and group.capacity < group.need():
            self._fail("ConfigError", requests.budget_text(self, group))

    # --- members -----------------------------------------------------------------------------

    def _log_epoch(self, out: Decisions) -> None:
        kept = [name for group in self.groups.values() for name in group.kept()]
        out.log(c.Epoch(self.members.epoch, self.members.incarnations(), kept))

    def _remove(self, worker: Worker, why: str, out: Decisions) -> None:
        self._note("info" if worker.leaving else "warning", f"{worker} is gone: {why}")
        self.members.remove(worker)
        self._begun.discard(worker.incarnation)
        self._told.pop(worker.incarnation, None)
        self.pins.release(worker.incarnation)
        self._log_epoch(out)
        self.catalog.lost(worker.incarnation, self.config.servers, self.model_spec, out)
        for group in self.groups.values():
            if group.incarnations.get(worker.number) == worker.incarnation:
                group.leave(worker.number, out)
        self.send(
            worker.peer,
            c.Bye(why) if worker.leaving else c.Refusal(0, "Evicted", f"{worker}: {why}"),
        )
        self._closing.add(worker.peer)

    def _settle_leavers(self, out: Decisions) -> None:
        """Let go who wants to leave and open barriers, where all that was finished has arrived."""
        for incarnation in list(self._pausing):
            self._pausing.discard(incarnation)
            if incarnation in self.members.workers:
                self._pause(self.members.workers[incarnation], out)
        for worker in [w for w in self.members.workers.values() if w.leaving]:
            if not self._unfinished(worker):
                self._remove(worker, "it left", out)
        training = self.members.training()
        self._line_passed = self._line_passed or len(training) >= self.members.expected
        if not training or not self._line_passed:
            return
        lowest = min(worker.barrier for worker in training)
        if any(worker.barrier_token for worker in training) and not any(
            map(self._unfinished, training)
        ):
            for worker in training:
                if worker.barrier_token and worker.barrier <= lowest:
                    self.send(worker.peer, c.Reply(worker.barrier_token, worker.barrier))
                    worker.barrier_token = 0

    def _unfinished(self, worker: Worker) -> bool:
        return any(group.unfinished(worker.incarnation) for group in self.groups.values())

    def _pause(self, worker: Worker, out: Decisions) -> None:
        """While a worker waits in a barrier, the others' updates must not wait for it.

        Under a policy that needs every worker it stays a member: who takes part in a round must not
        depend on who is first at the barrier, or the sums would differ from run to run.
        """
        group = self.groups.get(MODEL)
        self._begun.discard(worker.incarnation)
        if group is None or group.sync.policy.threshold is None:
            return
        if group.incarnations.get(worker.number) == worker.incarnation:
            if group.unfinished(worker.incarnation):
                self._pausing.add(worker.incarnation)
            else:
                group.pause(worker.number, out)

    def _silent_s(self, peer: int) -> float:
        link = self._links.get(peer)
        return self.now - link.heard if link is not None and link.heard is not None else 0.0

    def _fail(self, code: str, text: str) -> None:
        if self.failed is None:
            self.failed = c.Fatal(code, text[:4000])
            self._note("error", text)
            for peer in self._links:
                self.send(peer, self.failed)

    def _tick(self, out: Decisions) -> None:
        for worker in list(self.members.workers.values()):
            silent = self._silent_s(worker.peer)
            if silent > self.config.worker_lost_s:
                self._remove(worker, f"nothing was heard of it for {silent:.1f} s", out)
        self._settle_leavers(out)
        for server in self.members.servers.values():
            silent = self._silent_s(server.peer)
            if silent > self.config.server_lost_s:
                self._fail(
                    "ServerLost", f"{server} is lost: nothing was heard of it for {silent:.1f} s"
                )
        for peer in list(self._links):
            if (
                peer not in self.members.by_peer
                and self._silent_s(peer) > self.config.worker_lost_s
            ):
                self._forget(peer)
        if self.now >= self._next_beat:
            self._next_beat = self.now + self.config.beat_s
            for peer in self._links:
                self.send(peer, c.Beat(self.now))
            self._explain()

    def _explain(self) -> None:
        """Tell those who wait why, whenever the reason has changed."""
        missing = reasons.servers_missing(self.members, self.config.address)
        for peer in self._queued_hellos:
            self.send(peer, c.Waiting(missing))
        for worker in self.members.training():
            reason = requests.why_waiting(self, worker)
            if reason != self._told.get(worker.incarnation, ""):
                self._told[worker.incarnation] = reason
                self.send(worker.peer, c.Waiting(reason[:4000]))

    # --- settings ----------------------------------------------------------------------------

    def _log_configuration(self, out: Decisions) -> None:
        plain = {"model": self.model_spec.to_plain(), "plain": self.plain_spec.to_plain()}
        entry = c.Configure(plain)
        if MODEL in self.groups:
            self.groups[MODEL].log_between_commits(entry, out)
        elif out.first_index == 0 and not self.entries:
            self.entries.append(entry)
        else:
            out.log(entry)

    def _change(self, message: c.Change, out: Decisions) -> dict[str, object]:
        """Change a live setting; return from which model version it holds."""
        group = self.groups.get(MODEL)
        match message.setting:
            case "lr":
                rate = requests.number(message.value, "lr")
                self.model_spec, self.plain_spec = (
                    self.model_spec.with_lr(rate),
                    self.plain_spec.with_lr(rate),
                )
                self._log_configuration(out)
            case "policy":
                self.policy = policy(message.value)
                self.config = replace(self.config, policy=self.policy)
                for one in self.groups.values():
                    one.switch(self.policy, out)
            case other:
                raise Refused(f"there is no live setting {other!r}; there are: lr, policy")
        version = group.sync.version if group is not None else 0
        self._note("info", f"{message.setting} is {message.value} from version {version} on")
        return {"setting": message.setting, "value": message.value, "version": version}

    def specs(self) -> tuple[OptimizerSpec, OptimizerSpec]:
        """Return the optimizers in force, for the model and for plain keys."""
        return self.model_spec, self.plain_spec


def replace_plain(message: c.Offer, plain: bool) -> c.Offer:
    """Return the offer with `plain` as decided."""
    return c.Offer(message.token, message.keys, plain)
