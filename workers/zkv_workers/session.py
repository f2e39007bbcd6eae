"""The session: a worker's protocol, without sockets, threads or clocks.

The user's calls, messages and the time come in; `handle` is the one method that changes anything;
frames to send and answers to calls come out (`zkv_workers.signals` has both sides). A driver for
asyncio, a blocking one and the simulated cluster all run this same class.
"""

from __future__ import annotations

from zkv import control as c
from zkv import data_messages as d
from zkv import errors
from zkv.alignment import RoundTrips
from zkv.dtypes import Array
from zkv.heartbeat import link_resend_s
from zkv.layout import Layout
from zkv.link import Link
from zkv.placement import NEAR_BYTES_PER_S
from zkv.wire import MODEL, SEEDS, open_envelope
from zkv_workers import signals as s
from zkv_workers.aside import Aside
from zkv_workers.behind import Behind
from zkv_workers.config import SessionConfig
from zkv_workers.contributions import Contributions
from zkv_workers.downloads import Downloads
from zkv_workers.incoming import Incoming
from zkv_workers.link_probe import LinkProbe
from zkv_workers.meeting import Meeting
from zkv_workers.pulls import Pulls, base_of, pull_of
from zkv_workers.requests import Requests
from zkv_workers.together import Together
from zkv_workers.told import Told
from zkv_workers.transfers import Uploads
from zkv_workers.way_back import WayBack, broker_is_new, rolled_back


class Session:
    """One life of one worker. `instance` is a number that no other process has."""

    def __init__(self, config: SessionConfig, *, instance: int, link: Link | None = None) -> None:
        self.config = config
        self.layout = Layout()
        self.broken: Exception | None = None
        self.uploads = Uploads(self.layout, config)
        self.requests = Requests(config)
        self._link = link or Link(instance, resend_s=link_resend_s(config.beat_s), rising=True)
        self.meeting = Meeting(config, self._link)
        rate = NEAR_BYTES_PER_S if config.near else 0.0
        self.told = Told(self._link, measuring=config.measures, rate=rate)
        self._probe = LinkProbe(config.measures, self.told.measured)
        here = (self.layout, self._link, self.uploads)
        self.together = Together(*here, config, lambda: self.incoming, lambda: self.made.index)
        told = (self._answer, self.told.tell)
        self.made = Contributions(*here, *told, config.prefetch, self.together)
        self.pulls = Pulls(self.layout, self._link, self.made.plain.busy)
        self.aside = Aside(self.layout, self.uploads, self.requests, self._answer)
        self.incoming = Incoming(
            self.layout, self._link, self.made, self.pulls, config, self._answer, self.refused
        )
        self.round_trips = RoundTrips()
        """Between this worker and the broker."""
        self.behind, self.back = Behind(), WayBack()
        self._barrier = 0
        self.pulse = self.meeting.pulse
        self._out: list[s.Output] = []
        self.now = 0.0

    @property
    def member(self) -> c.Welcome | None:
        """What the broker has said when it let this worker in."""
        return self.meeting.member

    @property
    def downloads(self) -> Downloads:
        """What comes down."""
        return self.incoming.downloads

    @property
    def heard(self) -> float | None:
        """When the broker was last heard."""
        return self._link.heard

    def handle(self, event: s.Input, now: float) -> list[s.Output]:
        """Take one input and return what to do, in order."""
        self.take(event, now)
        return self.turn_over(now)

    def take(self, event: s.Input, now: float) -> None:
        """Take one input, and keep what it leads to for `turn_over`."""
        self.now = now
        if self.broken is None:
            try:
                back = self.back.takes(event, self.requests, now)
                if not (back or self.behind.takes(event)):
                    self._take(event)
            except (errors.ZkvError, ValueError) as error:
                self._caller_failed(event, error)
        elif token := getattr(event, "token", 0):
            self._out.append(s.Fail(token, self.broken))

    def turn_over(self, now: float) -> list[s.Output]:
        """Return what all inputs of a turn of the loop led to; receipts go out once for all."""
        self.aside.look()
        self._out += self.incoming.receipts(now)
        self._out += [s.SendControl(c.encode_packet(packet)) for packet in self._link.outgoing(now)]
        self._out += [*self.together.ready(now), *self.uploads.ready(now)]
        self._out += self.back.outgoing(self.requests)
        out, self._out = self._out, []
        return out

    def _caller_failed(self, event: s.Input, error: Exception) -> None:
        token = getattr(event, "token", 0)
        if token:
            self.requests.close(token)
            self._out.append(s.Fail(token, error))
        else:
            self._out.append(s.Narrate("warning", str(error)))

    def _take(self, event: s.Input) -> None:
        match event:
            case s.Tick(transport, trouble):
                self.requests.trouble = trouble
                self._tick(transport)
            case s.FromBroker(frame):
                self._from_broker(frame)
            case s.FromServer(message, payload):
                self._from_server(message, payload)
            case s.FromPeer(message) if d.sender(message) < self.back.floor:
                pass
            case s.Listening() | s.FromPeer():
                self.together.take(event, self.now)
            case s.SendBlock():
                self.made.send_block(event)
            case s.Finish(token=token, batch=batch):
                self.requests.open(token, f"the fate of batch {batch}", self.now, None)
                self.incoming.left(batch, finished=True)
                self.made.finish(event)
            case s.Withdraw(batch):
                self.incoming.left(batch, finished=False)
                self.made.withdraw(batch)
            case s.Report(accounts, spent):
                self._link.send(c.Accounts(accounts, spent))
            case s.Say(message):
                self._link.send(message)
            case s.Want() | s.Forget():
                self.incoming.note(event, self.now)
            case s.AskRows() | s.PushRows() | s.ReleaseRows():
                self.incoming.about_rows(event, self.requests, self.now)
            case s.Seed() | s.EndSeeds() | s.Room():
                self.aside.take(event, self.now)
            case s.GiveUp(token):
                self.requests.close(token)
                self.aside.give_up(token)
                self.pulls.drop(token)
                self.incoming.give_up(token)
                self.made.cycle.give_up(token)
            case _:
                self._call(event)

    # --- the user's calls ----------------------------------------------------------------------

    def _call(self, event: s.Input) -> None:
        match event:
            case s.Join(token):
                self.requests.open(token, "the cluster", self.now, self.config.connect_timeout_s)
                self.meeting.hello()
            case s.Initialise(token=token):
                self.requests.open(token, "init", self.now)
                self.told.offer(event)
            case s.UsePool(token=token):
                self.requests.open(token, "the broker's word on the data", self.now)
                self.told.use_pool(event)
            case s.Begin(token, on_demand):
                self.requests.open(token, "the next batch", self.now)
                self.made.begin(token, on_demand)
                self._begun()
            case s.Await(token=token, batch=batch):
                self.requests.open(token, f"the values of batch {batch}", self.now)
                self.incoming.wait(event, self.now)
            case s.PushPlain(token=token, key=key):
                self.requests.open(token, f"the push of {key!r}", self.now)
                self.made.push_plain(event)
                self._begun()
            case s.Pull(token=token):
                self.requests.open(token, pull_of(event.keys), self.now)
                self.pulls.add(event)
                self._send_pulls()
            case s.Barrier(token):
                self._barrier += 1
                self.made.cycle.pause()
                self.requests.open(token, f"barrier {self._barrier}", self.now)
                self.told.tell(c.Barrier(token, self._barrier))
            case s.Leave(token):
                self.requests.open(token, "the broker's goodbye", self.now)
                self.requests.leaving = token
                self.told.tell(c.Leave())
            case s.Ask(token, setting, value):
                self.requests.open(token, f"the answer about {setting or 'the status'}", self.now)
                inside = self.made.inside
                asked = c.Change(token, setting, value, inside) if setting else c.Status(token)
                self._link.send(asked)
                self.behind.changes |= {token} if setting else set()
            case _:
                raise AssertionError(f"no such input: {event}")

    def _begun(self) -> None:
        if self.made.started:
            self.told.begun(self.requests.is_open)

    def _answer(self, token: int, value: object) -> None:
        if isinstance(value, s.Grant):
            self.requests.last_reason, self.requests.reason = self.requests.reason, ""
        if self.requests.close(token):
            self._out.append(s.Answer(token, value))

    def _send_pulls(self) -> None:
        """Ask for what can be read: not before my own plain pushes of the same keys are settled."""
        for token, error in self.pulls.ask(self.made.cycle.version):
            self.requests.close(token)
            self._out.append(s.Fail(token, error))

    # --- the broker --------------------------------------------------------------------------

    def _from_broker(self, frame: bytes) -> None:
        try:
            envelope = open_envelope(frame, whole=True)
        except errors.VersionMismatch as error:
            self.fail(error)
            return
        if envelope.target not in (0, self._link.instance):
            return
        change, messages = self._link.receive(c.decode_messages(envelope), self.now)
        if change is not None and change.goes_on:
            text = f"the broker at {self.config.broker} was restarted, and goes on where it was"
            self._out.append(s.Narrate("warning", text))
            self.round_trips = RoundTrips()
        elif change is not None and change.before:
            self.round_trips = RoundTrips()
            self._out += broker_is_new(self)
        for message in messages:
            self._hear(message)
            if self.broken is not None:
                return

    def begin_anew(self) -> None:
        """Forget all but the link, what is to be said, and what time it is."""
        kept = (self._out, self.now, self.pulse)
        self.__init__(self.config, instance=0, link=self._link)  # type: ignore[misc]
        self._out, self.now, self.pulse = kept
        self.meeting.pulse = self.pulse

    def fail(self, error: Exception) -> None:
        """End the session: every open and later call fails with this error."""
        if self.broken is not None:
            return
        self.broken = error
        tokens = [*self.requests.all(), *self.behind.clear()]
        self._out += [*(s.Fail(token, error) for token in tokens), s.Broken(error)]

    def _hear(self, message: c.Message) -> None:
        match message:
            case c.Welcome():
                self._welcome(message)
            case c.RollBack():
                self._out += rolled_back(self, message)
            case c.Beat(at=at, echo=echo):
                if echo is not None:
                    self.round_trips.note(echo, at, self.now)
            case c.Waiting(reason=reason):
                self.requests.reason = reason
            case c.Layout():
                self._laid_out(message)
            case c.Ready(init):
                self.aside.ready(init)
                self.back.ready(init)
                self._send_pulls()
            case c.Regrouped(kid=kid, group=group, bid=bid, index=index):
                self.layout.regroup(kid, group, bid)
                self.made.index = max(self.made.index, index)
                self.made.plain.regrouped(kid, group)
                self.made.next_plain(group)
            case c.Follow(index=index):
                self.made.index = max(self.made.index, index)
                self._link.send(self.uploads.places.follow(message))
            case c.Servers() | c.Keyring() | c.SaveState():
                self._meet(message)
            case c.Granted():
                self.together.granted(message)
                self.incoming.granted(message, self.now)
                self._begun()
            case c.Exhausted():
                self.made.exhausted()
            case c.Cancel(group=group, grant=grant):
                batch = self.made.cancel(group, grant)
                self._out += [s.CancelBatch(batch)] if batch is not None else []
                self.incoming.drop(group, grant, batch)
            case c.Together() | c.Separate():
                self.made.index = max(self.made.index, message.index)
                self.together.hear(message, self.now)
            case c.Settled(fates=fates):
                for group, batch, version, why in fates:
                    self.made.settled(group, batch, version, why, self.now)
                    if group == MODEL:
                        self.downloads.committed(version)
                self._send_pulls()
            case c.Reply(token=token, value=value, index=index):
                self.made.index = max(self.made.index, index)
                self._answer(token, value)
                self.go_on(token)
            case c.Refusal(token=token, code=code, reason=reason):
                self.refused(base_of(token), errors.from_code(code, reason))
            case c.Fatal(code=code, reason=reason):
                self.fail(errors.from_code(code, reason))
            case c.Bye():
                self._answer(self.requests.leaving, None)
                self.fail(errors.Closed("the worker has left"))
            case _:
                raise errors.ProtocolError(f"{type(message).__name__} is not for a worker")

    def _meet(self, message: c.Servers | c.Keyring | c.SaveState) -> None:
        self._out += self.meeting.told(message)
        self.incoming.servers(message)

    def _welcome(self, message: c.Welcome) -> None:
        self.made.incarnation = message.incarnation
        self.together.welcome(message, observer=self.config.observer)
        self._out += self.meeting.welcome(message, self.now)
        self._out += self._probe.begin(message, self.now)
        for token in self.requests.named("the cluster"):
            self._answer(token, self.meeting.membership)
        self.told.again(self.made.cycle, self.pulls, self.requests, self._barrier)

    def _laid_out(self, message: c.Layout) -> None:
        group = SEEDS if message.seed else MODEL
        self.layout.add(message.keys, message.blocks, group, message.tables)
        self.requests.initialised = True
        self.made.index = max(self.made.index, message.index)
        if message.seed and self.member is not None:
            name = self.made.name(SEEDS, message.init)
            self.aside.seed(self.told.wanted(message), name, message)

    def refused(self, token: int, error: errors.ZkvError) -> None:
        """A call has failed; 0: all of them."""
        if token == 0:
            self.fail(error)
            return
        self.told.refused(token)
        self.made.plain.refused(token)
        self.pulls.drop(token)
        if self.requests.close(token):
            self._out.append(s.Fail(token, error))
        self._send_pulls()
        self.go_on(token)

    def go_on(self, token: int) -> None:
        """Take what waited for the answer to this call."""
        self.told.answered(token)
        for event in self.behind.answered(token):
            self.take(event, self.now)

    # --- servers -----------------------------------------------------------------------------

    def _from_server(self, message: d.Data, payload: Array | None) -> None:
        if self.member is None or getattr(message, "incarnation", 0) != self.member.incarnation:
            return
        match message:
            case d.Ack():
                self.uploads.acknowledged(message, self.now)
            case d.Probed():
                self._out += self._probe.answered(message, self.now)
            case d.Block() | d.Rows() if payload is not None:
                if isinstance(message, d.Block):
                    self.together.from_server(message, payload)
                self.incoming.take(message, payload, self.now)
                self._begun()
            case d.Fenced(reason=reason):
                # No news for who leaves; and before anything was begun it may be let in anew.
                if self.made.started and not self.requests.leaving:
                    self.fail(errors.Evicted(reason))
            case _:
                raise errors.ProtocolError(f"{type(message).__name__} is not for a worker")

    # --- time --------------------------------------------------------------------------------

    def _tick(self, transport: str) -> None:
        self._out += self.meeting.beat(self.now, transport)
        if self.member is not None:
            self._out += self.downloads.overdue(self.member.incarnation, self.now)
        heard, joined = self._link.heard, self.member is not None
        silent_s = 0.0 if heard is None else self.now - heard
        if joined and silent_s > self.pulse.patience_s(self.config.broker_lost_s):
            self.fail(self.requests.broker_lost(silent_s))
            return
        self._probe.tick(self.now)
        self.together.tick(self.now)
        self.requests.owes(self.uploads.owing() | self.incoming.owing(), self.meeting.servers)
        self._out += self.requests.tick(self.now, joined=joined, heard=heard)
