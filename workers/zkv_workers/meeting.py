"""Who a worker is to the cluster, and where it finds the servers. Part of the session."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import structs

from zkv import control as c
from zkv import data_messages as d
from zkv.heartbeat import Pulse, link_resend_s
from zkv.link import Link
from zkv_workers import signals as s
from zkv_workers.config import SessionConfig


class Meeting:
    """What is said when a worker joins, and to servers that it meets."""

    def __init__(self, config: SessionConfig, link: Link) -> None:
        self._config = config
        self._link = link
        self.pulse = Pulse(config.beat_s, traced=bool(config.trace))
        self.member: c.Welcome | None = None
        """What the broker has said; None: it has not let this worker in."""

    def hello(self) -> None:
        """Ask to be let in."""
        me = self._config
        self._link.send(c.WorkerHello(me.name, me.rank, me.world, me.observer, me.host, me.pid))

    def went_back(self, term: int) -> None:
        """Say that what comes from here on is of the run that begins again under this term."""
        self._link.send(c.WentBack(term))

    def welcome(self, message: c.Welcome, now: float) -> list[s.Output]:
        """The broker lets this worker in, and says how often it beats: greet all servers."""
        self.member = message
        self.pulse.told(message.beat_s, now)
        self._link.resend_after(link_resend_s(message.beat_s))
        return [s.Connect(_addresses(message.servers), message.data_address), *self.greet()]

    def told(self, message: c.Servers | c.Keyring | c.SaveState) -> list[s.Output]:
        """Servers have come or gone: greet those that are here. Or keys are known, or a snapshot is
        taken."""
        if isinstance(message, c.Keyring):
            return [s.Keyed(message)]
        if self.member is None:
            return []
        if isinstance(message, c.SaveState):
            return [s.SaveState(message)]
        self.member = structs.replace(self.member, servers=message.servers)
        data_address = self.member.data_address
        return [s.Connect(_addresses(message.servers), data_address, False), *self.greet()]

    def beat(self, now: float, transport: str) -> list[s.Output]:
        """Say, if it is time, that this worker is alive and how its payloads travel; and greet."""
        if not self.pulse.due(now):
            return []
        if self._link.peer:
            self._link.send(c.Beat(now, None, bool(self._config.trace), transport))
        return self.greet()

    def greet(self) -> list[s.Output]:
        """Return what tells servers of the route to this worker."""
        if self.member is None:
            return []
        greet = d.Greet(self.member.incarnation, self.member.term, self._config.near)
        return [s.SendData(at.index, greet, None) for at in self.member.servers]

    @property
    def servers(self) -> Sequence[c.ServerAt]:
        """The servers that there are, as far as this worker was told."""
        return () if self.member is None else self.member.servers

    @property
    def membership(self) -> s.Membership:
        """The answer to `Join`."""
        assert self.member is not None
        me = self.member
        return s.Membership(me.number, me.incarnation, me.world, me.policy)


def _addresses(servers: list[c.ServerAt]) -> tuple[tuple[int, str], ...]:
    return tuple((at.index, at.address) for at in servers)
