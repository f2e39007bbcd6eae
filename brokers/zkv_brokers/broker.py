"""The broker process: sockets around the `Router`, and the relay of route `broker`.

Decides nothing. Control comes in over one ROUTER that workers and servers dial; with route `broker`
a second ROUTER takes the workers' data, and one DEALER for each server passes it on.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import zmq

from zkv.alignment import Alignment
from zkv.entries import Commit, Entry, Grant
from zkv.errors import BadSnapshot, ConfigError, JournalError, ZkvError
from zkv.heartbeat import tick_s
from zkv.placements import placement
from zkv.roles import ROLES
from zkv.snapshot import encode
from zkv.spans import TURNS, Spans
from zkv.topology import topology
from zkv_brokers import router as r
from zkv_brokers.broker_config import BrokerConfig as BrokerConfig
from zkv_brokers.disk import Disk
from zkv_brokers.hub import Strike
from zkv_brokers.lasting import Lasting
from zkv_brokers.recording import Recorder
from zkv_brokers.relay import Relay
from zkv_brokers.signals import Ask, Complete, Find, GiveUp, Written
from zkv_net import about, descriptors, snapshot_folder, tracing
from zkv_net import loop as net
from zkv_net.curve import Curve
from zkv_net.keys import KeyFolder
from zkv_net.listening import Listening
from zkv_net.safety import Safety, choose
from zkv_net.sockets import (
    bind,
    join_address,
    new_socket,
    split_address,
)

log = logging.getLogger("zkv.broker")
LINGER_MS = 500
KEYS_EVERY_S = 0.5
"""How often the keys folder is looked at."""
LAST_WORD_S = 0.3
"""What a peer whose key was revoked has to hear so, before it is cut off."""
LAST_SNAPSHOT_S = 20.0
"""How long a broker that was told to end waits for its last snapshot."""


class Broker:
    """One broker: `start` binds, `serve` runs until `stop`, `close` ends it."""

    def __init__(self, config: BrokerConfig) -> None:
        self.config = config
        self.address = ""
        self.data_address = ""
        self._lasting: Lasting | None = None
        self._context: zmq.Context[Any] = zmq.Context(config.io_threads)
        self._control: Listening | None = None
        self._relay: Relay | None = None
        self._recorder: Recorder | None = None
        self._safety = Safety()
        self._folder = KeyFolder(Path(config.keys) if config.keys else None)
        self._keys_due = 0.0
        self._keys_seen: Any = object()
        self._keys_now: r.Keys | None = None
        """Who is let in, if the router has not heard it."""
        self._spans = tracing.recorder(config.trace)
        self._disk = Disk(self._disk_says)
        self._received_now: list[r.Event] = []
        self._versions = about.versions()
        self._descriptors = descriptors.Watch(log)
        self._stops_at: float | None = None
        """When it ends though a snapshot is on its way."""
        self._stopped = asyncio.Event()
        self._failed: ZkvError | None = None

    @property
    def router(self) -> r.Router | None:
        """What decides; None before the start."""
        return None if self._lasting is None else self._lasting.router

    def start(self) -> None:
        """Bind both ports.

        Raises:
            ConfigError: an address is in use, not of this machine, or open without `insecure`; or
                the placement pins keys to a server that there is not.
            BadSnapshot: there is no snapshot to begin from, or it is not whole.
            JournalError: the journal cannot be used, or is of another run.
            ValueError: a codec, a rule or a placement is none.
            OSError: the recording cannot be written.
        """
        control = new_socket(self._context, zmq.ROUTER, data=False)
        size = self.config.socket_bytes
        data = new_socket(self._context, zmq.ROUTER, data=True, buffer_bytes=size)
        try:
            self._safety = self._choose()
            # Before anybody can dial: who is refused is told that it has to be let in.
            self._read_keys()
            self._bind(control, data)
            self._decide()
        except BaseException:
            # A context with an open socket would be waited for without end when it is collected.
            control.close(linger=0)
            data.close(linger=0)
            self._safety.close()
            self._context.term()
            if self._lasting is not None:
                self._lasting.close(done=False)
            raise
        where = "the broker's control port"
        self._control = Listening(
            *(control, self._received, self._safety, ROLES, where),
            turn_over=self._turn_over,
            limits=self.config.limits,
        )
        relay = (self._context, data, self._link_changed, size, self._safety)
        self._relay = Relay(*relay, limits=self.config.limits)
        assert self._lasting is not None
        self._do(self._lasting.first)
        self._look_at_keys()

    def _choose(self) -> Safety:
        """Keys, if anybody but this machine can reach a port."""
        config = self.config
        binds = [config.bind, *([config.data_bind] if config.data_bind else [])]
        return choose(
            self._context, binds=binds, insecure=config.insecure, keys=config.keys, is_broker=True
        )

    def _bind(self, control: zmq.Socket[bytes], data: zmq.Socket[bytes]) -> None:
        config = self.config
        for socket in (control, data):
            self._safety.listen(socket)
        bound = bind(control, config.bind, insecure=config.insecure)
        data_bound = bind(data, self._data_bind(bound), insecure=config.insecure)
        self.address = announced(bound, config.advertise)
        self.data_address = announced(data_bound, config.advertise)

    def _decide(self) -> None:
        """Make what decides, or take it up from its journal, and its recorder."""
        config = self.config
        placement(topology(config.topology).placement(config.placement)).check(config.servers)
        router_config = config.router(self.address, self.data_address, self._safety.key)
        self._lasting = Lasting(router_config, config.journal, self._restored)
        if config.restore and self._lasting.router.hub.lives > 1:
            log.warning(
                "the run goes on from its journal, %s; it does not begin again from %s (--restore)",
                *(config.journal, config.restore),
            )
        if config.record is not None:
            self._recorder = Recorder(config.record)
            self._recorder.broker(self._lasting.router.config, *self._lasting.origin())

    def _restored(self) -> tuple[str, str]:
        """Return the folder and the manifest of the snapshot that the run begins from; "": none."""
        config = self.config
        if not config.restore:
            return "", ""
        url, manifest = snapshot_folder.chosen(config.restore, whole=config.restore_whole)
        return url, encode(manifest).decode()

    def _data_bind(self, bound: str) -> str:
        if self.config.data_bind is not None:
            return self.config.data_bind
        host, _, port = self.config.bind.rpartition(":")
        return f"{host}:{int(port) + 1 if port.isdecimal() and int(port) else 0}"

    def _received(self, frames: list[zmq.Frame]) -> None:
        if len(frames) == 2:
            key = self._safety.sender(frames[1])
            self._received_now.append(r.Received(frames[0].bytes, frames[1].bytes, key))
        else:
            assert self._control is not None
            self._control.strike(frames[0].bytes, f"a control message of {len(frames)} frames")

    def _link_changed(self, index: int, up: bool) -> None:
        self._handle([r.ServerLink(index, up)])

    def _look_at_keys(self) -> None:
        """Hear who is let in, if that has changed; cut off who is not any more."""
        now = time.monotonic()
        if now < self._keys_due:
            return
        self._keys_due = now + KEYS_EVERY_S
        self._read_keys()
        if self._keys_now is None:
            return
        event, self._keys_now = self._keys_now, None
        self._handle([event])
        # Later: they are still to hear why.
        asyncio.get_running_loop().call_later(LAST_WORD_S, self._safety.cut)

    def _read_keys(self) -> None:
        """Let in who is in the keys folder now, and no others."""
        if not isinstance(self._safety, Curve):
            return
        try:
            changed = self._folder.changed()
            if changed == self._keys_seen:
                return
            holders, wrong = self._folder.scan()
        except OSError as error:
            # No descriptor left, say: that must not put everybody out.
            log.error("cannot read which keys are let in; those that were stay: %s", error)
            return
        self._keys_seen = changed
        for text in wrong:
            log.warning("%s", text)
        self._safety.let_in({one.key: one.roles for one in holders})
        self._keys_now = r.Keys(tuple(holders))

    def _turn_over(self) -> None:
        """What came in during one turn of the loop is decided at once, and travels together."""
        events, self._received_now = self._received_now, []
        if events:
            self._handle(events)

    def _handle(self, events: list[r.Event]) -> None:
        assert self._lasting is not None
        if self._failed is not None:
            return
        now = self._lasting.now()
        if self._recorder is not None:
            self._recorder.turn(events, now)
        self._lasting.router.about = self._about()
        try:
            actions = self._lasting.turn(events, now)
        except (JournalError, BadSnapshot) as error:
            # Nothing that this turn has decided may be known to anybody.
            self._failed = error
            self.stop("as it cannot go on")
            return
        if self._spans is not None:
            turn_spans(self._spans, now, self._lasting.router.decided)
        self._do(actions)

    def _do(self, actions: Sequence[r.Action]) -> None:
        assert self._control is not None
        assert self._relay is not None
        for action in actions:
            match action:
                case r.Send(route, frame):
                    self._control.send([route, frame])
                case r.Note(level, text):
                    log.log(logging.getLevelName(level.upper()), "%s", text)
                case Strike(route, text):
                    self._control.strike(route, text)
                case r.ServersChanged(addresses, keys):
                    for address, key in keys:
                        self._safety.place(address, key)
                    self._relay.connect(dict(addresses))
                case Complete():
                    self._disk.complete(action)
                case GiveUp():
                    self._disk.give_up(action)
                case Find():
                    self._disk.find(action)

    def _disk_says(self, event: Written | r.Found) -> None:
        self._handle([event])
        self._end_if_saved()

    def _about(self) -> dict[str, Any]:
        """Return what this process says of itself to who asks for the status."""
        return {
            "versions": self._versions,
            "time_s": time.time(),
            "descriptors": self._descriptors.figures,
            "data_address": self.data_address,
        }

    async def serve(self) -> None:
        """Serve until `stop` is called.

        Raises:
            JournalError: the journal could not be written, or a later broker has taken over.
        """
        pause_s = tick_s(self.config.beat_s)
        while not self._stopped.is_set():
            self._handle([r.Tick()])
            self._descriptors.look(time.monotonic())
            self._look_at_keys()
            self._safety.tick()
            self._end_if_saved()
            try:
                await asyncio.wait_for(self._stopped.wait(), pause_s)
            except TimeoutError:
                continue
        if self._failed is not None:
            raise self._failed

    def stop(self, why: str = "") -> None:
        """End `serve`, with a last snapshot if there is a folder for it, in bounded time."""
        log.info("stopping %s", why)
        self._give_up_waiting()
        cannot = self.router is None or self._failed is not None or not self.router.snapshots.may
        if self._stops_at is not None or cannot:
            # A router whose journal has failed may not decide anything more.
            self._stopped.set()
            return
        self._stops_at = time.monotonic() + LAST_SNAPSHOT_S
        self._handle([Ask()])

    def _end_if_saved(self) -> None:
        if self._stops_at is None or self.router is None:
            return
        late = time.monotonic() > self._stops_at
        if late:
            log.error("the last snapshot was not complete within %g s", LAST_SNAPSHOT_S)
        self._give_up_waiting()
        if late or not self.router.snapshots.busy or self.router.failed is not None:
            self._stopped.set()

    def _give_up_waiting(self) -> None:
        """No server will come in the place of a lost one: those who wait for it are told so."""
        if self.router is not None and self.router.rolling.waiting:
            self._handle([Ask()])

    def close(self) -> None:
        """Close all sockets in bounded time, and end the recording and the trace."""
        if self._spans is not None:
            itself, about = Alignment(0.0, 0.0, 0), {"name": self.address, "host": net.host_name()}
            tracing.write(self.config.trace, "broker", 0, self._spans, itself, about)
        if self._recorder is not None and self.router is not None:
            self._recorder.close(self.router.log.digest)
        if self._lasting is not None:
            self._lasting.close(done=self._failed is None)
        if self._control is not None:
            self._control.close(LINGER_MS)
        if self._relay is not None:
            self._relay.close()
        self._safety.close()
        self._disk.close()
        self._context.destroy(linger=LINGER_MS)


def turn_spans(spans: Spans, began_s: float, decided: Sequence[Entry]) -> None:
    """Record a turn that has decided something, and what; seconds of the spans' clock."""
    if not decided:
        return
    now = spans.clock()
    spans.span(TURNS, "turn", began_s, now, entries=len(decided))
    for entry in decided:
        match entry:
            case Grant(incarnation=incarnation, version=version, group=group):
                about = {"incarnation": incarnation, "version": version, "group": group}
                spans.instant(TURNS, "grant", now, **about)
            case Commit(version=version, group=group, counted=counted):
                about = {"version": version, "group": group, "of": len(counted)}
                spans.instant(TURNS, "commit", now, **about)


def announced(bound: str, chosen: str | None) -> str:
    """Return the address for others: the chosen host, else what was bound; never a wildcard.

    For a wildcard it is the interface that leads away from this machine, found with an address that
    belongs to nobody (TEST-NET-1 and the documentation prefix, RFC 5737 and 3849); nothing is sent.

    Raises:
        ConfigError: a wildcard, and no interface leads away from this machine.
    """
    if chosen:
        return net.advertised(bound, bound, chosen)
    host, port = split_address(bound)
    if host not in ("0.0.0.0", "::", "*"):
        return bound
    try:
        toward = "tcp://[2001:db8::1]:9" if host == "::" else "tcp://192.0.2.1:9"
        return join_address(net.address_toward(toward), port)
    except ConfigError as error:
        raise ConfigError(
            f"{bound} is a wildcard, and this machine has no default route that tells which "
            f"address "
            "others reach: name it with --advertise, or bind to it"
        ) from error


async def serve(config: BrokerConfig, ready: Any = None) -> None:
    """Run a broker until SIGINT or SIGTERM; `ready(broker)` is called once it is bound."""
    broker = Broker(config)
    broker.start()
    net.on_stop_signals(broker.stop)
    if ready is not None:
        ready(broker)
    try:
        await broker.serve()
    finally:
        broker.close()
