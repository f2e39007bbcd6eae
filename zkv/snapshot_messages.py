"""What is said of snapshots while they are taken, and when a cluster begins from one.

Part of the control messages (`zkv.control` has the others, and the packets that carry them all).
Each struct says in one sentence who sends it; nothing here decides anything.
"""

from __future__ import annotations

from zkv.wire import Frozen, Name, Text, UInt


class TakeSnapshot(Frozen, frozen=True, tag=90):
    """Anybody to broker: take a snapshot; the reply comes when it is complete, or has failed."""

    token: UInt


class Saved(Frozen, frozen=True, tag=91):
    """Server or worker to broker: my part of this snapshot is written, with so many bytes of this
    digest; or, with `why`, it is not."""

    number: UInt
    nbytes: UInt = 0
    sha256: Name = ""
    why: Text = ""


class SaveState(Frozen, frozen=True, tag=93):
    """Broker to worker: write down what you began your first batch of this version, or of a later
    one, with, into the folder `name` of `url`, and answer with `Saved`."""

    number: UInt
    url: Text
    name: Name
    version: UInt


class GoBack(Frozen, frozen=True, tag=94):
    """Anybody to broker: let the run go back to this snapshot of its folder ("": to the newest one
    that is whole); the reply comes when all servers hold it."""

    token: UInt
    name: Name = ""


class RollBack(Frozen, frozen=True, tag=95):
    """Broker to server or worker: the run begins again from a snapshot, under this term; forget all
    that you know of it, answer with `WentBack`, and hear who you are now."""

    term: UInt
    name: Name
    version: UInt
    undone: UInt
    """How many updates after that version are lost."""
    why: Text
    inits: list[UInt]
    """The initialisations whose keys there are, as soon as their `Ready` comes."""


class WentBack(Frozen, frozen=True, tag=96):
    """Server or worker to broker: what I said before this is of the run before this term."""

    term: UInt


class Restored(Frozen, frozen=True, tag=92):
    """Server to broker: I hold my part of the snapshot that the run begins from; or, with `why`,
    I cannot."""

    why: Text = ""
