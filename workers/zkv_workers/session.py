"""The session: a worker's protocol, without sockets, threads or clocks.

The user's calls, messages and the time come in; `handle` is the one method that changes anything;
frames to send and answers to calls come out (`zkv_workers.signals` has both sides). A driver for
asyncio, a blocking one and the simulated cluster all run this same class.
"""

from __future__ import annotations

from dataclasses import dataclass

from zkv import control as c
from zkv import data_messages as d
from zkv import errors
from zkv.control import encode_packet
from zkv.dtypes import Array
from zkv.errors import ProtocolError, ZkvError
from zkv.layout import Layout
from zkv.link import Link
from zkv.wire import MODEL, PULLS, SEEDS, ContributionId, open_envelope
from zkv_workers import signals as s
from zkv_workers.config import SessionConfig
from zkv_workers.cycle import Cycle
from zkv_workers.packing import cut
from zkv_workers.plain import PlainPushes
from zkv_workers.requests import Requests
from zkv_workers.transfers import Assembly, Downloads, Uploads


@dataclass(slots=True)
class _Open:
    """A contribution that is not settled: the call that asked for its fate, if any."""

    name: ContributionId
    grant: int
    token: int = 0


class Session:
    """One life of one worker. `instance` is a number that no other process has."""

    def __init__(self, config: SessionConfig, *, instance: int) -> None:
        self.config = config
        self.layout = Layout()
        self.member: c.Welcome | None = None
        self.started = False
        """Whether anything was granted or pushed: from here on a new broker cannot be joined."""
        self.broken: Exception | None = None
        self.index = 0
        self.counts = dict.fromkeys(
            ("batches", "committed", "cancelled", "discarded", "pulls", "plain"), 0
        )
        self.uploads = Uploads(
            self.layout, window_bytes=config.window_bytes, resend_s=config.resend_s
        )
        self.downloads = Downloads(self.layout, ask_s=config.resend_s)
        self.requests = Requests(config)
        self.plain = PlainPushes()
        self._link = Link(instance, resend_s=config.link_resend_s)
        self._cycle = Cycle()
        self._offers: dict[int, s.Initialise] = {}
        self._open: dict[tuple[int, int], _Open] = {}
        self._pulls: list[s.Pull] = []
        self._barrier = 0
        self._next_beat = 0.0
        self._out: list[s.Output] = []
        self.now = 0.0

    def handle(self, event: s.Input, now: float) -> list[s.Output]:
        """Take one input and return what to do, in order."""
        self.now = now
        if self.broken is None:
            try:
                self._take(event)
            except ZkvError as error:
                self._caller_failed(event, error)
        elif token := getattr(event, "token", 0):
            self._out.append(s.Fail(token, self.broken))
        self._out += [s.SendControl(encode_packet(packet)) for packet in self._link.outgoing(now)]
        self._out += self.uploads.ready(now)
        out, self._out = self._out, []
        return out

    def _caller_failed(self, event: s.Input, error: ZkvError) -> None:
        token = getattr(event, "token", 0)
        if token:
            self.requests.close(token)
            self._out.append(s.Fail(token, error))
        else:
            self._out.append(s.Narrate("warning", str(error)))

    def _take(self, event: s.Input) -> None:
        match event:
            case s.Tick():
                self._tick()
            case s.FromBroker(frame):
                self._from_broker(frame)
            case s.FromServer(message, payload):
                self._from_server(message, payload)
            case s.SendBlock(batch, bid, payload):
                self._send_block(batch, bid, payload)
            case s.Finish():
                self._finish(event)
            case s.Withdraw(batch):
                self._withdraw(batch)
            case s.GiveUp(token):
                self.requests.close(token)
                if token == self._cycle.token:
                    self._cycle.token = 0
            case _:
                self._call(event)

    # --- the user's calls ----------------------------------------------------------------------

    def _call(self, event: s.Input) -> None:
        match event:
            case s.Join(token):
                self.requests.open(token, "the cluster", self.now, self.config.connect_timeout_s)
                self._hello()
            case s.Initialise(token=token):
                self.requests.open(token, "init", self.now)
                self._offers[token] = event
                self._link.send(c.Offer(token, list(event.specs), event.plain))
            case s.Begin(token):
                self.requests.open(token, "the next batch", self.now)
                self._cycle.token = token
                if not self._cycle.asked:
                    self._cycle.asked = True
                    self._link.send(c.Begin())
                self._answer_begin()
            case s.PushPlain(token=token, key=key):
                kid = self.layout.kid(key)
                self.requests.open(token, f"the push of {key!r}", self.now)
                if self.plain.add(kid, event, self.layout.group_of[kid]):
                    self._link.send(c.Plain(token, key))
                self._push_plain(self.layout.group_of[kid])
            case s.Pull(token=token):
                self.requests.open(
                    token,
                    f"the pull of {', '.join(map(repr, event.keys)) or 'the model'}",
                    self.now,
                )
                self._pulls.append(event)
                self._send_pulls()
            case s.Barrier(token):
                self._barrier += 1
                self._cycle.pause()
                self.requests.open(token, f"barrier {self._barrier}", self.now)
                self._link.send(c.Barrier(token, self._barrier))
            case s.Leave(token):
                self.requests.open(token, "the broker's goodbye", self.now)
                self.requests.leaving = token
                self._link.send(c.Leave())
            case s.Ask(token, setting, value):
                self.requests.open(token, f"the answer about {setting or 'the status'}", self.now)
                self._link.send(c.Change(token, setting, value) if setting else c.Status(token))
            case _:
                raise AssertionError(f"no such input: {event}")

    def _hello(self) -> None:
        config = self.config
        self._link.send(
            c.WorkerHello(
                config.name, config.rank, config.world, config.observer, config.host, config.pid
            )
        )

    def _answer_begin(self) -> None:
        begun = self._cycle.begin(self.layout)
        if begun is not None:
            self.started = True
            self._answer(*begun)

    def _answer(self, token: int, value: object) -> None:
        if self.requests.close(token):
            self._out.append(s.Answer(token, value))

    def _mine(self, group: int, batch: int) -> ContributionId:
        assert self.member is not None, "nothing is contributed before the welcome"
        return ContributionId(self.member.incarnation, group, batch)

    def _send_block(self, batch: int, bid: int, payload: Array) -> None:
        grant = self._cycle.grant_of(batch)
        if grant is not None:
            self.uploads.push(self._mine(MODEL, batch), grant, bid, payload, self.index)

    def _finish(self, event: s.Finish) -> None:
        grant = self._cycle.grant_of(event.batch)
        self.counts["batches"] += 1
        self.requests.open(event.token, f"the fate of batch {event.batch}", self.now, None)
        if grant is None:
            self.counts["cancelled"] += 1
            self._answer(event.token, s.Fate(None, "cancelled: the update happened without it"))
            return
        self._cycle.finish()
        name = self._mine(MODEL, event.batch)
        self._conclude(name, grant, event.weight, event.skipped, event.token)

    def _conclude(
        self,
        name: ContributionId,
        grant: int,
        weight: float,
        skipped: tuple[int, ...],
        token: int,
    ) -> None:
        """Say to every server of the group, and to the broker, that a contribution is complete."""
        self.uploads.conclude(name, grant, weight, skipped, self.index)
        self._open[name.group, name.batch] = _Open(name, grant, token)
        self._link.send(c.Finish(name, grant, weight))

    def _withdraw(self, batch: int) -> None:
        grant = self._cycle.grant_of(batch)
        if grant is not None:
            name = self._mine(MODEL, batch)
            self.uploads.forget(name)
            self._link.send(c.Withdraw(name, grant))
            self._cycle.withdraw()

    def _push_plain(self, group: int) -> None:
        ready = self.plain.take(group)
        if ready is None or self.member is None:
            return
        push, grant, batch, kid = ready
        name = self._mine(group, batch)
        self.started = True
        self.counts["plain"] += 1
        for bid, payload in cut(
            self.layout,
            self.layout.blocks_in(group),
            {self.layout.entries[kid].spec.key: push.value},
        ).items():
            self.uploads.push(name, grant, bid, payload, self.index)
        self._conclude(name, grant, push.weight, (), push.token)

    def _send_pulls(self) -> None:
        """Ask for what can be read: not before my own plain pushes of the same keys are settled."""
        if not self.layout.kid_of:
            return
        for pull in list(self._pulls):
            try:
                busy = any(self.plain.busy(self.layout.kid(key)) for key in pull.keys)
            except errors.UnknownKey as error:
                self._pulls.remove(pull)
                self._caller_failed(pull, error)
                continue
            if not busy:
                self._pulls.remove(pull)
                self._link.send(c.Pull(pull.token, list(pull.keys)))

    # --- the broker --------------------------------------------------------------------------

    def _from_broker(self, frame: bytes) -> None:
        envelope = open_envelope(frame)
        if envelope.target not in (0, self._link.instance):
            return
        packet = c.decode_messages(envelope)
        change, messages = self._link.receive(packet, self.now)
        if change is not None and change.before:
            self._broker_changed()
        for message in messages:
            self._hear(message)
            if self.broken is not None:
                return

    def _broker_changed(self) -> None:
        if self.started:
            self.fail(
                errors.BrokerLost(
                    f"the broker at {self.config.broker} was restarted and its log is lost; "
                    "stop all processes and start the run again"
                )
            )
            return
        self._out.append(
            s.Narrate("warning", f"the broker at {self.config.broker} is a new one; joining again")
        )
        self.uploads.clear()
        self.downloads.clear()
        self.plain.clear()
        self.layout.clear()
        self.member = None
        self._cycle.restart()
        self.index = 0
        self._hello()
        for offer in self._offers.values():
            self._link.send(c.Offer(offer.token, list(offer.specs), offer.plain))
        if self._cycle.asked:
            self._link.send(c.Begin())
        for token in self.requests.named("barrier"):
            self._link.send(c.Barrier(token, self._barrier))

    def fail(self, error: Exception) -> None:
        """End the session: every open and later call fails with this error."""
        if self.broken is not None:
            return
        self.broken = error
        self._out += [s.Fail(token, error) for token in self.requests.all()]
        self._out.append(s.Broken(error))

    def _hear(self, message: c.Message) -> None:
        match message:
            case c.Welcome():
                self._welcome(message)
            case c.Beat():
                pass
            case c.Waiting(reason=reason):
                self.requests.reason = reason
            case c.Layout():
                self._laid_out(message)
            case c.Ready():
                self._send_pulls()
            case c.Regrouped(kid=kid, group=group, bid=bid, index=index):
                self.layout.regroup(kid, group, bid)
                self.index = max(self.index, index)
                self.plain.regrouped(kid, group)
                self._push_plain(group)
            case c.Granted():
                self._on_granted(message)
            case c.Cancel(group=group, grant=grant):
                self._on_cancel(group, grant)
            case c.Settled(fates=fates):
                for group, batch, version, why in fates:
                    self._settled(group, batch, version, why)
            case c.Reply(token=token, value=value):
                self._replied(token, value)
            case c.Refusal(token=token, code=code, reason=reason):
                self._refused(token, errors.from_code(code, reason))
            case c.Fatal(code=code, reason=reason):
                self.fail(errors.from_code(code, reason))
            case c.Bye():
                if self.requests.leaving:
                    self._answer(self.requests.leaving, None)
                self.fail(errors.Closed("the worker has left"))
            case _:
                raise ProtocolError(f"{type(message).__name__} is not for a worker")

    def _welcome(self, message: c.Welcome) -> None:
        self.member = message
        self._out.append(
            s.Connect(tuple((at.index, at.address) for at in message.servers), message.data_address)
        )
        self._greet()
        member = s.Membership(message.number, message.incarnation, message.world, message.policy)
        for token in self.requests.named("the cluster"):
            self._answer(token, member)

    def _greet(self) -> None:
        if self.member is not None:
            for at in self.member.servers:
                greet = d.Greet(self.member.incarnation, self.member.term)
                self._out.append(s.SendData(at.index, greet, None))

    def _laid_out(self, message: c.Layout) -> None:
        self.layout.add(message.keys, message.blocks)
        self.index = max(self.index, message.index)
        if not message.seed or self.member is None:
            return
        keys = {entry.spec.key for entry in message.keys}
        offer = next(o for o in self._offers.values() if {spec.key for spec in o.specs} == keys)
        self.uploads.seed(self._mine(SEEDS, message.init), message, offer.values)

    def _replied(self, token: int, value: object) -> None:
        if token in self._offers:
            del self._offers[token]
        self._answer(token, value)

    def _refused(self, token: int, error: ZkvError) -> None:
        if token == 0:
            self.fail(error)
            return
        self._offers.pop(token, None)
        self.plain.refused(token)
        if self.requests.close(token):
            self._out.append(s.Fail(token, error))
        self._send_pulls()

    def _on_granted(self, message: c.Granted) -> None:
        self.index = max(self.index, message.index)
        self.requests.reason = ""
        if message.group == PULLS:
            blocks = self.layout.blocks_for(message.kids)
            self._arrived(self.downloads.expect(message, blocks, self.now))
        elif message.group == MODEL:
            self._cycle.granted(message)
            if message.bytes_follow:
                blocks = self.layout.blocks_in(MODEL)
                self._arrived(self.downloads.expect(message, blocks, self.now))
            self._answer_begin()
        else:
            self.plain.granted(message.group, message.grant)
            self._push_plain(message.group)

    def _on_cancel(self, group: int, grant: int) -> None:
        self.downloads.drop(group, grant)
        if group != MODEL:
            self.plain.cancelled(group, grant)
            return
        batch = self._cycle.cancel(grant)
        if batch is not None:
            self.uploads.forget(self._mine(MODEL, batch))
            self._out.append(s.CancelBatch(batch))

    def _settled(self, group: int, batch: int, version: int, why: str) -> None:
        held = self._open.pop((group, batch), None)
        if held is None:
            return
        self.uploads.forget(held.name)
        fate = s.Fate(version if version >= 0 else None, why)
        self.counts[fate.outcome] += 1
        self._answer(held.token, fate)
        if group != MODEL:
            self.plain.settled(group)
            self._push_plain(group)
            self._send_pulls()

    # --- servers -----------------------------------------------------------------------------

    def _from_server(self, message: d.Data, payload: Array | None) -> None:
        if self.member is None or getattr(message, "incarnation", 0) != self.member.incarnation:
            return
        match message:
            case d.Ack():
                self.uploads.acknowledged(message, self.now)
            case d.Block() if payload is not None:
                got = d.Got(message.incarnation, message.group, message.grant, [message.bid])
                self._out.append(s.SendData(message.server, got, None))
                self._arrived(self.downloads.take(message, payload, self.now))
            case d.Fenced(reason=reason):
                # Who leaves is no member any more when a frame of its is repeated: no news.
                if not self.requests.leaving:
                    self.fail(errors.Evicted(reason))
            case _:
                raise ProtocolError(f"{type(message).__name__} is not for a worker")

    def _arrived(self, assembly: Assembly | None) -> None:
        if assembly is None or not assembly.complete:
            return
        granted = assembly.granted
        if granted.group == PULLS:
            self.counts["pulls"] += 1
            values = s.Values(
                granted.version,
                tuple(granted.kids),
                assembly.blocks,
                assembly.parts,
                self.layout.snapshot(),
            )
            self._answer(granted.token, values)
            return
        self._link.send(c.Received(granted.group, granted.grant))
        self._cycle.arrived(granted.grant, assembly.blocks)
        self._answer_begin()

    # --- time --------------------------------------------------------------------------------

    def _tick(self) -> None:
        if self.now >= self._next_beat:
            self._next_beat = self.now + self.config.beat_s
            if self._link.peer:
                self._link.send(c.Beat(self.now))
            self._greet()
        if self.member is not None:
            self._out += self.downloads.overdue(self.member.incarnation, self.now)
        heard = self._link.heard
        if (
            self.member is not None
            and heard is not None
            and self.now - heard > self.config.broker_lost_s
        ):
            self.fail(
                errors.BrokerLost(
                    f"nothing was heard of the broker at {self.config.broker} for {self.now - heard:.1f} s"
                )
            )
            return
        self._out += self.requests.tick(
            self.now, joined=self.member is not None, heard=heard is not None
        )
