"""Settings of the command: what wins, that all mistakes are found at once, and their places."""

from __future__ import annotations

import json
import logging
import math
import os
import sys
from datetime import datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zkv.errors import ConfigError
from zkv_cli.cluster import command_line
from zkv_cli.export import key_of, name_of
from zkv_cli.launch import Job, environment, for_job, patience, told
from zkv_cli.loading import broker_asked
from zkv_cli.logs import JsonFormatter
from zkv_cli.roles import broker_config, server_config
from zkv_cli.settings import live_changes, load, seconds, size
from zkv_cli.tables import table
from zkv_workers.model import session_config


@pytest.fixture(autouse=True)
def clean(monkeypatch, tmp_path):
    """No settings from outside: an empty folder, and no variables of ours."""
    monkeypatch.chdir(tmp_path)
    for name in list(os.environ):
        if name.upper().startswith("ZKV_"):
            monkeypatch.delenv(name)


def write(text: str, name: str = "zkv.toml") -> Path:
    path = Path(name)
    path.write_text(text, "utf-8")
    return path


# --- laws ------------------------------------------------------------------------------------


@given(st.integers(0, 2**39), st.sampled_from(["", "B", "KiB", "MiB", "GiB", "kB", "MB", "GB"]))
def test_a_size_is_its_number_times_its_unit(number, unit):
    factor = {"": 1, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
    factor |= {"kB": 10**3, "MB": 10**6, "GB": 10**9}
    assert size(f"{number}{unit}") == size(f" {number} {unit} ") == number * factor[unit]


@given(st.text(max_size=20))
def test_any_text_is_a_size_or_a_value_error(text):
    try:
        assert size(text) >= 0
    except ValueError as error:
        assert repr(text) in str(error)  # noqa: PT017 - both outcomes are right


@given(st.floats())
def test_a_time_is_above_zero_and_finite(value):
    if value > 0 and math.isfinite(value):
        assert seconds(value) == value
    else:
        with pytest.raises(ValueError, match="above 0 and finite"):
            seconds(value)


keys = st.integers(0, 2**63 - 1) | st.text(max_size=20)
keys |= st.sampled_from(["int:7", "str:int:7", "str:", "7", "__metadata__"])


@given(keys, keys)
def test_names_in_a_file_tell_keys_apart(one, other):
    assert key_of(name_of(one)) == one
    assert type(key_of(name_of(one))) is type(one)
    assert (name_of(one) == name_of(other)) == (one == other and type(one) is type(other))


@given(
    st.sampled_from(["flag", "variable", "file", "default"]),
    st.sampled_from(["flag", "variable", "file", "default"]),
)
def test_what_is_nearer_wins(one, other):
    order = ["flag", "variable", "file", "default"]
    names = {"flag": "asp", "variable": "ssp:1", "file": "k-asp:2", "default": "bsp"}
    given_at = {one, other}
    with pytest.MonkeyPatch.context() as patch:
        Path("zkv.toml").unlink(missing_ok=True)
        if "file" in given_at:
            write('[broker]\npolicy = "k-asp:2"\n')
        if "variable" in given_at:
            patch.setenv("ZKV_BROKER__POLICY", "ssp:1")
        flags = {("broker", "policy"): "asp" if "flag" in given_at else None}
        assert load(flags).broker.policy == names[min(given_at, key=order.index)]


# --- cases -----------------------------------------------------------------------------------


def test_layers_are_merged_key_by_key(monkeypatch):
    write('[broker]\nservers = 3\npolicy = "asp"\n[server]\nbudget = "2GiB"\n')
    monkeypatch.setenv("ZKV_BROKER__WORKERS", "4")
    settings = load({("broker", "policy"): "ssp:2"})
    broker = settings.broker
    assert (broker.servers, broker.workers, broker.policy) == (3, 4, "ssp:2")
    assert settings.server.budget == 2 * 2**30


def test_the_address_variable_is_no_section(monkeypatch):
    monkeypatch.setenv("ZKV_BROKER", "tcp://10.0.0.2:5555")
    monkeypatch.setenv("ZKV_BROKER__SERVERS", "2")
    settings = load()
    assert settings.join.broker == "tcp://10.0.0.2:5555"
    assert settings.broker.servers == 2
    flags = {("join", "broker"): "tcp://10.0.0.3:5555"}
    assert load(flags).join.broker == "tcp://10.0.0.3:5555"


@pytest.mark.parametrize(
    ("bind", "address"),
    [
        ("tcp://127.0.0.1:5555", "tcp://127.0.0.1:5555"),
        ("tcp://0.0.0.0:6000", "tcp://127.0.0.1:6000"),
        ("tcp://[::]:6000", "tcp://[::1]:6000"),
        ("tcp://10.0.0.2:6000", "tcp://10.0.0.2:6000"),
    ],
)
def test_who_is_asked_by_default_is_this_machines_broker(bind, address):
    assert broker_asked(load({("broker", "bind"): bind})) == address
    named = {("broker", "bind"): bind, ("join", "broker"): "tcp://10.0.0.9:1"}
    assert broker_asked(load(named)) == "tcp://10.0.0.9:1"
    with pytest.raises(ConfigError, match="no broker is named"):
        broker_asked(load({("broker", "bind"): "tcp://127.0.0.1:0"}))


def test_three_mistakes_in_a_file_are_three_lines_with_their_places():
    path = write(
        "# a comment\n[broker]\npolicy = 'bps'\nservers = 0\n\n[server]\nbudgte = '2GiB'\n",
        "my.toml",
    )
    with pytest.raises(ConfigError) as caught:
        load(file=path)
    first, *rest = str(caught.value).splitlines()
    rest.sort()
    assert first == "3 mistakes in the configuration:"
    assert len(rest) == 3
    assert rest[0].startswith(
        "  my.toml, line 3, [broker] policy: policy 'bps' is none of bsp, asp"
    )
    assert rest[1].startswith("  my.toml, line 4, [broker] servers: ")
    assert "greater than or equal to 1" in rest[1]
    assert rest[2].startswith("  my.toml, line 7, [server] budgte: there is no such setting")
    assert "budget" in rest[2]


def test_mistakes_of_all_layers_are_named_by_where_they_were_made(monkeypatch):
    write('[log]\nformat = "xml"\n')
    monkeypatch.setenv("ZKV_SERVER__BUDGET", "2 buckets")
    monkeypatch.setenv("ZKV_SERVR__BUDGET", "1GiB")
    with pytest.raises(ConfigError) as caught:
        load({("broker", "worker_lost_s"): -1.0, ("broker", "bind"): "10.0.0.2:5555"})
    text = str(caught.value)
    assert text.startswith("5 mistakes")
    assert "--worker-lost: -1.0 s: a time must be above 0" in text
    assert "--bind: address '10.0.0.2:5555' does not begin with tcp://" in text
    assert "environment variable ZKV_SERVER__BUDGET: size '2 buckets'" in text
    assert "environment variable ZKV_SERVR__BUDGET: there is no such section" in text
    assert "zkv.toml, line 2, [log] format: " in text
    assert "'xml'" in text


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[broker\n", "not a TOML file"),
        ("[worker]\nx = 1\n", "there is no such section; there are: broker, server"),
        ('broker = "tcp://10.0.0.2:5555"\n', "line 1"),
        ('[join]\nbroker = "tcp://10.0.0.2:0"\n', "nothing can be reached at port 0"),
        ('[broker]\noptimizer = "sgd:lr=fast"\n', "sgd:lr=fast"),
        ('[broker]\nbind = "tcp://nowhere"\n', "has no host and port"),
    ],
)
def test_a_wrong_file_is_named(text, words):
    write(text)
    with pytest.raises(ConfigError) as caught:
        load()
    assert "zkv.toml" in str(caught.value)
    assert words in str(caught.value)


def test_a_file_that_is_asked_for_must_be_there():
    with pytest.raises(ConfigError, match=r"absent\.toml: cannot be read"):
        load(file=Path("absent.toml"))


def test_settings_survive_the_command_line_of_a_child():
    settings = load(
        {
            ("broker", "servers"): 2,
            ("broker", "insecure"): True,
            ("broker", "server_lost_s"): 2.5,
            ("broker", "optimizer"): "sgd:lr=0.1;*.bias:weight_decay=0",
        }
    )
    line = command_line("broker", settings.broker, {"log-level": "warning"})
    assert "--insecure" in line
    assert {"--servers=2", "--server-lost=2.5", "--log-level=warning"} < set(line)
    assert "--optimizer=sgd:lr=0.1;*.bias:weight_decay=0" in line
    assert not any(word.startswith(("--data-bind", "--advertise")) for word in line)


def test_a_placement_is_checked_with_the_number_of_servers():
    given = {("broker", "servers"): 2, ("broker", "placement"): "by_size; bytes=2048KiB;pin:w=1"}
    section = load(given).broker
    assert section.placement == "by_size;pin:w=1;bytes=2MiB"
    assert f"--placement={section.placement}" in command_line("broker", section, {})
    assert load().broker.placement == "by_size"
    with pytest.raises(ConfigError, match=r"--placement: placement .*: pin:w=1 names no server"):
        load({("broker", "placement"): "by_size;pin:w=1"})
    with pytest.raises(ConfigError, match="--placement: placement 'by_name': 'by_name' is no rule"):
        load({("broker", "placement"): "by_name"})


def test_live_changes_are_checked_before_any_is_made():
    assert live_changes(["lr=0.01", "policy=ssp:2"]) == [("lr", "0.01"), ("policy", "ssp:2")]
    with pytest.raises(ConfigError) as caught:
        live_changes(["lr=-1", "policy=bps", "momentum=0.9", "lr=0.1"])
    text = str(caught.value)
    assert text.startswith("3 mistakes")
    assert "'lr=-1'" in text
    assert "bps" in text
    assert "'momentum=0.9': valid are lr, policy, staleness, codec, codec_down" in text


def test_a_codec_for_parameters_has_no_memory_and_the_same_bits_everywhere():
    assert live_changes(["codec_down=int8;small=0"]) == [("codec_down", "int8;small=0")]
    assert load({("broker", "codec_down"): "int8;w=none"}).broker.codec_down == "int8;w=none"
    for text, why in (("int8+ef", "by themselves; give int8"), ("powersgd:2", "on every machine")):
        with pytest.raises(ConfigError, match=why):
            live_changes([f"codec_down={text}"])
        with pytest.raises(ConfigError, match=f"--codec-down: .*{why}"):
            load({("broker", "codec_down"): text})


def test_workers_get_what_torchrun_would_set(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    job = Job(("train.py",), count=2, first_rank=3, world=8, report=Path("out"))
    variables = environment(job, 1, "tcp://10.0.0.2:5555")
    assert variables["ZKV_BROKER"] == "tcp://10.0.0.2:5555"
    assert (variables["RANK"], variables["LOCAL_RANK"]) == ("4", "1")
    assert (variables["WORLD_SIZE"], variables["LOCAL_WORLD_SIZE"]) == ("8", "2")
    assert variables["ZKV_NAME"] == "worker-4"
    assert variables["ZKV_REPORT"] == str(Path("out").resolve())
    assert int(variables["OMP_NUM_THREADS"]) >= 1
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert "OMP_NUM_THREADS" not in environment(job, 1, "tcp://10.0.0.2:5555")


def test_workers_are_told_how_patient_to_be():
    assert patience(load().run) == {}
    flags = {("run", "narrate_after_s"): 0.5, ("run", "stall_timeout_s"): 90}
    variables = patience(load(flags).run)
    assert variables == {"ZKV_NARRATE_AFTER_S": "0.5", "ZKV_WAIT_TIMEOUT_S": "90"}
    with pytest.raises(ConfigError, match=r"--stall-timeout: 0.0 s: a time must be above 0"):
        load({("run", "stall_timeout_s"): 0})


def test_data_sockets_are_settings_of_every_process():
    """An option of `zkv run` is for its cluster and its workers."""
    assert told(load().run) == {}
    sections = ("broker", "server", "run")
    flags = {(section, "io_threads"): 2 for section in sections}
    flags |= {(section, "socket_buffer"): "96KiB" for section in sections}
    settings = load(flags)
    for role in ("broker", "server"):
        line = command_line(role, getattr(settings, role), {})
        assert {"--io-threads=2", "--socket-buffer=98304"} < set(line)
    assert told(settings.run) == {"ZKV_IO_THREADS": "2", "ZKV_SOCKET_BYTES": "98304"}
    assert told(load({("run", "stall_timeout_s"): 9}).run) == {"ZKV_WAIT_TIMEOUT_S": "9"}
    assert broker_config(settings.broker).socket_bytes == 98304
    assert server_config(settings.server, "tcp://127.0.0.1:1").socket_bytes == 98304
    assert broker_config(settings.broker).io_threads == 2
    assert server_config(settings.server, "tcp://127.0.0.1:1").io_threads == 2


def test_an_option_of_several_sections_is_one_mistake():
    flags = {(section, "io_threads"): 0 for section in ("broker", "server", "run")}
    with pytest.raises(ConfigError, match=r"^--io-threads: .*greater than or equal to 1"):
        load(flags)
    with pytest.raises(ConfigError, match=r"^--socket-buffer: socket buffers of 2147483648 bytes"):
        load({("server", "socket_buffer"): "2GiB"})


def test_a_worker_reads_its_patience_from_the_environment(monkeypatch):
    monkeypatch.setenv("ZKV_NARRATE_AFTER_S", "0.5")
    monkeypatch.setenv("ZKV_WAIT_TIMEOUT_S", "90")
    config, _ = session_config("tcp://10.0.0.2:5555")
    assert (config.narrate_after_s, config.wait_timeout_s) == (0.5, 90)
    config, _ = session_config("tcp://10.0.0.2:5555", narrate_after_s=7, wait_timeout_s=8)
    assert (config.narrate_after_s, config.wait_timeout_s) == (7, 8)
    monkeypatch.setenv("ZKV_NARRATE_AFTER_S", "soon")
    with pytest.raises(ConfigError, match="ZKV_NARRATE_AFTER_S='soon' is not a number"):
        session_config("tcp://10.0.0.2:5555")


def test_a_jobs_own_cluster_takes_any_port_and_awaits_its_workers():
    job = Job(("train.py",), count=3, first_rank=0, world=3)
    own = for_job(load(), job)
    assert (own.broker.bind, own.broker.workers, own.log.level) == (
        "tcp://127.0.0.1:0",
        3,
        "warning",
    )
    chosen = load(
        {
            ("broker", "bind"): "tcp://127.0.0.1:6000",
            ("broker", "workers"): 2,
            ("log", "level"): "debug",
        }
    )
    own = for_job(chosen, job)
    assert (own.broker.bind, own.broker.workers, own.log.level) == (
        "tcp://127.0.0.1:6000",
        2,
        "debug",
    )


def test_a_table_is_as_wide_as_its_cells():
    assert table(("a", "name"), [("10", "x"), ("7", "")]) == ["a   name", "10  x", "7"]


def test_a_log_for_machines_is_one_object_a_line():
    try:
        raise LookupError("my own")
    except LookupError:
        record = logging.LogRecord("zkv.x", 30, "", 0, "a %s\nb", ("ß",), sys.exc_info())
    line = JsonFormatter().format(record)
    assert "\n" not in line
    plain = json.loads(line)
    assert (plain["level"], plain["logger"], plain["message"]) == ("warning", "zkv.x", "a ß\nb")
    assert plain["error"].endswith("LookupError: my own")
    assert datetime.fromisoformat(plain["time"]).tzinfo is not None
