"""What a router is made with."""

from __future__ import annotations

from dataclasses import dataclass

from zkv.heartbeat import BEAT_S
from zkv.limits import KEYS_MAX, MEMBERS_MAX
from zkv.policy import SyncPolicy


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """What a broker is started with. Times in seconds, sizes in bytes."""

    address: str
    """Where workers and servers reach it; for messages."""
    policy: SyncPolicy
    servers: int = 1
    workers: int = 1
    """The start line: nobody is granted a first batch before so many are here."""
    min_workers: int = 0
    """With fewer workers than this, nobody is granted a batch (of those that left, none counts)."""
    on_short: str = "wait"
    """What a loss below `min_workers` does: "wait" for others, or "fail"."""
    optimizer: str | None = None
    staleness: str = "none"
    """What happens to gradients that are some updates old (text form of `zkv.staleness`)."""
    codec: str = "none"
    """How workers encode their gradients (text form of `zkv_codecs.plan`)."""
    codec_down: str = "none"
    """How servers encode what grants send (the same text form)."""
    block_bytes: int = 0
    """The size of blocks; 0: by the link of the worker that initialises."""
    placement: str = "by_size"
    """Which server a block goes to (text form of `zkv.placements`)."""
    replicas: int = 0
    """Live copies of each block on other servers: 0, or 1."""
    topology: str = "servers"
    """How the gradients of an update come together (text form of `zkv.topology`)."""
    streaming: bool = True
    """Send the next version block by block while contributions come in, where the policy lets it be
    known what they will be."""
    snapshot_dir: str = ""
    """Where snapshots go, a folder or an URL; "": there are none."""
    snapshot_every: str = ""
    """How often they are taken by themselves (text form of `zkv.snapshot.every`); "": not."""
    restored: str = ""
    """The manifest (JSON) of the snapshot that the run begins from; "": it begins from nothing."""
    restored_from: str = ""
    """The folder that this snapshot is in."""
    data_address: str = ""
    versions_pinned_max: int = 8
    worker_lost_s: float = 10.0
    server_lost_s: float = 20.0
    """A server that updates a large shard is silent for seconds; a dead one's connection breaks."""
    beat_s: float = BEAT_S
    """How often everybody of the run says that it is alive; members are told."""
    server_back_s: float = 30.0
    """How long another server is waited for in the place of a lost one, before the run goes back to
    its last snapshot with those that are left."""
    key: str = ""
    """The broker's own public key; "": there are no keys."""
    norm_limit: float = 0.0
    """The norm that one contribution may have; 0.0: any."""
    norm_action: str = "refuse"
    """What becomes of one above it: "refuse", "clip" or "quarantine"."""
    max_members: int = MEMBERS_MAX
    max_keys: int = KEYS_MAX
    lasts: bool = False
    """Whether it can go on in another process, as all that it hears is in a journal."""
    keep_log: bool = False
    """Keep every log entry in memory, for replays and tests."""
