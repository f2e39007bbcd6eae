"""A server without its sockets: the link to the broker, the shard behind it, and the waiting for
both.

Frames and the time come in, frames and words come out; the process around it (`server`) and the
simulated cluster run this same class.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass

from zkv import control as c
from zkv.alignment import RoundTrips
from zkv.data_messages import Data, Fetch, Greet, Part, Probe, Probed, sender
from zkv.dtypes import Array
from zkv.errors import (
    BrokerLost,
    ClusterNotReady,
    ProtocolError,
    ServerLost,
    VersionMismatch,
    ZkvError,
    doctor_hint,
    from_code,
)
from zkv.heartbeat import BEAT_S, Pulse, link_resend_s
from zkv.link import Link
from zkv.spans import Spans
from zkv.wire import INCARNATIONS_PER_TERM, STRANGERS, open_envelope
from zkv_brokers.grants import ToWorker
from zkv_brokers.memory import Memory
from zkv_brokers.shard import Action as ShardAction
from zkv_brokers.shard import (
    Event,
    FromBroker,
    FromWorker,
    Prepare,
    Reset,
    Shard,
    ToBroker,
    ToServer,
)
from zkv_brokers.shard_events import Load, Loaded, Write, Wrote

TEXT_MAX = 4000
"""Of a reason that is sent."""
DECODING_EVERY_S = 1.0
"""How often the broker is told what updates and their decoding have cost."""


@dataclass(frozen=True, slots=True)
class NodeConfig:
    """Who this server is and how patient it is. Times in seconds, sizes in bytes."""

    broker: str
    name: str
    address: str
    host: str = "?"
    pid: int = 0
    budget_bytes: int = 0
    window_bytes: int = 64 * 1024 * 1024
    priority: bool = True
    """Send first what the next forward pass needs first; else as it was granted."""
    connect_timeout_s: float = 60.0
    narrate_after_s: float = 2.0
    narrate_every_s: float = 5.0
    broker_lost_s: float = 10.0
    beat_s: float = BEAT_S
    """How often it beats until the broker says how often; a traced one is no slower later."""
    asks: bool = False
    """Whether its beats ask what the broker's clock says."""
    joins: bool = False
    """Whether it is one more, where all servers that were asked for are here."""


@dataclass(frozen=True, slots=True)
class SendControl:
    """Send this frame to the broker."""

    frame: bytes


@dataclass(frozen=True, slots=True)
class Note:
    """Tell the operator; `level` is a logging level's name."""

    level: str
    text: str


@dataclass(frozen=True, slots=True)
class Failed:
    """The server cannot go on."""

    error: ZkvError


@dataclass(frozen=True, slots=True)
class Drained:
    """All that this server held is elsewhere, and the broker knows that it goes: it may end."""


@dataclass(frozen=True, slots=True)
class Keyed:
    """The broker has said whose keys are whose."""

    ring: c.Keyring


Sent = SendControl | ToWorker | ToServer
Action = Sent | Keyed | Prepare | Write | Load | Note | Failed | Drained


class Node:
    """One life of one server. `instance` is a number that no other process has.

    `clock` (seconds) tells how long decoding takes, and `spans` keeps what is done when. Only
    figures come of them, so a replay does without.
    """

    def __init__(
        self,
        config: NodeConfig,
        *,
        instance: int,
        now: float,
        clock: Callable[[], float] = lambda: 0.0,
        spans: Spans | None = None,
        memory: Memory | None = None,
    ) -> None:
        self.config = config
        self.shard = Shard(
            window_bytes=config.window_bytes,
            priority=config.priority,
            clock=clock,
            spans=spans,
            memory=memory,
        )
        self.round_trips = RoundTrips()
        """Between this server and the broker."""
        self.welcome: c.ServerWelcome | None = None
        self.pulse = Pulse(config.beat_s, traced=config.asks)
        self.failed: ZkvError | None = None
        self.trouble = ""
        """Why the broker cannot be reached, as far as its driver knows."""
        self._link = Link(instance, resend_s=link_resend_s(config.beat_s), rising=True)
        self._floor = 0
        """Incarnations below this are of a run that has gone back to a snapshot since."""
        self._began = now
        self._next_decoding = now
        self._next_word = now + config.narrate_after_s
        self._out: list[Action] = []
        self._hello()

    def broker_says(self, frame: bytes, now: float) -> list[Action]:
        """Take a control frame in.

        Raises:
            ProtocolError: it is no packet.
        """
        try:
            envelope = open_envelope(frame, whole=True)
        except VersionMismatch as error:
            self._fail(error)
            return self._flush(now)
        if envelope.target in (0, self._link.instance):
            change, messages = self._link.receive(c.decode_messages(envelope), now)
            if change is not None and change.goes_on:
                self._broker_returned()
            elif change is not None and change.before:
                self._broker_changed(now)
            for message in messages:
                self._hear(message, now)
        return self._flush(now)

    def worker_says(self, message: Data, payload: Array | None, now: float) -> list[Action]:
        """Take a data message in; `turn_over` then says what all of a turn led to.

        Raises:
            ProtocolError: it is not for servers.
        """
        if isinstance(message, Probe):
            # Of whom the log does not speak yet, too: it changes nothing.
            index = 0 if self.welcome is None else self.welcome.index
            probed = Probed(index, message.incarnation, message.number)
            return [ToWorker(message.incarnation, probed, None)]
        if isinstance(message, Greet) and message.incarnation >= STRANGERS:
            # It has a route now, and never becomes a member that a shard would have to know.
            return []
        if not isinstance(message, Fetch | Part) and sender(message) < self._floor:
            return []
        self._carry(self.shard.take(FromWorker(message, payload), now))
        out, self._out = self._out, []
        return out

    def disk_says(self, event: Wrote | Loaded, now: float) -> list[Action]:
        """What was to be written or read is, or cannot be."""
        self._feed(event, now)
        return self._flush(now)

    def turn_over(self, now: float) -> list[Action]:
        """All data messages of a turn are in: receipts and reports go out."""
        self._tried(lambda: self.shard.turn_over(now))
        return self._flush(now)

    def tick(self, now: float) -> list[Action]:
        """Time has passed."""
        if self.pulse.due(now) and self._link.peer:
            self._link.send(c.Beat(now, ask=self.config.asks))
            self._tell_decoding(now)
            self._tell_traffic()
        self._carry(self.shard.copies.requests(now))
        if self.welcome is None:
            self._wait_for_broker(now)
        elif self._link.heard is not None and now - self._link.heard > self.pulse.patience_s(
            self.config.broker_lost_s
        ):
            silent = now - self._link.heard
            self._fail(
                BrokerLost(
                    f"nothing was heard of the broker at {self.config.broker} for {silent:.1f} s"
                    + (f": {self.trouble}" if self.trouble else "")
                    + f"; {doctor_hint(self.config.broker)}"
                )
            )
        return self._flush(now)

    def _tell_decoding(self, now: float) -> None:
        """Tell what updates have cost, from time to time, if there were any."""
        spent, commits = self.shard.store.decode_s, self.shard.commits
        if now >= self._next_decoding and (spent or commits.updates):
            self._next_decoding = now + DECODING_EVERY_S
            by_cost = sorted(self.shard.layout.spread(spent).items(), key=lambda one: -one[1])
            first = by_cost[: c.KEYS_TOLD_MAX]
            rows = self.shard.tables.held()
            self._link.send(c.Decoding(first, commits.updates, commits.update_s, rows))

    def _tell_traffic(self) -> None:
        """Tell what blocks have carried, of those where that has changed."""
        if news := self.shard.traffic.news():
            self._link.send(c.Traffic(news))

    def stop(self, why: str, now: float) -> list[Action]:
        """Say goodbye."""
        if self.welcome is not None:
            self._link.send(c.Bye(why))
        return self._flush(now)

    def _hello(self) -> None:
        config = self.config
        self._link.send(
            c.ServerHello(
                config.name,
                config.address,
                config.budget_bytes,
                config.host,
                config.pid,
                self.shard.started,
                config.joins,
            )
        )

    def _broker_changed(self, now: float) -> None:
        text = f"the broker at {self.config.broker} is a new one; announcing this server again"
        self._out.append(Note("warning", text))
        self.round_trips = RoundTrips()
        if not self.shard.started:
            self._feed(Reset(), now)
        self._hello()

    def _broker_returned(self) -> None:
        text = f"the broker at {self.config.broker} was restarted, and goes on where it was"
        self._out.append(Note("warning", text))
        self.round_trips = RoundTrips()

    def _go_back(self, message: c.RollBack, now: float) -> None:
        """All that is here is of a run that begins again; so is what comes late of it."""
        text = f"going back to version {message.version} of snapshot {message.name}"
        self._out.append(Note("warning", f"{text}, {message.undone} updates: {message.why}"))
        self.welcome, self._floor = None, message.term * INCARNATIONS_PER_TERM
        self._began, self._next_word = now, now + self.config.narrate_after_s
        self._feed(Reset(), now)
        self._link.send(c.WentBack(message.term))

    def _hear(self, message: c.Message, now: float) -> None:
        match message:
            case c.Fatal(code=code, reason=reason) | c.Refusal(code=code, reason=reason):
                self._fail(from_code(code, reason))
                return
            case c.Keyring():
                self._out.append(Keyed(message))
                return
            case c.RollBack():
                self._go_back(message, now)
                return
            case c.Bye() if self.shard.copies.left:
                self._out.append(Drained())
            case c.Bye(reason=reason):
                told = f"the broker at {self.config.broker} goes on without this server: {reason}"
                self._fail(ServerLost(f"{told}; start it anew"))
                return
            case c.Beat(at=at, echo=echo) if echo is not None:
                self.round_trips.note(echo, at, now)
            case c.ServerWelcome(index=index, servers=servers):
                self.welcome = message
                self.pulse.told(message.beat_s, now)
                self._link.resend_after(link_resend_s(message.beat_s))
                text = f"this is server {index + 1} of {servers}, at {self.config.address}"
                self._out.append(Note("info", text))
        self._feed(FromBroker(message), now)

    def _feed(self, event: Event, now: float) -> None:
        self._tried(lambda: self.shard.handle(event, now))

    def _tried(self, does: Callable[[], list[ShardAction]]) -> None:
        """Carry out what the shard wants. An entry that it has not applied to its end cannot be
        applied again, and one that is left out makes it another model: it must not go on."""
        try:
            self._carry(does())
        except ProtocolError:
            raise
        except Exception as error:
            why = f"it cannot go on: {type(error).__name__}: {error}"[:TEXT_MAX]
            self._link.send(c.Trouble(why))
            self._out.append(Note("error", traceback.format_exc()))
            self._fail(ServerLost(f"this server is lost: {why}"))

    def _carry(self, actions: list[ShardAction]) -> None:
        for action in actions:
            if isinstance(action, ToBroker):
                self._link.send(action.message)
            else:
                self._out.append(action)

    def _wait_for_broker(self, now: float) -> None:
        config = self.config
        waited = now - self._began
        text = f"waiting for broker: nothing has answered at {config.broker} for {waited:.1f} s"
        if self.trouble:
            text += f": {self.trouble}"
        if self._link.heard is not None:
            text = f"the broker at {config.broker} has not let this server in for {waited:.1f} s"
        if waited > config.connect_timeout_s:
            ask = f"is it running, and is this the broker's address? {doctor_hint(config.broker)}"
            self._fail(ClusterNotReady(f"{text}; {ask}"))
        elif now >= self._next_word:
            self._next_word = now + config.narrate_every_s
            self._out.append(Note("warning", text))

    def _fail(self, error: ZkvError) -> None:
        if self.failed is None:
            self.failed = error
            self._out.append(Failed(error))

    def _flush(self, now: float) -> list[Action]:
        self._out += [SendControl(c.encode_packet(packet)) for packet in self._link.outgoing(now)]
        out, self._out = self._out, []
        return out
