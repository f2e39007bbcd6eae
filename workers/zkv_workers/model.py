"""What both faces of a worker share: specs of a user's arrays, a batch, sources of settings."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypedDict, Unpack

import numpy as np

from zkv.dtypes import Array, dtype_of, stored_view
from zkv.errors import Cancelled, ConfigError, RolledBack, UnknownKey
from zkv.layout import check_key
from zkv.wire import MODEL, WEIGHT_MAX, KeySpec
from zkv_net import tracing
from zkv_net.safety import said_insecure
from zkv_net.spares import Spares
from zkv_workers import signals as s
from zkv_workers.config import ROUTES, SessionConfig
from zkv_workers.devices import to_host
from zkv_workers.encoding import Encoder
from zkv_workers.environment import number, prefetch
from zkv_workers.packing import Packer
from zkv_workers.unpacking import Unpacking, read_into, views

Key = str | int


def as_arrays(params: Any) -> dict[Key, Array]:
    """Return the arrays of a dict, a PyTorch state_dict or a safetensors file, by key, in order.

    Raises:
        TypeError: none of these, or a value that is no array.
        OSError: the file cannot be read.
    """
    if isinstance(params, str | os.PathLike):
        from safetensors.numpy import load_file

        params = load_file(os.fspath(params))
    if not isinstance(params, Mapping):
        raise TypeError(
            "init takes a dict of arrays, a state_dict or the path of a safetensors file, "
            f"not {type(params).__name__}"
        )
    return {check_key(key): _as_array(key, value) for key, value in params.items()}


def _as_array(key: object, value: Any) -> Array:
    if hasattr(value, "detach") and hasattr(value, "cpu"):
        return _from_torch(value)
    array = to_host(value)
    if isinstance(array, bool | int | float):
        array = np.asarray(array)
    if not isinstance(array, np.ndarray):
        raise TypeError(f"key {key!r}: init takes arrays, not {type(value).__name__}")
    return array


def _from_torch(tensor: Any) -> Array:
    tensor = tensor.detach().cpu()
    if str(tensor.dtype) == "torch.bfloat16":
        import ml_dtypes
        import torch

        bits: Array = tensor.contiguous().view(torch.uint16).numpy().view(ml_dtypes.bfloat16)
        return bits
    array: Array = tensor.numpy()
    return array


def specs_of(
    arrays: Mapping[Key, Array],
    *,
    rule: str = "",
    reduce: str = "",
    allow_nan: bool = False,
    absent: str = "zero",
) -> tuple[list[KeySpec], dict[Key, Array]]:
    """Return the specs of arrays and their flat values; a second name of one array becomes a tie.

    Raises:
        TypeError: a dtype that does not travel.
    """
    specs: list[KeySpec] = []
    values: dict[Key, Array] = {}
    seen: dict[tuple[Any, ...], Key] = {}
    for key, array in arrays.items():
        try:
            dtype = dtype_of(array)
        except TypeError as error:
            raise TypeError(f"key {key!r}: {error}") from None
        place = (
            (array.ctypes.data, array.shape, array.strides, dtype.name) if array.size else (key,)
        )
        tied = seen.setdefault(place, key)
        specs.append(
            KeySpec(
                key=key,
                dtype=dtype.name,
                shape=tuple(array.shape),
                reduce=reduce,
                rule=rule,
                allow_nan=allow_nan,
                absent=absent,
                same_as=None if tied == key else tied,
            )
        )
        if tied == key:
            values[key] = stored_view(array, dtype).copy()
    return specs, values


class BatchState:
    """One mini-batch being computed: the values that it began with, and the gradients so far."""

    def __init__(
        self,
        grant: s.Grant,
        weight: float | None,
        encoder: Encoder | None = None,
        spares: Spares | None = None,
    ) -> None:
        layout = grant.layout
        kids = layout.kids_in(MODEL)
        self.number = grant.batch
        self.version = grant.version
        self.granted = grant.version + grant.behind
        self.clock = grant.clock
        self.slowest = grant.slowest
        self.fastest = grant.fastest
        self.declared = weight
        """The weight that is sent with blocks; None: it is said at the end."""
        self.weight = 1.0 if weight is None else weight
        self.loss: float | None = None
        self.cancelled = False
        self.ahead = grant.ahead
        self.on_demand = grant.on_demand
        self.began = time.monotonic()
        self.layout = layout
        self._kids = kids
        self._model = frozenset(kids)
        self._blocks = grant.blocks
        """Another thread adds to them."""
        self._arrays: dict[int, Array] = {}
        self._spares = spares
        self._params: dict[Key, Array] | None = None
        self._unpacking: Unpacking | None = None
        self.packer = Packer(layout, kids, encoder, grant.batch)

    def missing(self, keys: Sequence[Key] | None = None) -> tuple[int, ...]:
        """Return the numbers of these keys (None: of all) if some of their values are not here.

        Raises:
            UnknownKey: no key of the model.
        """
        if keys is None:
            blocks = self.layout.blocks_in(MODEL) if self._params is None else []
            kids = tuple(self._kids)
        else:
            kids = tuple(kid for kid in map(self._kid, keys) if kid not in self._arrays)
            blocks = self.layout.blocks_for(kids)
        return kids if any(block.bid not in self._blocks for block in blocks) else ()

    def kids_of(self, keys: Iterable[Key] | None) -> tuple[int, ...]:
        """Return the numbers of these keys (None: of all).

        Raises:
            UnknownKey: no key of the model.
        """
        return tuple(self._kids) if keys is None else tuple(map(self._kid, keys))

    def _kid(self, key: Key) -> int:
        kid = self.layout.kid(key)
        if kid not in self._model:
            raise UnknownKey(
                f"key {key!r} is not part of the model: it is pushed by itself, and worker.pull "
                "reads it"
            )
        return kid

    def params(self) -> dict[Key, Array]:
        """Return the model as fresh writable arrays (the same ones at every call).

        All values have to be here.

        Raises:
            Cancelled: the batch no longer counts.
        """
        self.check()
        if self._params is None:
            self.take_in(self._kids)
            names = self.layout.kid_of
            self._params = {
                key: self._arrays[kid] for key, kid in names.items() if kid in self._model
            }
        return self._params

    def views(self) -> dict[Key, Array]:
        """Return the model as read-only arrays, which lie where the values have come, or are
        copies. All values have to be here.

        Raises:
            Cancelled: the batch no longer counts.
        """
        self.check()
        seen = views(self.layout, self._kids, self._blocks, self._spares)
        return {key: seen[kid] for key, kid in self.layout.kid_of.items() if kid in seen}

    def first_missing(self, kids: Sequence[int], nbytes: int) -> tuple[int, ...]:
        """Copy what is here of these keys' values; return the blocks that are to come first, about
        so many bytes; none: that would be all."""
        found: list[int] = []
        for bid in self.take_in(kids):
            if nbytes <= 0:
                return tuple(found)
            found.append(bid)
            nbytes -= self.layout.block_bytes(self.layout.blocks[bid])
        return ()

    def take_in(self, kids: Iterable[int]) -> list[int]:
        """Copy what is here of these keys' values; return the blocks that are missing still, as
        they are expected to come."""
        rest = frozenset(kid for kid in kids if kid not in self._arrays)
        if not rest:
            return []
        unpacking = self._unpacking
        if unpacking is None or unpacking.kids != rest:
            unpacking = Unpacking(self.layout, tuple(rest), self._spares)
        unpacking.take(self._blocks)
        self._unpacking = unpacking if unpacking.missing else None
        if not unpacking.missing:
            self._arrays |= unpacking.arrays()
        return list(unpacking.missing)

    def names(self) -> dict[int, Key]:
        """Return the model's keys by number, of tied ones the first."""
        return {kid: self.layout.entries[kid].spec.key for kid in self._kids}

    def keys(self) -> list[Key]:
        """Return the names of `params`, those of tied keys too."""
        return [key for key, kid in self.layout.kid_of.items() if kid in self._model]

    def value(self, key: Key) -> Array:
        """Return one key's array of `params`; its values have to be here.

        Raises:
            Cancelled: the batch no longer counts.
            UnknownKey: no key of the model.
        """
        self.check()
        kid = self._kid(key)
        self.take_in((kid,))
        return self._arrays[kid]

    def read_into(self, key: Key, out: Any) -> None:
        """Write one key's values into an array, or into several; they have to be here.

        Raises:
            Cancelled: the batch no longer counts.
            UnknownKey, KeyMismatch: no key of the model, or not an array for it.
        """
        self.check()
        read_into(self.layout, self._kid(key), self._blocks, out)

    def check(self) -> None:
        """Raise Cancelled if the batch no longer counts."""
        if self.cancelled:
            raise Cancelled(f"batch {self.number} was cancelled: the update happened without it")


def check_weight(weight: float) -> float:
    """Return a batch's weight as a float.

    Raises:
        ValueError: negative, not finite, above 2**53, or not a number.
    """
    number = float(weight)
    if not 0 <= number <= WEIGHT_MAX:
        raise ValueError(
            f"weight {weight!r}: it counts samples, so it is finite, not negative and at most 2**53"
        )
    return number


class ConnectOptions(TypedDict, total=False):
    """What `zkv.connect` and `zkv.aio.connect` take beside the broker's address."""

    name: str | None
    """Unique among the live workers; default: ZKV_NAME, else made of rank or host and process."""
    rank: int | None
    """The worker's number, which orders sums; default: ZKV_RANK or RANK, else the first free."""
    world: int | None
    """How many workers are waited for before the first batch; default: WORLD_SIZE, else 1."""
    observer: bool
    """Only read: an observer is no member of any update."""
    route: str | None
    """"direct" (to the servers) or "broker" (through it); default: ZKV_ROUTE, else direct."""
    connect_timeout_s: float | None
    """Patience for the cluster to be complete; default: ZKV_CONNECT_TIMEOUT_S, else 60."""
    wait_timeout_s: float | None
    """Patience of every later wait; default: ZKV_WAIT_TIMEOUT_S, else 600."""
    narrate_after_s: float | None
    """When a wait is first explained in the log; default: ZKV_NARRATE_AFTER_S, else 2."""
    narrate_every_s: float
    """How often it is explained again after that."""
    broker_lost_s: float
    """How long the broker may be silent before it is taken for lost."""
    window_bytes: int
    """Bytes that may be unacknowledged at each server."""
    shared_bytes: int
    """Memory through which payloads go to servers of the same machine and user, at most
    (default: 4 GiB); 0: through sockets."""
    io_threads: int | None
    """ZeroMQ's threads that move bytes to and from the kernel; default: ZKV_IO_THREADS, else 1."""
    socket_bytes: int | None
    """Buffers that data connections ask of the system, each way; 0: as the system likes. Default:
    ZKV_SOCKET_BYTES, else 0."""
    keys: str | None
    """The keys folder (docs/security.md); default: ZKV_KEYS, else ~/.config/zkv/keys where the
    broker is on another machine."""
    insecure: bool | None
    """Dial a broker on another machine without keys: whoever is on the way can read and change
    everything. Default: ZKV_INSECURE=1."""
    prefetch: int | None
    """1: a batch begins as soon as it is granted, on the values that the one before it was granted;
    its own travel meanwhile, and serve the next one. So each gradient is older by one of this
    worker's batches, which `stats()` and the run's report count as staleness. Default:
    ZKV_PREFETCH, else 0."""

    on_roll_back: Callable[[RolledBack], object] | None
    """Called when the run has gone back to a snapshot, before the worker's next call goes on;
    default: that call raises the `RolledBack`. A worker of `zkv.aio` awaits what it returns."""


TUNING = ("narrate_every_s", "broker_lost_s", "window_bytes", "shared_bytes")


def session_config(
    broker: str | None, **options: Unpack[ConnectOptions]
) -> tuple[SessionConfig, str]:
    """Return a worker's settings and route: arguments first, then the environment's variables.

    Raises:
        ConfigError: no broker is named, or a variable or an option is not what it has to be.
        TypeError: an option that there is not; those that there are are named.
    """
    unknown = sorted(options.keys() - ConnectOptions.__annotations__.keys())
    if unknown:
        known = ", ".join(ConnectOptions.__annotations__)
        raise TypeError(f"connect has no option {', '.join(unknown)}; it has {known}")
    observer = options.get("observer", False)
    address = broker or os.environ.get("ZKV_BROKER")
    if not address:
        raise ConfigError(
            "no broker is named: call zkv.connect('tcp://host:5555'), set ZKV_BROKER, "
            "or start with `zkv run`"
        )
    rank = -1 if observer else number(options.get("rank"), ("ZKV_RANK", "RANK"), -1)
    world = 0 if observer else number(options.get("world"), ("ZKV_WORLD_SIZE", "WORLD_SIZE"), 0)
    host = socket.gethostname()[:200] or "?"
    unique = f"{host}-{os.getpid()}-{time.monotonic_ns() % 10**9}"
    role = "observer" if observer else "worker"
    default = f"{role}-{rank}" if rank != -1 else f"{role}-{unique}"
    trace = os.environ.get(tracing.VARIABLE, "")
    config = SessionConfig(
        name=options.get("name") or os.environ.get("ZKV_NAME") or default,
        broker=address,
        rank=rank.item() if isinstance(rank, np.generic) else rank,
        world=world.item() if isinstance(world, np.generic) else world,
        observer=observer,
        host=host,
        pid=os.getpid(),
        connect_timeout_s=number(options.get("connect_timeout_s"), ("ZKV_CONNECT_TIMEOUT_S",), 60),
        wait_timeout_s=number(options.get("wait_timeout_s"), ("ZKV_WAIT_TIMEOUT_S",), 600),
        narrate_after_s=number(options.get("narrate_after_s"), ("ZKV_NARRATE_AFTER_S",), 2.0),
        beat_s=tracing.beat_s(trace),
        report=os.environ.get("ZKV_REPORT", ""),
        trace=trace,
        priority=not os.environ.get("ZKV_FIFO"),
        keys=str(options.get("keys") or ""),
        insecure=said_insecure() if options.get("insecure") is None else bool(options["insecure"]),
        prefetch=prefetch(options.get("prefetch")),
        io_threads=number(options.get("io_threads"), ("ZKV_IO_THREADS",), 1),
        socket_bytes=number(options.get("socket_bytes"), ("ZKV_SOCKET_BYTES",), 0),
    )
    tuned: Any = {name: value for name, value in options.items() if name in TUNING}
    route = options.get("route") or os.environ.get("ZKV_ROUTE") or "direct"
    if route not in ROUTES:
        raise ConfigError(f"route {route!r} (an argument, or ZKV_ROUTE) is none of {ROUTES}")
    return replace(config, **tuned), route
