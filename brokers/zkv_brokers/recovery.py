"""What a broker's journal says, and the router that it makes again.

A router is a pure machine, so its journal need not know what its state means: the first record is
a whole state, and each later one what was heard since, turn by turn. A router that hears the same
again is the same to the last bit: members, log, marks, samples, grants, moves, and the links with
what has not arrived. The rule that makes it right is about time: what a turn has heard is safe
before anything that the turn says is sent (`Turns.must_be_kept`). So whatever a worker or a server
was told, or got an acknowledgement for, is in the journal; what was not is sent again by whoever
has it. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec

from zkv.errors import JournalError, ProtocolError
from zkv.version import VERSION
from zkv_brokers.config import RouterConfig
from zkv_brokers.hub import Send
from zkv_brokers.recording import plain_config, plain_of
from zkv_brokers.replay import event_of
from zkv_brokers.restoring import as_restored
from zkv_brokers.router import Router
from zkv_brokers.signals import Action, Complete, Event, GiveUp, Restarted, Tick
from zkv_brokers.state import packed, unpacked

FORMAT = "zkv broker 1"
FREE = ("worker_lost_s", "server_lost_s", "server_back_s", "max_members", "max_keys")
"""Settings that may be others when a broker is started again. How many members there is room for
depends on the process's descriptors, too."""
BEGUN_FROM = ("restored", "restored_from")
"""What a run began from stays what it was, whichever snapshot a command line names by now."""
REPLAY_S = 0.2
"""When turns have taken so many seconds since the last whole state, a new one is written: to hear
them again takes as long."""
STATE_SHARE = 20
"""But not before they have taken so many times as long as a state does to write: of a large model
that takes long."""
REPLAY_BYTES = 16 * 1024 * 1024


class Turns:
    """Turns that are not in the journal yet, and what those have cost that are."""

    def __init__(self) -> None:
        self._waiting: list[tuple[float, list[tuple[Any, ...]]]] = []
        self._receipts: list[Action] = []
        self._spent_s = 0.0
        self._bytes = 0
        self._state_s = 0.0

    def add(self, events: Sequence[Event], now: float, took_s: float) -> None:
        """Note a turn: what it has heard, when, and how long it took."""
        self._waiting.append((now, [plain_of(event) for event in events]))
        self._spent_s += took_s

    def leaving(self, events: Sequence[Event], actions: Sequence[Action]) -> list[Action]:
        """Return what leaves with this turn, of what it does. Receipts wait until something else is
        said, or for the next tick: whatever leaves, the journal must be safe first."""
        sends = [*self._receipts, *(one for one in actions if isinstance(one, Send))]
        if all(one.bare for one in sends if isinstance(one, Send)) and Tick() not in events:
            self._receipts = sends
            return [one for one in actions if not isinstance(one, Send)]
        receipts, self._receipts = self._receipts, []
        return [*receipts, *actions]

    @staticmethod
    def must_be_kept(actions: Sequence[Action]) -> bool:
        """Return whether anything leaves for anybody, or for a snapshot's folder. If not,
        forgetting the turn is as if it had not been: whoever spoke has no receipt, and speaks
        again."""
        return any(isinstance(action, Send | Complete | GiveUp) for action in actions)

    def record(self) -> bytes:
        """Return a record of all turns that wait; they wait no more."""
        content = msgspec.msgpack.encode(("turns", self._waiting))
        self._waiting = []
        self._bytes += len(content)
        return content

    @property
    def is_long(self) -> bool:
        """Whether the journal should be written anew, as one state."""
        return (
            self._spent_s > max(REPLAY_S, STATE_SHARE * self._state_s) or self._bytes > REPLAY_BYTES
        )

    def later(self) -> None:
        """The journal could not be written anew: it is tried again when it has grown as much."""
        self._spent_s, self._bytes = 0.0, 0

    def begun(self, took_s: float) -> None:
        """The journal was written anew, which took so many seconds; nothing waits."""
        self._waiting = []
        self._spent_s, self._bytes, self._state_s = 0.0, 0, took_s


def state_record(router: Router, now: float) -> bytes:
    """Return the first record of a journal: a router as it is at this time."""
    state = packed(router)
    return msgspec.msgpack.encode((FORMAT, VERSION, plain_config(router.config), now, state))


def recovered(
    records: Sequence[bytes], config: RouterConfig, name: str = "the journal"
) -> tuple[Router, float]:
    """Return the router that a journal is of, and the time of its last turn.

    Raises:
        JournalError: it is of other settings or another version of zkv, or makes no sense.
    """
    try:
        router, now, config = _first(records[0], config, name)
        for record in records[1:]:
            kind, turns = msgspec.msgpack.decode(record)
            if kind != "turns":
                raise ProtocolError(f"no record of turns: {kind!r}")
            for now, events in turns:
                live(router, [event_of(event) for event in events], now)
                if router.successor is not None:
                    raise ProtocolError("it goes on behind a roll-back, which begins a journal")
        if not isinstance(router, Router):
            raise ProtocolError(f"its state is a {type(router).__name__}")
        if router.config != config:
            router.config = config
            router.hub.allow(config.max_members)
    except (JournalError, MemoryError):
        raise
    except Exception as error:
        # A state may be any objects of ours, so nobody can say what they do.
        raise JournalError(f"{name} is no journal of a broker: {error}; {_anew(name)}") from error
    return router, now


def _first(record: bytes, config: RouterConfig, name: str) -> tuple[Router, float, RouterConfig]:
    kind, version, plain, now, state = msgspec.msgpack.decode(record)
    if kind != FORMAT:
        raise ProtocolError(f"it begins with {kind!r}")
    if version != VERSION:
        raise JournalError(
            f"{name} is of zkv {version}, this is zkv {VERSION}: go on with that version, or "
            f"{_anew(name)}"
        )
    config = as_restored(replace(config, **{key: plain[key] for key in BEGUN_FROM}))
    wanted = msgspec.msgpack.decode(msgspec.msgpack.encode(plain_config(config)))
    others = [
        f"{key} was {value!r} and is {wanted.get(key)!r}"
        for key, value in plain.items()
        if key not in FREE and wanted.get(key) != value
    ]
    if others:
        raise JournalError(
            f"{name} is of a run with other settings: {'; '.join(others)}. Start the broker with "
            f"those to go on with that run, or {_anew(name)}"
        )
    return unpacked(state), now, config


def _anew(name: str) -> str:
    return f"remove {name} to begin a new run (workers and servers of the old one end)"


def live(router: Router, events: Sequence[Event], now: float) -> list[Action]:
    """Have a router take a turn again. One that has failed then fails now, as far as it came."""
    try:
        return router.turn(events, now)
    except Exception:
        return []


def goes_on(router: Router, term: int, instance: int, now: float) -> list[Action]:
    """Have a recovered router go on in this process; the numbers are higher than all before."""
    return router.turn([Restarted(term, instance)], now)
