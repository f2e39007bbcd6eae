"""Ten thousand spoiled files of settings, keys, snapshots and journals; `scripts/fuzz` tries a
million. And what they have found, by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fuzzing_files import a_life, run

from zkv import snapshot as sn
from zkv import tensor_file
from zkv.errors import BadSnapshot, ConfigError, JournalError
from zkv.policy import policy
from zkv_brokers import recovery, saving
from zkv_brokers.router import RouterConfig
from zkv_brokers.state import packed
from zkv_cli.settings import load
from zkv_net.keys import AUTHORIZED, SECRET, KeyFolder, new_pair
from zkv_workers import keeper

DEEP, LONG = "[" * 4000, "1" * 4900


def test_spoiled_files_are_refused_by_name_and_nothing_else_changes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for variable in ("ZKV_BROKER", "ZKV_KEYS", "ZKV_INSECURE"):
        monkeypatch.delenv(variable, raising=False)
    refused = run(10_000, seed=1)
    # Neither is nearly everything refused at the first look, nor is nearly nothing spoiled.
    assert all(1_000 < found < 2_450 for found in refused.values()), refused


@pytest.mark.parametrize(
    "text",
    [f"a = {DEEP}", f"a = {LONG}", f"[broker]\nservers = {LONG}", "x={a=" * 2000],
    ids=["deep", "long", "long setting", "deep tables"],
)
def test_a_file_of_settings_that_nobody_can_read_is_a_mistake_in_it(
    tmp_path: Path, text: str
) -> None:
    file = tmp_path / "zkv.toml"
    file.write_text(text, "utf-8")
    with pytest.raises(ConfigError, match=r"zkv\.toml: not a TOML file"):
        load({}, file)


@pytest.mark.parametrize("setting", ["broker]\nservers", "server]\nbudget", "broker]\nnorm_limit"])
def test_a_number_of_thousands_of_digits_is_a_mistake_with_its_line(
    tmp_path: Path, setting: str
) -> None:
    file = tmp_path / "zkv.toml"
    file.write_text(f"[{setting} = 0x{'f' * 5000}", "utf-8")
    with pytest.raises(ConfigError, match=r"zkv\.toml, line 2, \["):
        load({}, file)


def test_a_text_with_a_nul_or_half_a_letter_is_a_mistake(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "zkv.toml"
    file.write_text('[broker]\nsnapshot_dir = "a\\u0000b"\n', "utf-8")
    with pytest.raises(ConfigError, match=r"line 2, \[broker\] snapshot_dir: a text has no NUL"):
        load({}, file)
    monkeypatch.setenv("ZKV_SERVER__NAME", "\udcff")
    with pytest.raises(ConfigError, match="ZKV_SERVER__NAME: 'utf-8' codec can't encode"):
        load({}, None)
    with pytest.raises(ConfigError, match="cannot be read: embedded null byte"):
        load({}, Path("a\0b"))


@pytest.mark.parametrize("text", [f"a = {DEEP[:3900]}", 'name = ["x"]\nroles = ["worker"]'])
def test_a_key_file_that_makes_no_sense_is_named_and_lets_nobody_in(
    tmp_path: Path, text: str
) -> None:
    keys = KeyFolder(tmp_path)
    (tmp_path / AUTHORIZED).mkdir(mode=0o700)
    let_in = tmp_path / AUTHORIZED / new_pair()[0]
    let_in.write_text(text)
    found, wrong = keys.scan()
    assert found == []
    assert len(wrong) == 1
    assert str(let_in) in wrong[0]
    (tmp_path / SECRET).write_text(text)
    (tmp_path / SECRET).chmod(0o600)
    with pytest.raises(ConfigError, match="no key file"):
        keys.own()


def as_file(header: bytes, body: bytes = b"") -> bytes:
    return len(header).to_bytes(8, "little") + header + body


def test_a_manifest_and_arrays_of_senseless_depth_and_shape_are_refused() -> None:
    deep = b"[" * 100_000
    with pytest.raises(BadSnapshot, match="no manifest"):
        sn.decode(b'{"settings":{"optimizer":{"a":' + deep, "m")
    with pytest.raises(BadSnapshot, match="no header"):
        tensor_file.opened(as_file(b'{"a":' + deep), "f")
    shape = b"0," + b",".join([b"9223372036854775807"] * 31)
    header = b'{"a":{"dtype":"F32","shape":[' + shape + b'],"data_offsets":[0,0]}}'
    with pytest.raises(BadSnapshot, match="array 'a' has shape"):
        tensor_file.opened(as_file(header), "f")
    for name, reads in ((saving.HEADS, saving.read), (keeper.ABOUT, keeper.beginning_in)):
        about = {name: '{"x":1,"blocks":' + deep.decode()}
        with pytest.raises(BadSnapshot, match="f "):
            reads({}, about, "f")


@pytest.mark.parametrize("state", [b"\x91" * 3000, packed([1]), packed(policy("bsp"))])
def test_a_journal_whose_records_are_whole_and_no_brokers_is_refused(state: bytes) -> None:
    config = RouterConfig("tcp://b:1", policy("bsp"), lasts=True)
    records = a_life(config)
    first: list[Any] = recovery.msgspec.msgpack.decode(records[0])
    first[-1] = state
    with pytest.raises(JournalError, match="the journal is no journal of a broker"):
        recovery.recovered([recovery.msgspec.msgpack.encode(first), *records[1:]], config)
    with pytest.raises(JournalError, match="the journal is no journal of a broker"):
        recovery.recovered([state], config)
