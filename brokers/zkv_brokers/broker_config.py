"""What the broker's process is started with."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from zkv.heartbeat import BEAT_S
from zkv.limits import KEYS_MAX, LIMITS, MEMBERS_MAX, Limits
from zkv.policy import SyncPolicy
from zkv_brokers.config import RouterConfig


@dataclass(frozen=True, slots=True)
class BrokerConfig:
    """What `zkv broker` is started with. Times in seconds."""

    policy: SyncPolicy
    bind: str = "tcp://127.0.0.1:5555"
    data_bind: str | None = None
    """Where route `broker` takes data; None: one port above `bind` (any free one if that is 0)."""
    advertise: str | None = None
    servers: int = 1
    workers: int = 1
    min_workers: int = 0
    on_short: str = "wait"
    optimizer: str | None = None
    staleness: str = "none"
    codec: str = "none"
    codec_down: str = "none"
    block_bytes: int = 0
    placement: str = "by_size"
    replicas: int = 0
    topology: str = "servers"
    snapshot_dir: str = ""
    """Where snapshots go: a folder or an URL; "": there are none."""
    snapshot_every: str = ""
    """How often they are taken by themselves; "": they are not."""
    restore: str = ""
    """The snapshot that the run begins from, or a folder, whose newest it is then; "": none."""
    restore_whole: bool = False
    """Whether of a folder the newest one is taken of which every byte is right."""
    insecure: bool = False
    keys: str = ""
    """The keys folder; "": the one that ZKV_KEYS names, else the default one if keys are needed."""
    worker_lost_s: float = 10.0
    server_lost_s: float = 20.0
    beat_s: float = BEAT_S
    """How often everybody of the run says that it is alive."""
    server_back_s: float = 30.0
    io_threads: int = 1
    socket_bytes: int = 0
    """Buffers of the connections of route `broker`, each way; 0: as the system likes."""
    norm_limit: float = 0.0
    """The norm that one contribution may have; 0.0: any."""
    norm_action: str = "refuse"
    max_members: int = MEMBERS_MAX
    max_keys: int = KEYS_MAX
    limits: Limits = LIMITS
    """What each of its ports bears."""
    journal: Path | None = None
    """The folder of the journal, by which another process can go on; None: it cannot."""
    record: Path | None = None
    """Where to write down all that is heard, for a replay."""
    trace: str = ""
    """The folder that its spans are left in at the end; "": nowhere."""

    def router(self, address: str, data_address: str, key: str) -> RouterConfig:
        """Return what its router is made with, but for the snapshot that the run begins from.

        The addresses are those that others reach; `key` is the broker's public key ("": none).
        """
        return RouterConfig(
            address=address,
            policy=self.policy,
            servers=self.servers,
            workers=self.workers,
            min_workers=self.min_workers,
            on_short=self.on_short,
            optimizer=self.optimizer,
            staleness=self.staleness,
            codec=self.codec,
            codec_down=self.codec_down,
            block_bytes=self.block_bytes,
            placement=self.placement,
            replicas=self.replicas,
            topology=self.topology,
            snapshot_dir=self.snapshot_dir,
            snapshot_every=self.snapshot_every,
            data_address=data_address,
            worker_lost_s=self.worker_lost_s,
            server_lost_s=self.server_lost_s,
            beat_s=self.beat_s,
            server_back_s=self.server_back_s,
            key=key,
            norm_limit=self.norm_limit,
            norm_action=self.norm_action,
            max_members=self.max_members,
            max_keys=self.max_keys,
            lasts=self.journal is not None,
        )
