"""What a session does when all begin anew: with a new broker, or behind a roll-back.

When the run has gone back to a snapshot, the caller has to hear of that before anything of the new
run: what it computes on is of the old one. So all of its calls, open ones and later ones, end with
`RolledBack` as soon as the new run's keys are here, until it says `GoOn`. What would only be waited
for in vain ends at once: fates ("undone"), and values of a batch that is cancelled. Part of the
session.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from zkv import control as c
from zkv.errors import BrokerLost, RolledBack
from zkv.wire import INCARNATIONS_PER_TERM
from zkv_workers import signals as s

if TYPE_CHECKING:
    from zkv_workers.requests import Requests
    from zkv_workers.session import Session

PROTOCOL = s.Tick | s.FromBroker | s.FromServer | s.FromPeer | s.Listening
"""What is no word of the user's."""
KEYS = "the snapshot that the run goes back to"
"""What calls wait for before they end."""
UNDONE = "undone: the run has gone back to an earlier version"


class WayBack:
    """The calls of a worker whose run has gone back, and which has not been told."""

    def __init__(self) -> None:
        self.told: RolledBack | None = None
        """What it is to be told; None: nothing. May be read on any thread."""
        self.floor = 0
        """Incarnations below this are of a run that has gone back to a snapshot since."""
        self._missing: set[int] = set()
        """Initialisations whose keys are not here yet."""
        self._out: list[s.Output] = []

    def begin(self, message: c.RollBack) -> None:
        """The run has gone back."""
        undone = message.undone + (0 if self.told is None else self.told.undone)
        self.told = RolledBack.of(message.version, message.name, undone, message.why)
        self.floor = message.term * INCARNATIONS_PER_TERM
        self._missing = set(message.inits)

    def ready(self, init: int) -> None:
        """The keys that were initialised together are here."""
        self._missing.discard(init)

    def takes(self, event: s.Input, requests: Requests, now: float) -> bool:
        """Take an input that must not reach the new run; return whether it was one. Calls wait for
        the keys as for anything: for so long, and with a word."""
        if self.told is None or isinstance(event, PROTOCOL):
            return False
        match event:
            case s.GoOn(told):
                self.told = None if told is self.told else self.told
            case s.GiveUp() | s.Say():
                # What is said is of files: the broker knows by their numbers which run they are of.
                return False
            case s.Finish(token=token) | s.PushPlain(token=token):
                self._out.append(s.Answer(token, s.Fate(None, UNDONE)))
            case s.Await(token=token):
                self._out.append(s.Answer(token, None))
            case s.AskRows(token=token, batch=batch) if batch:
                self._out.append(s.Answer(token, None))
            case _ if token := getattr(event, "token", 0):
                requests.open(token, KEYS, now)
        return True

    def outgoing(self, requests: Requests) -> list[s.Output]:
        """Return the ends of calls that are due."""
        out, self._out = self._out, []
        if self.told is not None and not self._missing:
            for token in requests.named(KEYS):
                requests.close(token)
                out.append(s.Fail(token, self.told))
        return out


def broker_is_new(session: Session) -> list[s.Output]:
    """The broker is another one, which knows nothing: join it, if nothing was begun. Return what to
    say."""
    broker = f"the broker at {session.config.broker}"
    if session.made.started:
        text = "was restarted and its log is lost, as it has no journal of this run"
        session.fail(BrokerLost(f"{broker} {text}; stop all and start the run again"))
        return []
    for token in [*session.made.restart(), *session.aside.restart()]:
        session.refused(token, BrokerLost(f"{broker} is a new one; push again"))
    session.incoming.clear()
    session.layout.clear()
    session.meeting.member, session.requests.initialised = None, False
    session.meeting.hello()
    session.told.inside = False
    for token in list(session.behind.changes):
        session.go_on(token)
    return [s.Narrate("warning", f"{broker} is a new one; joining again")]


def rolled_back(session: Session, message: c.RollBack) -> list[s.Output]:
    """The run goes back to a snapshot: nothing that is here is of it, but who is linked to whom.
    Return what that leads to at once."""
    made, requests, uploads, downloads = (
        session.made,
        session.requests,
        session.uploads,
        session.downloads,
    )
    out: list[s.Output] = list(session.together.companions.meet({}))
    if made.cycle.current is not None:
        out.append(s.CancelBatch(made.cycle.current[0]))
    fates = [*requests.named("the fate of"), *requests.named("the push of")]
    values = [*requests.named("the values of"), *requests.named("the rows of a table in")]
    out += [s.Answer(token, s.Fate(None, UNDONE)) for token in fates]
    out += [s.Answer(token, None) for token in values]
    calls = {*requests.all(), *session.behind.clear()} - {*fates, *values}
    pool, back, answered = session.told.pool, session.back, session.pulls.answered
    session.begin_anew()
    session.back = back
    back.begin(message)
    for token in sorted(calls):
        session.requests.open(token, KEYS, session.now)
    # Figures are of this worker, and not of the run.
    session.made.counts, session.made.staleness = made.counts, made.staleness
    session.made.counts["undone"] += len(fates)
    session.pulls.answered, session.told.pool = answered, pool
    session.uploads.empty, session.uploads.bytes_sent = uploads.empty, uploads.bytes_sent
    session.downloads.bytes_received = downloads.bytes_received
    session.downloads.model_s = downloads.model_s
    session.meeting.went_back(message.term)
    text = f"the run goes back to version {message.version} of snapshot {message.name}"
    out.append(s.Narrate("warning", f"{text}: {message.why}"))
    return out
