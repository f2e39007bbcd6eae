"""What the synchroniser hears and what it answers, as plain values.

Workers are journaled numbers, and grants and versions are counts. Nothing here decides anything,
and nothing here knows keys, gradients, servers, sockets or time.
"""

from __future__ import annotations

from dataclasses import dataclass

from zkv.policy import SyncPolicy


@dataclass(frozen=True, slots=True)
class Joined:
    """A worker is a member from now on, level with the slowest clock, and wants to compute.

    `others` join at the same moment: under a policy that needs every worker, all of them take part
    in the same first round.
    """

    worker: int
    others: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Left:
    """A worker left or was lost; its unfinished work will never arrive."""

    worker: int


@dataclass(frozen=True, slots=True)
class Finished:
    """Every shard holds the contribution computed under this grant, or one refused it (`void`)."""

    worker: int
    grant: int
    void: bool = False


@dataclass(frozen=True, slots=True)
class Switched:
    """The policy changes here; what has arrived forms one last update under the old one."""

    policy: SyncPolicy


@dataclass(frozen=True, slots=True)
class Skipped:
    """The number of this worker's next grant is used up: something was promised under it in
    vain."""

    worker: int


Event = Joined | Left | Finished | Switched | Skipped


@dataclass(frozen=True, slots=True, order=True)
class Contribution:
    """A finished batch: who, under which grant, computed on which version of the model."""

    worker: int
    grant: int
    base_version: int


@dataclass(frozen=True, slots=True)
class Commit:
    """Apply these contributions, sorted by (worker, grant); the model then has this version."""

    version: int
    contributions: tuple[Contribution, ...]


@dataclass(frozen=True, slots=True)
class Start:
    """The worker may compute on this version; its grants are numbered 1, 2, ..."""

    worker: int
    grant: int
    version: int


@dataclass(frozen=True, slots=True)
class Cancel:
    """The unfinished work under this grant is void; a Start for the same worker follows."""

    worker: int
    grant: int


@dataclass(frozen=True, slots=True)
class Discard:
    """This finished contribution will never be applied: it was late, or refused."""

    worker: int
    grant: int


Action = Commit | Start | Cancel | Discard


@dataclass(frozen=True, slots=True)
class Waiting:
    """Why a worker is not computing: `rule` wants `need` and has `have`, because of `on`.

    `need` and `have` are contributions, members at the start line, or, under a slack, the clock
    that the slowest must reach and the one it has. `on` are worker numbers, rising.
    """

    rule: str
    on: tuple[int, ...]
    need: int
    have: int
