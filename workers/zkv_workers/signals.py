"""What goes into a session and what comes out of it, as plain values.

Inputs are the user's calls (each with a token that the answer will carry), messages and the passing
of time. Outputs are for a driver to carry out: frames to send, calls to answer, words to say.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from zkv import control as c
from zkv import data_messages as d
from zkv.dtypes import Array
from zkv.errors import RolledBack
from zkv.layout import Layout
from zkv.pool import Shard
from zkv.time_split import Spent
from zkv.wire import ContributionId, KeySpec, TableSpec
from zkv_workers.encoding import Sealed
from zkv_workers.outputs import Answer as Answer
from zkv_workers.outputs import Broken as Broken
from zkv_workers.outputs import CancelBatch as CancelBatch
from zkv_workers.outputs import Connect as Connect
from zkv_workers.outputs import DropPeer as DropPeer
from zkv_workers.outputs import Fail as Fail
from zkv_workers.outputs import Keyed as Keyed
from zkv_workers.outputs import Listen as Listen
from zkv_workers.outputs import Narrate as Narrate
from zkv_workers.outputs import Output as Output
from zkv_workers.outputs import SaveState as SaveState
from zkv_workers.outputs import SendControl as SendControl
from zkv_workers.outputs import SendData as SendData
from zkv_workers.outputs import SendPeer as SendPeer
from zkv_workers.row_signals import AskRows as AskRows
from zkv_workers.row_signals import PushRows as PushRows
from zkv_workers.row_signals import ReleaseRows as ReleaseRows
from zkv_workers.row_signals import RowInput

Key = str | int


# --- in --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Join:
    """Become a member; answered with a `Membership`."""

    token: int


@dataclass(frozen=True, slots=True)
class Initialise:
    """Initialise keys; answered when every server holds the values (mine or another's)."""

    token: int
    specs: tuple[KeySpec, ...]
    values: Mapping[Key, Array]
    """Flat arrays of the stored dtype, by key; ties are not in it."""
    plain: bool
    in_parts: bool = False
    """There are no values yet: if they are asked of this worker, the answer is a `Seeding`."""
    tables: tuple[TableSpec, ...] = ()


@dataclass(frozen=True, slots=True)
class Seed:
    """One block of the values that a `Seeding` asks for: flat, of the stored dtype."""

    seeding: Seeding
    bid: int
    values: Array


@dataclass(frozen=True, slots=True)
class EndSeeds:
    """All blocks of a `Seeding` are given; answered when every server holds all of them."""

    token: int
    seeding: Seeding


@dataclass(frozen=True, slots=True)
class UsePool:
    """Deal these samples out with the grants; answered when the broker agrees."""

    token: int
    shard: Shard


@dataclass(frozen=True, slots=True)
class Begin:
    """Begin a batch; answered with a `Grant` when the policy allows it and all values are here.

    If the model has a pool of samples and nothing of it is left, the answer is None.
    """

    token: int
    on_demand: bool = False
    """Whether servers shall only send values that are wanted."""


@dataclass(frozen=True, slots=True)
class Await:
    """Wait for the values of these keys, or just these blocks; answered too if it was cancelled."""

    token: int
    batch: int
    kids: tuple[int, ...]
    bids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Want:
    """Of a batch on demand, these keys' values are needed soon: ask for them."""

    batch: int
    kids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Forget:
    """Of a batch on demand, these keys' values are not needed any more; they may be again."""

    batch: int
    kids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Room:
    """Wait until at most so many bytes of what was pushed are still to arrive at servers."""

    token: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class SendBlock:
    """One block of the current batch's gradient, as it travels; never changed afterwards."""

    batch: int
    bid: int
    sealed: Sealed
    weight: float | None = None
    """Of the batch, if it is known by now, and no key of the block is skipped."""


@dataclass(frozen=True, slots=True)
class Finish:
    """The batch is complete; answered with its `Fate` when it is settled."""

    token: int
    batch: int
    weight: float
    skipped: tuple[int, ...]
    loss: float | None = None
    """Of the batch, if it was told."""


@dataclass(frozen=True, slots=True)
class Report:
    """Tell the broker what codecs have done, and where this worker's time has gone."""

    accounts: list[c.Account]
    spent: Spent | None = None


@dataclass(frozen=True, slots=True)
class Say:
    """Tell the broker this."""

    message: c.Saved


@dataclass(frozen=True, slots=True)
class Withdraw:
    """The batch was left by an exception: nothing of it counts, its grant stays."""

    batch: int


@dataclass(frozen=True, slots=True)
class PushPlain:
    """Push one key by itself; answered with its `Fate` when it is settled."""

    token: int
    key: Key
    value: Array
    weight: float


@dataclass(frozen=True, slots=True)
class Pull:
    """Read keys (none: the model), after my own plain pushes of them; answered with `Values`.

    `rows`: just these keys, and rows of tables are asked for of the same version, until
    `ReleaseRows`.
    """

    token: int
    keys: tuple[Key, ...]
    rows: bool = False


@dataclass(frozen=True, slots=True)
class Barrier:
    """Wait until every worker is at its barrier of the same number; answered with that number."""

    token: int


@dataclass(frozen=True, slots=True)
class Leave:
    """Stop taking part after what is finished; answered when the broker has let go."""

    token: int


@dataclass(frozen=True, slots=True)
class Ask:
    """A request that the broker answers with plain data: a status, or a change of a setting."""

    token: int
    setting: str = ""
    value: str = ""


@dataclass(frozen=True, slots=True)
class GiveUp:
    """The caller no longer waits for this token."""

    token: int


@dataclass(frozen=True, slots=True)
class GoOn:
    """The caller knows that the run has gone back to a snapshot: what comes is of the new run."""

    told: RolledBack
    """The error that it got: if there is a later one, it is to get that, too."""


@dataclass(frozen=True, slots=True)
class FromBroker:
    """A control frame from the broker."""

    frame: bytes


@dataclass(frozen=True, slots=True)
class FromServer:
    """A data message from a server; `payload` are its bytes as a flat uint8 array."""

    message: d.Data
    payload: Array | None


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed. `transport`: how payloads go now (see `zkv_net.nearby`); `trouble`: why the
    broker cannot be reached, as far as its driver knows."""

    transport: str = ""
    trouble: str = ""


@dataclass(frozen=True, slots=True)
class Listening:
    """Other workers reach this one here; "": they cannot."""

    address: str
    machine: str = ""
    """Alike for workers of one machine."""


@dataclass(frozen=True, slots=True)
class FromPeer:
    """A data message from another worker; `payload` as in `FromServer`."""

    message: d.Data
    payload: Array | None


Calls = Join | Initialise | EndSeeds | UsePool | Begin | Await | Room | Finish | PushPlain | Pull
OfBatches = Want | Forget | SendBlock | Withdraw
FromOutside = FromBroker | FromServer | Listening | FromPeer | Tick
Rest = Seed | Report | Say | Barrier | Leave | Ask | GiveUp | GoOn
Input = Calls | OfBatches | FromOutside | Rest | RowInput


@dataclass(frozen=True, slots=True, eq=False)
class Seeding:
    """The answer to `Initialise` in parts, if this worker is to give the values: a `Seed` for each
    of these blocks, then `EndSeeds`."""

    name: ContributionId
    message: c.Layout
    layout: Layout
    """A copy that does not change."""


# --- answers ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Membership:
    """The answer to `Join`."""

    number: int
    incarnation: int
    world: int
    policy: str


@dataclass(frozen=True, slots=True)
class Grant:
    """The answer to `Begin`: compute batch `batch` on `version`; `blocks` are its values, as far as
    they are here: another thread adds those that are still on their way."""

    batch: int
    grant: int
    version: int
    clock: int
    slowest: int
    fastest: int
    blocks: Mapping[int, Array]
    layout: Layout
    """A copy that does not change, so that another thread may read it."""
    samples: c.Samples | None = None
    """What to compute on; None if the model has no pool."""
    codec: str = "none"
    """How to encode the gradients."""
    codec_down: str = "none"
    """How the values of later grants will come."""
    chosen: str = ""
    """The codec that stands for `bits:...` in that plan at present."""
    ahead: bool = False
    """Whether its version may never come to be; then the batch is cancelled."""
    on_demand: bool = False
    """Whether `blocks` has only what is wanted at present."""
    behind: int = 0
    """How many versions `version` is older than the one that was granted."""


@dataclass(frozen=True, slots=True)
class Values:
    """The answer to `Pull`: blocks (or parts of them: the keys of `parts`) at one log index."""

    version: int
    kids: tuple[int, ...]
    blocks: Mapping[int, Array]
    parts: Mapping[int, tuple[int, ...]]
    layout: Layout
    pull: int = 0
    """The token of the pull."""


@dataclass(frozen=True, slots=True)
class Fate:
    """What became of a contribution: the version that it is part of, or why it is in none."""

    version: int | None
    why: str

    @property
    def outcome(self) -> str:
        """`"committed"`, `"cancelled"`, `"discarded"` or `"undone"`."""
        if self.version is not None:
            return "committed"
        if self.why.startswith("undone"):
            return "undone"
        return "cancelled" if self.why.startswith(("cancelled", "late")) else "discarded"
