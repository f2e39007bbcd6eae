"""Control messages: who says what to whom, between workers, broker and servers.

Entries of the log are numbered by the order in which `Log` carries them; (term, index) names one
entry for all time. Each struct says in one sentence who sends it.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from zkv.accounts import KEYS_TOLD_MAX as KEYS_TOLD_MAX
from zkv.accounts import Account as Account
from zkv.accounts import Accounts as Accounts
from zkv.accounts import Decoding as Decoding
from zkv.entries import Apart as Apart
from zkv.entries import Commit as Commit
from zkv.entries import Configure as Configure
from zkv.entries import Copy as Copy
from zkv.entries import Counted as Counted
from zkv.entries import Discard as Discard
from zkv.entries import Drop as Drop
from zkv.entries import Entry as Entry
from zkv.entries import Epoch as Epoch
from zkv.entries import Expect as Expect
from zkv.entries import Expected as Expected
from zkv.entries import Grant as Grant
from zkv.entries import Init as Init
from zkv.entries import Mirror as Mirror
from zkv.entries import Move as Move
from zkv.entries import Regroup as Regroup
from zkv.entries import Restore as Restore
from zkv.entries import Retire as Retire
from zkv.entries import Snapshot as Snapshot
from zkv.entries import Sum as Sum
from zkv.entries import Unmirror as Unmirror
from zkv.errors import ProtocolError
from zkv.greetings import Beat as Beat
from zkv.greetings import Bye as Bye
from zkv.greetings import Fatal as Fatal
from zkv.greetings import Keyring as Keyring
from zkv.greetings import ServerAt as ServerAt
from zkv.greetings import ServerHello as ServerHello
from zkv.greetings import ServerWelcome as ServerWelcome
from zkv.greetings import StateAt as StateAt
from zkv.greetings import Waiting as Waiting
from zkv.greetings import Welcome as Welcome
from zkv.greetings import WorkerHello as WorkerHello
from zkv.moving import Catchup as Catchup
from zkv.moving import Copied as Copied
from zkv.moving import Follow as Follow
from zkv.moving import Followed as Followed
from zkv.moving import Rearrange as Rearrange
from zkv.moving import Servers as Servers
from zkv.moving import Traffic as Traffic
from zkv.snapshot_messages import GoBack as GoBack
from zkv.snapshot_messages import Restored as Restored
from zkv.snapshot_messages import RollBack as RollBack
from zkv.snapshot_messages import Saved as Saved
from zkv.snapshot_messages import SaveState as SaveState
from zkv.snapshot_messages import TakeSnapshot as TakeSnapshot
from zkv.snapshot_messages import WentBack as WentBack
from zkv.time_split import Seconds
from zkv.verdicts import Cancel as Cancel
from zkv.verdicts import Companion as Companion
from zkv.verdicts import Exhausted as Exhausted
from zkv.verdicts import Granted as Granted
from zkv.verdicts import Layout as Layout
from zkv.verdicts import Ready as Ready
from zkv.verdicts import Refusal as Refusal
from zkv.verdicts import Regrouped as Regrouped
from zkv.verdicts import Reply as Reply
from zkv.verdicts import Samples as Samples
from zkv.verdicts import Separate as Separate
from zkv.verdicts import Settled as Settled
from zkv.verdicts import Together as Together
from zkv.wire import (
    MESSAGES_PER_PACKET_MAX,
    PROTOCOL_VERSION,
    ContributionId,
    Envelope,
    Frozen,
    Int,
    Key,
    KeySpec,
    Name,
    Origin,
    TableSpec,
    Text,
    UInt,
    Weight,
    encode,
)


class Log(Frozen, frozen=True, tag=20):
    """Broker to server: the entries from `index` on, all decided in one turn."""

    term: UInt
    index: UInt
    entries: list[Entry]


# --- worker to broker ------------------------------------------------------------------------


class Offer(Frozen, frozen=True, tag=40):
    """Worker to broker: I initialise these keys; the first offer's values count."""

    token: UInt
    keys: list[KeySpec]
    plain: bool
    link_rate: Seconds = 0.0
    """What its way to a server carries, in bytes per second; 0.0: not known."""
    tables: tuple[TableSpec, ...] = ()


class UsePool(Frozen, frozen=True, tag=51):
    """Worker to broker: deal these samples out with the grants; said before `Begin`, by all
    alike."""

    token: UInt
    n: UInt
    size: UInt
    seed: UInt
    retry: bool
    passes: UInt
    """0: without end."""


class Begin(Frozen, frozen=True, tag=41):
    """Worker to broker: grant me batches of the model from now on."""

    on_demand: bool = False
    """Whether servers shall send only those blocks that I ask for."""


class Plain(Frozen, frozen=True, tag=42):
    """Worker to broker: I push this key by itself, outside any batch."""

    token: UInt
    key: Key


class Finish(Frozen, frozen=True, tag=43):
    """Worker to broker: the contribution is sent to every server of its group."""

    contribution: ContributionId
    grant: UInt
    weight: Weight
    loss: float | None = None
    """Of the batch, if the worker has told it; may be NaN or infinite."""
    nbytes: UInt = 0
    """Of its blocks as they travel."""
    declared: Weight | None = None
    """The weight that its blocks have named; None: they have named none."""
    behind: UInt = 0
    """How many versions older than the one that was granted it was computed on."""
    placement: UInt = 0
    """That its blocks were sent by."""


class Withdraw(Frozen, frozen=True, tag=44):
    """Worker to broker: forget what I sent of this batch; its grant goes on under a new number."""

    contribution: ContributionId
    grant: UInt


class Received(Frozen, frozen=True, tag=45):
    """Worker to broker: I hold all blocks of this grant."""

    group: Int
    grant: UInt


class Pull(Frozen, frozen=True, tag=46):
    """Worker to broker: send me these keys (none: all of the model) as one version."""

    token: UInt
    keys: list[Key]
    seen: UInt = 0
    """A version that I have values of already: not an older one."""
    rows: bool = False
    """I shall ask servers for rows of that version, until I say `Received`; send the keys that I
    name, and no others."""


class Barrier(Frozen, frozen=True, tag=47):
    """Worker to broker: I am at my `number`-th barrier."""

    token: UInt
    number: UInt


class Leave(Frozen, frozen=True, tag=48):
    """Worker to broker: I stop after what I have finished."""


class Change(Frozen, frozen=True, tag=49):
    """Anybody to broker: set a live setting (`lr`, ...); the reply says from which version."""

    token: UInt
    setting: Name
    value: Text
    inside: bool = False
    """Whether who asks has sent a part of its current batch already."""


class Listens(Frozen, frozen=True, tag=55):
    """Worker to broker: other workers reach me here ("": they cannot)."""

    address: Name
    machine: Name
    """Alike for workers that are on one machine and see each other on loopback."""


class CutOff(Frozen, frozen=True, tag=56):
    """Worker to broker: what is added up under this grant cannot be finished among workers."""

    grant: UInt
    reason: Text


class Status(Frozen, frozen=True, tag=50):
    """Anybody to broker: tell me how things stand."""

    token: UInt


# --- server to broker ------------------------------------------------------------------------


Square = Annotated[float, Meta(ge=0)]


class Held(Frozen, frozen=True, tag=60):
    """Server to broker: I hold all of these contributions that concerns me."""

    contributions: list[tuple[ContributionId, UInt]]
    """Each with the grant that it was computed under."""
    index: UInt = 0
    """Entries of the log that this server had applied then."""
    squares: tuple[list[tuple[UInt, Square]], ...] = ()
    """Of each contribution, the square sums (float64) of its blocks (bid), where norms have a
    limit."""


class Void(Frozen, frozen=True, tag=61):
    """Server to broker: a guard refuses this contribution because of this key."""

    contribution: ContributionId
    grant: UInt
    key: Key
    reason: Text


class Unsound(Frozen, frozen=True, tag=68):
    """Server to broker: what workers have added up cannot be used; this contribution is in it."""

    contribution: ContributionId
    grant: UInt
    reason: Text


class SquareSums(Frozen, frozen=True, tag=62):
    """Server to broker: the square sums (float64) of a `Sum`, one for each of my blocks."""

    group: UInt
    version: UInt
    blocks: list[tuple[UInt, float]]


class Trouble(Frozen, frozen=True, tag=63):
    """Server to broker: this shard cannot go on."""

    reason: Text


ForBroker = (
    WorkerHello
    | ServerHello
    | Beat
    | Bye
    | Offer
    | UsePool
    | Begin
    | Plain
    | Finish
    | Withdraw
    | Received
    | Pull
    | Barrier
    | Leave
    | Change
    | Status
    | Accounts
    | Listens
    | CutOff
    | Held
    | Void
    | Unsound
    | SquareSums
    | Trouble
    | Decoding
    | Followed
    | Copied
    | Traffic
    | Rearrange
    | TakeSnapshot
    | Saved
    | Restored
    | GoBack
    | WentBack
)
Message = (
    ForBroker
    | Log
    | Welcome
    | ServerWelcome
    | Waiting
    | Fatal
    | Layout
    | Ready
    | Regrouped
    | Granted
    | Exhausted
    | Cancel
    | Together
    | Separate
    | Settled
    | Reply
    | Refusal
    | Follow
    | Servers
    | Catchup
    | Keyring
    | SaveState
    | RollBack
)

_limit = Meta(max_length=MESSAGES_PER_PACKET_MAX)
_for_broker = msgspec.msgpack.Decoder(Annotated[list[ForBroker], _limit])
_messages = msgspec.msgpack.Decoder(Annotated[list[Message], _limit])


class Packet(Frozen, frozen=True):
    """Control messages on their way: numbered, acknowledged, between two process instances.

    `source` and `target` are instance numbers drawn anew by every process (target 0: not known
    yet); `number` is that of the first message; all messages below `received` have arrived.
    `origin`: the mark of a broker whose links outlive its process; a frame without one ends before
    it.
    """

    source: UInt
    target: UInt
    number: UInt
    received: UInt
    messages: list[Message]
    origin: Origin = b""


def encode_packet(packet: Packet) -> bytes:
    """Return the frame of a packet."""
    fields = msgspec.structs.astuple(packet)
    return encode((PROTOCOL_VERSION, *(fields if packet.origin else fields[:-1])))


def decode_messages(envelope: Envelope, *, by_broker: bool = False) -> Packet:
    """Return the packet whose outer part `open_envelope` gave; ProtocolError if it is none.

    `by_broker`: only what is for a broker to hear. It reads packets of strangers, and no such
    message has a field of free form that would cost a hundred times its bytes.
    """
    try:
        messages = (_for_broker if by_broker else _messages).decode(envelope.messages)
    except Exception as error:
        raise ProtocolError(f"not a control message: {error}") from error
    numbers = (envelope.source, envelope.target, envelope.number, envelope.received)
    return Packet(*numbers, [*messages], envelope.origin)
