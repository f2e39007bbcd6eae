"""What workers and servers tell the broker of where bytes and time have gone."""

from __future__ import annotations

from zkv.time_split import Seconds, Spent
from zkv.wire import Frozen, Text, UInt

KEYS_TOLD_MAX = 256
"""Keys that a worker or a server tells of, those that cost most: a status is to be read."""


class Account(Frozen, frozen=True):
    """What encoding one key has saved and cost one worker since it joined."""

    kid: UInt
    codec: Text
    """The one in use."""
    before: UInt
    """Bytes of the gradients."""
    after: UInt
    """Bytes that travelled for them."""
    encode_s: float
    residual_norm: float
    """Of what is kept back at present."""
    why: Text = ""
    """Why this codec, if it was chosen by measurement."""


class Accounts(Frozen, frozen=True, tag=52):
    """Worker to broker: what codecs have done; of the largest keys, if there are many."""

    accounts: list[Account]
    spent: Spent | None = None
    """Where this worker's time has gone since it joined."""


class Decoding(Frozen, frozen=True, tag=64):
    """Server to broker: seconds spent on decoding since the start, by key (kid): the longest."""

    seconds: list[tuple[UInt, float]]
    updates: UInt = 0
    """Updates of the model since the start, and how long they took, decoding included."""
    update_s: Seconds = 0.0
    rows: tuple[tuple[UInt, UInt, UInt], ...] = ()
    """Of each table (kid) how many rows are here, and their bytes, state included."""
