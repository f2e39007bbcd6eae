"""Every exception that zkv raises on purpose.

::

    ZkvError
    ├── ProtocolError         a peer sent bytes that are no message of ours
    ├── VersionMismatch       a peer speaks another protocol version
    ├── Refused               a request was understood and turned down
    │   ├── UnknownKey        the key was never initialised
    │   ├── KeyMismatch       shape, dtype or key set differ from what was initialised
    │   ├── PushRefused       a push was voided by a guard (NaN, Inf)
    │   ├── NameInUse         a live process already has this name
    │   └── NotAuthorised     a key is not known, was revoked, or its role is another one
    ├── RolledBack            the run has gone back to a snapshot; go on from there
    ├── Cancelled             the batch no longer counts; `worker.batch()` swallows it
    ├── Withdrawn             the block was left by an exception; nothing of it counts
    ├── StaleValues           a gradient was computed on values of an earlier batch
    ├── Lost                  somebody that is needed is gone
    │   ├── BrokerLost  ServerLost  WorkersLost  Evicted
    ├── JournalError          a broker's journal cannot be written, or not be gone on from
    ├── WaitTimeout           a bounded wait ended (also a TimeoutError)
    │   └── ClusterNotReady   the cluster did not come up within --connect-timeout
    ├── Closed                the worker was closed or has left
    ├── BadSnapshot           a snapshot is not whole, or cannot be used here (also a ValueError)
    └── ConfigError           one or more mistakes in the configuration (also a ValueError)

`ValueError` and `TypeError` are left for a caller's mistakes that involve nobody else. `code`
travels in refusals, so that the caller gets the same class that the broker or server meant.
"""

from __future__ import annotations


class ZkvError(Exception):
    """Base of all exceptions of zkv."""


class ProtocolError(ZkvError):
    """A peer sent something that is not a message of this protocol."""


class VersionMismatch(ProtocolError):
    """A peer speaks another protocol version; the text has both numbers."""


class Refused(ZkvError):
    """The broker or a server understood a request and turned it down."""


class UnknownKey(Refused, KeyError):
    """The key was never initialised."""

    def __str__(self) -> str:
        # KeyError would show the repr of the text, quotes and all.
        return str(self.args[0]) if self.args else ""


class KeyMismatch(Refused, ValueError):
    """Shape, dtype or key set differ from what was initialised; both are named."""


class PushRefused(Refused, ValueError):
    """A guard voided this contribution; worker, key and reason are named."""


class NameInUse(Refused):
    """A live worker already has this name."""


class NotAuthorised(Refused):
    """This process's key is not known, was revoked, or is not for that; key and role are named."""


class Cancelled(ZkvError):
    """The current batch was cancelled by the policy; the next one starts on a newer model."""


class RolledBack(ZkvError):
    """The run has gone back to a snapshot, all workers together: what is lost, why, and what to do
    are in the text. Raised once; the worker goes on. `version` is the model's now, that of
    `snapshot`, and `undone` is how many updates after it are lost."""

    def __init__(self, text: str, version: int = 0, snapshot: str = "", undone: int = 0) -> None:
        super().__init__(text)
        self.version, self.snapshot, self.undone = version, snapshot, undone

    @classmethod
    def of(cls, version: int, snapshot: str, undone: int, why: str) -> RolledBack:
        """Return the error of a run that has gone back because of `why`."""
        lost = f"{undone} updates after version {version} are lost"
        text = f"the run has gone back to snapshot {snapshot}: {lost}, as {why}"
        todo = "worker.load_state() has what you kept with that version: go on from there"
        return cls(f"{text}. {todo}", version, snapshot, undone)


class Withdrawn(ZkvError):
    """The batch was left by an exception, so nothing of it counts."""


class StaleValues(ZkvError):
    """A gradient was computed on values of an earlier batch; the key is named."""


class Lost(ZkvError):
    """A process that this one needs is gone."""


class BrokerLost(Lost):
    """The broker has not been heard for too long, or came back without its log."""


class ServerLost(Lost):
    """A server that holds a shard is gone; its name and address are in the text."""


class WorkersLost(Lost):
    """Fewer workers are left than the run was told to go on with (--min-workers)."""


class Evicted(Lost):
    """The broker has removed this worker; join again to go on."""


class JournalError(ZkvError):
    """A broker's journal cannot be read, trusted or written; file, place and remedy are named."""


class WaitTimeout(ZkvError, TimeoutError):
    """A bounded wait has ended; the text says for whom and since when."""


class ClusterNotReady(WaitTimeout):
    """The cluster was not complete within the connect time-out; the text says who is missing."""


class Closed(ZkvError):
    """The worker has left or was closed."""


class BadSnapshot(ZkvError, ValueError):
    """A snapshot is not whole, or cannot be used here; the file and what to try are named."""


class ConfigError(ZkvError, ValueError):
    """The configuration has mistakes; all of them are listed."""


def doctor_hint(address: str) -> str:
    """Return what to try where a broker, or one of its servers, cannot be reached."""
    return f"zkv doctor --broker {address} says what is in the way"


_BY_CODE: dict[str, type[ZkvError]] = {
    cls.__name__: cls
    for cls in (
        ProtocolError,
        VersionMismatch,
        Refused,
        UnknownKey,
        KeyMismatch,
        PushRefused,
        NameInUse,
        NotAuthorised,
        Cancelled,
        BrokerLost,
        ServerLost,
        WorkersLost,
        Evicted,
        WaitTimeout,
        ClusterNotReady,
        Closed,
        BadSnapshot,
        ConfigError,
    )
}


def code_of(error: BaseException) -> str:
    """Return the code that stands for `error` in a refusal."""
    return type(error).__name__ if type(error).__name__ in _BY_CODE else "Refused"


def from_code(code: str, text: str) -> ZkvError:
    """Return the exception that a refusal with this code means; an unknown code is a `Refused`."""
    return _BY_CODE.get(code, Refused)(text)
