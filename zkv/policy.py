"""Synchronisation policies as values, and their text.

A policy says how many contributions make an update, whether they are counted by worker or by
batch, what becomes of unfinished work at an update, and how far a worker may run ahead. The
seven classical policies are seven rows of one table; `zkv.sync` reads the fields and never the
name. This module knows nothing of workers, versions, time, sockets or files.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

FORMS = (
    "bsp",
    "asp",
    "ssp:S",
    "k-bsp:K",
    "k-batch-bsp:K",
    "k-asp:K",
    "k-batch-asp:K",
)
"""The texts that `policy` reads: K >= 1 contributions or workers, S >= 0 finished batches."""

# Nine digits hold any cluster, and keep a hostile text from costing more than a glance.
_TEXT = re.compile(r"([a-z-]+)(?::([0-9]{1,9}))?", re.ASCII)


@dataclass(frozen=True, slots=True)
class SyncPolicy:
    """When contributions become an update, and who may compute meanwhile.

    Raises ValueError when a threshold is below 1 or a slack below 0, and when a slack is combined
    with distinct workers, with cancelling, or with updates that need every worker.
    """

    name: str
    """What a person calls it; decides nothing."""
    threshold: int | None
    """k, the contributions that an update needs; None: one of every live member."""
    distinct: bool
    """True: counts distinct workers, and a contributor waits for the update. False: counts
    batches, and a finisher may go on."""
    cancel: bool
    """True: work that is unfinished at an update is cancelled. False: it is kept."""
    slack: int | None
    """How many finished batches a worker that starts may be ahead of the slowest; None: any."""

    def __post_init__(self) -> None:
        if self.threshold is not None and self.threshold < 1:
            raise ValueError(
                f"policy {self.name!r}: threshold must be at least 1, given {self.threshold}"
            )
        if self.slack is not None and self.slack < 0:
            raise ValueError(f"policy {self.name!r}: slack must be at least 0, given {self.slack}")
        if self.slack is not None and (self.distinct or self.cancel):
            # The slowest would wait for an update that needs a worker which waits for the slowest.
            raise ValueError(
                f"policy {self.name!r}: slack {self.slack} can deadlock with distinct workers or "
                "cancelling; count batches and keep unfinished work"
            )
        if self.slack is not None and self.threshold is None:
            # The held wait for the clock of a joiner, which waits for an update that needs them.
            raise ValueError(
                f"policy {self.name!r}: slack {self.slack} can deadlock where an update needs "
                "every worker; set a threshold"
            )

    def __str__(self) -> str:
        """The text from which `policy` makes an equal value again, such as "ssp:3"."""
        if self.name == "ssp":
            return f"{self.name}:{self.slack}"
        if self.name.startswith("k-"):
            return f"{self.name}:{self.threshold}"
        return self.name


def bsp() -> SyncPolicy:
    """Bulk synchronous: each update takes one contribution of every worker."""
    return SyncPolicy("bsp", threshold=None, distinct=True, cancel=True, slack=None)


def asp() -> SyncPolicy:
    """Asynchronous: each contribution is an update, and nobody waits."""
    return SyncPolicy("asp", threshold=1, distinct=False, cancel=False, slack=None)


def ssp(slack: int) -> SyncPolicy:
    """Stale synchronous: as `asp`, but a worker starts at most `slack` batches ahead."""
    return SyncPolicy("ssp", threshold=1, distinct=False, cancel=False, slack=slack)


def k_bsp(k: int) -> SyncPolicy:
    """The first `k` workers make the update; the others are cancelled and begin again."""
    return SyncPolicy("k-bsp", threshold=k, distinct=True, cancel=True, slack=None)


def k_batch_bsp(k: int) -> SyncPolicy:
    """The first `k` batches on one model make the update; unfinished ones are cancelled."""
    return SyncPolicy("k-batch-bsp", threshold=k, distinct=False, cancel=True, slack=None)


def k_asp(k: int) -> SyncPolicy:
    """`k` workers make the update and wait for it; the others keep computing."""
    return SyncPolicy("k-asp", threshold=k, distinct=True, cancel=False, slack=None)


def k_batch_asp(k: int) -> SyncPolicy:
    """Every `k` batches make an update, and nobody waits."""
    return SyncPolicy("k-batch-asp", threshold=k, distinct=False, cancel=False, slack=None)


_PLAIN = {"bsp": bsp, "asp": asp}
_WITH_NUMBER = {
    "ssp": ssp,
    "k-bsp": k_bsp,
    "k-batch-bsp": k_batch_bsp,
    "k-asp": k_asp,
    "k-batch-asp": k_batch_asp,
}


def policy(text: str) -> SyncPolicy:
    """The policy that a text names; raises ValueError that lists the valid forms.

    >>> policy("ssp:3") == ssp(3)
    True
    >>> str(policy("k-bsp:2"))
    'k-bsp:2'
    """
    match = _TEXT.fullmatch(text)
    name, number = match.groups() if match else ("", None)
    if number is None and name in _PLAIN:
        return _PLAIN[name]()
    if number is not None and name in _WITH_NUMBER:
        try:
            return _WITH_NUMBER[name](int(number))
        except ValueError as error:
            raise ValueError(f"{error}; valid are {', '.join(FORMS)}") from error
    raise ValueError(f"policy {text[:40]!r} is none of {', '.join(FORMS)} (K >= 1, S >= 0)")
