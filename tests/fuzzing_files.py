"""What people, disks and other processes may have written into our files: settings, keys,
snapshots and journals. Each is read as it was meant, or refused by name; nothing else changes.

`python tests/fuzzing_files.py COUNT [SEED]` tries COUNT in all (`scripts/fuzz` does that), a test
fewer. What is wrong is printed with what is needed to see it again.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from fuzzing_frames import MESSAGES, numbered, spoiled
from single_blocks import trained

from zkv import control as c
from zkv import snapshot as sn
from zkv import tensor_file
from zkv.errors import BadSnapshot, ConfigError, JournalError
from zkv.optimizer_spec import optimizer
from zkv.policy import policy
from zkv.roles import Holder
from zkv.wire import BlockSpec, KeyEntry, KeySpec, Segment
from zkv_brokers import recovery, saving
from zkv_brokers import router as r
from zkv_brokers.contributions import Contributions
from zkv_brokers.journal import MAGIC, contents, written
from zkv_brokers.lasting import Lasting
from zkv_brokers.tables import Tables
from zkv_cli.settings import Settings, load
from zkv_net import snapshot_folder as sf
from zkv_net.keys import AUTHORIZED, SECRET, KeyFolder, new_pair
from zkv_workers import keeper

DEEP = (b"[" * 4000, b'{"a":' * 1500, b"1" * 4900, b"0x" + b"f" * 4000, b"\x91" * 3000)
"""What readers of texts stumble over: depth, and length of numbers."""
ODD = (b"\x00", b"\xff", b"\\u0000", b"nan", b"-1", b"1e999", b"''", b'""', b"=", b"[x]\n", b"\n")


def worse(chance: np.random.Generator, corpus: list[bytes]) -> bytes:
    """One of the corpus, spoiled as frames are, or with one of the above in it."""
    if chance.integers(4):
        return spoiled(chance, corpus)
    raw = bytearray(corpus[chance.integers(len(corpus))])
    some = (DEEP, ODD)[chance.integers(2)]
    at = int(chance.integers(len(raw) + 1))
    raw[at : at + int(chance.integers(3))] = some[chance.integers(len(some))]
    return bytes(raw)


def all_of(folder: Path) -> dict[str, bytes]:
    """Every file of a folder, and what it holds."""
    return {str(one): one.read_bytes() for one in folder.rglob("*") if one.is_file()}


@contextmanager
def no_others(where: str) -> Iterator[None]:
    """Whatever else is raised than what a caller expects is a find."""
    try:
        yield
    except AssertionError:
        raise
    except Exception as error:
        raise AssertionError(where) from error


def why_not(call: Callable[[], Any], kind: type[Exception]) -> str:
    """Return why something is refused; "": it is not."""
    try:
        call()
    except kind as error:
        return str(error)
    return ""


# --- settings ------------------------------------------------------------------------------------

TOML = [
    b"""[broker]
bind = "tcp://127.0.0.1:5555"
servers = 2
workers = 3
policy = "ssp:3"
optimizer = "adam:lr=0.003,beta1=0.9"
staleness = "drop:4"
codec = "topk:0.01+int8"
codec_down = "int8"
placement = "by_size"
topology = "servers"
snapshot_dir = "snaps"
snapshot_every = "5min"
block_bytes = "64KiB"
worker_lost_s = 10.0
norm_limit = 1e3
max_members = 100
io_threads = 2
""",
    b"""[server]
name = "s"
budget = "2GiB"
shared = 0
connect_timeout_s = 60
[join]
broker = "tcp://[::1]:5555"
keys_folder = "keys"
insecure = true
[run]
grace_s = 2
narrate_after_s = 5.0
[log]
format = "json"
level = "warning"
""",
]
PLACES = [
    (section, key)
    for section, about in Settings.model_fields.items()
    for key in about.annotation.model_fields  # type: ignore[union-attr]
]


def valued(chance: np.random.Generator) -> str:
    """A text as a variable or a flag may have."""
    lines = [line for line in TOML[chance.integers(2)].splitlines() if b"=" in line]
    text = worse(chance, [one.partition(b"= ")[2].strip(b'"') for one in lines])
    return text.replace(b"\x00", b"").decode("utf-8", "surrogateescape")


def of_settings(count: int, seed: int) -> int:
    """A file, a variable or a flag: settings, or a mistake with its place."""
    refused = 0
    before = {name: value for name, value in os.environ.items() if not name.startswith("ZKV_")}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "zkv.toml"
        for number, chance in numbered(count, seed):
            where = f"settings {number} of seed {seed}"
            for name in [name for name in os.environ if name.startswith("ZKV_")]:
                del os.environ[name]
            flags: dict[tuple[str, str], Any] = {}
            file, place = None, str(path)
            section, key = PLACES[chance.integers(len(PLACES))]
            match chance.integers(3):
                case 0:
                    path.write_bytes(worse(chance, TOML))
                    file = path
                case 1:
                    place = f"ZKV_{section}__{key}".upper()
                    os.environ[place] = valued(chance)
                case _:
                    flags[section, key] = valued(chance)
                    place = "--" + key.removesuffix("_s").replace("_", "-")
            with no_others(where):
                why = why_not(partial(load, flags, file), ConfigError)
                assert not why or place in why, f"{where}: {why}"
                refused += bool(why)
    for name in [name for name in os.environ if name.startswith("ZKV_")]:
        del os.environ[name]
    assert dict(os.environ) == before
    return refused


# --- keys ----------------------------------------------------------------------------------------


def of_keys(count: int, seed: int) -> int:
    """An own pair, and a key that is let in: read, or refused with the file; whoever else is let
    in stays so."""
    refused = 0
    with tempfile.TemporaryDirectory() as folder:
        keys = KeyFolder(Path(folder) / "keys")
        keys.make("head", ("broker",))
        good = Holder(new_pair()[0], "good", frozenset({"worker"}))
        other = Holder(new_pair()[0], "other", frozenset({"server", "admin"}))
        for one in (good, other):
            keys.add(one)
        secret, let_in = keys.path / SECRET, keys.path / AUTHORIZED / other.key
        honest = {one: one.read_bytes() for one in (secret, let_in)}
        own = keys.own()
        for number, chance in numbered(count, seed):
            file = (secret, let_in)[chance.integers(2)]
            file.write_bytes(worse(chance, [honest[file]]))
            before = all_of(keys.path) if number % 100 == 0 else None
            with no_others(f"keys {number} of seed {seed}: {file.read_bytes()!r}"):
                if file == secret:
                    why = why_not(keys.own, ConfigError)
                    assert why or keys.own().public == own.public
                    assert not why or str(file) in why, why
                    refused += bool(why)
                else:
                    found, wrong = keys.scan()
                    assert good in found
                    assert len(found) + len(wrong) == 2
                    assert all(str(file) in text for text in wrong)
                    # What is let in goes on: into the router, and as text to its members.
                    msgspec.msgpack.encode([(one.key, one.name, list(one.roles)) for one in found])
                    assert all(type(hash(one)) is int for one in found)
                    assert all(set(one.name) for one in found)
                    refused += len(wrong)
            assert before is None or before == all_of(keys.path)
            file.write_bytes(honest[file])
    return refused


# --- snapshots -----------------------------------------------------------------------------------

SIZE = 40


def arrays_of_a_server() -> tuple[dict[str, Any], dict[str, str]]:
    """What a server's file has of one block under momentum."""
    store = trained("float32", view=False)
    blocks = list(store.layout.blocks.values())
    saved = saving.taken(store, Tables(store), Contributions(), blocks)
    return saved.arrays, saved.metadata


def arrays_of_a_worker() -> tuple[dict[str, Any], dict[str, str]]:
    """What a worker's file has: a blob, and a codec's memory."""
    state = np.ones(SIZE, np.float32)
    return keeper.file_of(keeper.Beginning(3, 4, b"blob", {0: ("topk:0.1", (state,), state)}))


def write_snapshot(url: str, number: int) -> sn.Manifest:
    """Write a snapshot of one key, a server and a worker."""
    plain = optimizer("momentum:lr=0.1").to_plain()
    name = sn.name_of(7, number)
    server = sf.write_part(url, name, sn.server_file(0), *arrays_of_a_server())
    worker = sf.write_part(url, name, sn.worker_file(0), *arrays_of_a_worker())
    key = KeyEntry(0, KeySpec("w", "float32", (SIZE,)))
    manifest = sn.Manifest(
        sn.FORMAT, "0.1.0", name, 0.0, number, 7, 3,
        sn.Settings("bsp", plain, plain, "none", "none", "none", "servers"),
        [sn.Init(1, [key])], [BlockSpec(0, 0, [Segment(0, 0, SIZE)])],
        [sn.GroupState(0, [0], number, [(0, number)])],
        sn.PoolState(100, 1, 10, 2, True, 0, 30, [(0, 3, 5)], [(0, 25)], [(0, 25, 0, 2)]),
        (2, 1, 1), [sn.WorkerState(0, "w0", number, worker)], [server],
    )  # fmt: skip
    sf.complete(url, manifest)
    return manifest


def altered(chance: np.random.Generator, plain: Any) -> Any:
    """Plain data with one value in it changed, left out or doubled."""
    if isinstance(plain, dict) and plain:
        key = list(plain)[chance.integers(len(plain))]
        if chance.integers(12) == 0:
            return {name: value for name, value in plain.items() if name != key}
        return {**plain, key: altered(chance, plain[key])}
    if isinstance(plain, list) and plain and chance.integers(6):
        at = int(chance.integers(len(plain)))
        kept = [[], [plain[at], plain[at]], [altered(chance, plain[at])]][chance.integers(3)]
        return [*plain[:at], *kept, *plain[at + 1 :]]
    odd = (None, True, -1, 0, 1, 2, 2**31, 2**63 - 1, 2**64, 0.5, "", "x", "bsp", [], {}, [[]])
    return odd[chance.integers(len(odd))]


def liars_manifest(chance: np.random.Generator, honest: sn.Manifest) -> bytes:
    """A manifest that is whole, by its checksum, and does not say what was so."""
    plain = altered(chance, msgspec.to_builtins(honest))
    if chance.integers(3) == 0:
        plain = altered(chance, plain)
    try:
        return sn.encode(msgspec.convert(plain, sn.Manifest, strict=True))
    except (msgspec.ValidationError, TypeError, OverflowError):
        return json.dumps(plain).encode()


def of_snapshots(count: int, seed: int) -> int:
    """A file of a snapshot: it is as it was written, or refused, and the older one is there still.
    What is only well-formed is refused where it is taken in, or makes a broker and arrays."""
    refused = 0
    config = r.RouterConfig("tcp://b:1", policy("bsp"))
    with tempfile.TemporaryDirectory() as folder:
        write_snapshot(folder, 1)
        newest = write_snapshot(folder, 2)
        files = [Path(folder) / newest.name / one.file for one in newest.parts]
        files.append(Path(folder) / newest.name / sn.MANIFEST)
        honest = {file: file.read_bytes() for file in files}
        for number, chance in numbered(count, seed):
            where = f"snapshots {number} of seed {seed}"
            file = files[chance.integers(len(files))]
            with no_others(where):
                match chance.integers(3):
                    case 0:
                        spoilt = worse(chance, [honest[file]])
                        file.write_bytes(spoilt)
                        _, found = sf.chosen(folder, whole=True)
                        assert found.version == 1 + (spoilt == honest[file]), where
                        refused += found.version == 1
                        assert file.read_bytes() == spoilt
                        file.write_bytes(honest[file])
                    case 1:
                        refused += not reads(worse(chance, [honest[file]]))
                    case _:
                        text = liars_manifest(chance, newest)
                        refused += not restores(config, text)
        assert all_of(Path(folder)) == {
            **all_of(Path(folder)),
            **{str(f): honest[f] for f in files},
        }
    return refused


def reads(data: bytes) -> bool:
    """Whether this is a file of a server or a worker."""
    try:
        found = tensor_file.opened(data, "f")
    except BadSnapshot:
        return False
    ways = (saving.read, keeper.beginning_in)
    return not all(why_not(partial(way, *found, "f"), BadSnapshot) for way in ways)


def restores(config: r.RouterConfig, manifest: bytes) -> bool:
    """Whether a broker begins from this."""
    if why_not(partial(sn.decode, manifest, "m"), BadSnapshot):
        return False
    begins = partial(Lasting, config, None, lambda: ("x", manifest.decode()))
    return not why_not(begins, BadSnapshot)


# --- journals ------------------------------------------------------------------------------------


def a_life(config: r.RouterConfig) -> list[bytes]:
    """A journal's records: a broker that has heard a server, a worker and a key."""
    router = r.Router(config, term=1, instance=22)
    found = [recovery.state_record(router, 0.0)]
    hellos = (
        c.ServerHello("s", "tcp://s:1", 0, "host", 1, False),
        c.WorkerHello("w0", 0, 1, False, "host", 1),
    )
    for number, hello in enumerate(hellos, start=3):
        turns = recovery.Turns()
        frame = c.encode_packet(c.Packet(number, 0, 1, 0, [hello]))
        events = [r.Received(b"%d" % number, frame), r.Tick()]
        router.turn(events, number * 1.0)
        turns.add(events, number * 1.0, 0.0)
        found.append(turns.record())
    turns = recovery.Turns()
    frame = c.encode_packet(c.Packet(4, 22, 2, 1, MESSAGES[:3]))
    turns.add([r.Received(b"4", frame), r.ServerLink(0, True)], 6.0, 0.0)
    return [*found, turns.record(), recovery.state_record(router, 7.0)]


def of_journals(count: int, seed: int) -> int:
    """A journal: its records up to where it broke off, or refused. Records that are whole and make
    no sense are refused too."""
    refused = 0
    config = r.RouterConfig("tcp://b:1", policy("bsp"), lasts=True)
    lives = a_life(config)
    records = lives[:-1]
    whole = MAGIC + b"".join(written(at, one) for at, one in enumerate(records))
    for number, chance in numbered(count, seed):
        with no_others(f"journal {number} of seed {seed}"):
            if chance.integers(2):
                spoilt = worse(chance, [whole])
                why = why_not(partial(contents, spoilt, "the file"), JournalError)
                if not why:
                    found = contents(spoilt).records
                    assert found == records[: len(found)]
            else:
                some = list(lives[-1:] if chance.integers(2) else records)
                at = int(chance.integers(len(some)))
                some[at] = worse(chance, [some[at]])
                taken_up = partial(recovery.recovered, some, config, "the file")
                why = why_not(taken_up, JournalError)
                assert why or isinstance(taken_up()[0], r.Router)
            assert not why or "the file" in why, why
            refused += bool(why)
    assert recovery.recovered(records, config)[0].members.by_peer
    return refused


# --- all -----------------------------------------------------------------------------------------

BORDERS: dict[str, Callable[[int, int], int]] = {
    "settings": of_settings,
    "keys": of_keys,
    "snapshots": of_snapshots,
    "journals": of_journals,
}


def run(count: int, seed: int) -> dict[str, int]:
    """Try so many files in all; return how many were refused, by border."""
    found = {}
    for name, border in BORDERS.items():
        # Once for what is made at first use.
        border(200, seed)
        found[name] = border(count // len(BORDERS), seed)
    return found


if __name__ == "__main__":
    asked = int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000
    begun = int(sys.argv[2]) if len(sys.argv) > 2 else 0
    refused = ", ".join(f"{n} of {name}" for name, n in run(asked, begun).items())
    print(f"{asked} files of seed {begun}, {asked // len(BORDERS)} of each kind: refused {refused}")
