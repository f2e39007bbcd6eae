"""What comes out of a session, for a driver to carry out; what goes in is in `signals`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from zkv import control as c
from zkv import data_messages as d
from zkv.control import Keyring
from zkv.dtypes import Array


@dataclass(frozen=True, slots=True)
class SendControl:
    """Send this frame to the broker's control port."""

    frame: bytes


@dataclass(frozen=True, slots=True)
class SendData:
    """Send this to a server's data port (or to it through the broker)."""

    server: int
    message: d.Data
    payload: Array | None


@dataclass(frozen=True, slots=True)
class Keyed:
    """The broker has said whose keys are whose."""

    ring: Keyring


@dataclass(frozen=True, slots=True)
class Connect:
    """Where servers listen; `broker_data` is for route `broker`. Not `anew`: keep connections."""

    servers: tuple[tuple[int, str], ...]
    broker_data: str
    anew: bool = True


@dataclass(frozen=True, slots=True)
class Listen:
    """Let other workers reach this one, and say where (`Listening`)."""


@dataclass(frozen=True, slots=True)
class SendPeer:
    """Send this to another worker, which listens at this address."""

    incarnation: int
    address: str
    message: d.Data
    payload: Array | None


@dataclass(frozen=True, slots=True)
class DropPeer:
    """Nothing more goes to this worker."""

    incarnation: int


@dataclass(frozen=True, slots=True)
class Answer:
    """The call with this token has this result."""

    token: int
    value: Any


@dataclass(frozen=True, slots=True)
class Fail:
    """The call with this token ends with this error."""

    token: int
    error: Exception


@dataclass(frozen=True, slots=True)
class CancelBatch:
    """The batch that is being computed no longer counts: its next push raises."""

    batch: int


@dataclass(frozen=True, slots=True)
class SaveState:
    """The broker takes a snapshot: write down what batches were begun with, and `Say` what came of
    it."""

    message: c.SaveState


@dataclass(frozen=True, slots=True)
class Narrate:
    """Say this to the user; `level` is a logging level's name."""

    level: str
    text: str


@dataclass(frozen=True, slots=True)
class Broken:
    """The session is over: every later call fails with this error."""

    error: Exception


Output = (
    SendControl
    | SendData
    | Keyed
    | Connect
    | Listen
    | SendPeer
    | DropPeer
    | Answer
    | Fail
    | CancelBatch
    | SaveState
    | Narrate
    | Broken
)
