"""The threats that a cluster is made for, row by row: each has a named test, here or elsewhere.

Rows are those of the project's list of threats and failures. What is live and long stands by
itself: networks that break (`test_partitions.py`), processes that are short of something
(`test_starved.py`), loops that hang (`test_watchdog.py`).
"""

from __future__ import annotations

import ast
import asyncio
import json
import os
import socket as sockets
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from harness import cluster, until
from keyrings import Keys, safe
from processes import Launched, launched, program

from zkv.errors import NotAuthorised

TESTS = Path(__file__).resolve().parent.parent
LOOPBACK = "127.0.0.1"
ROWS = {
    "1 malformed header or payload": (
        "core/test_fuzz_frames.py::test_spoiled_frames_change_nothing_and_end_nothing",
        "codecs/test_fuzz.py::test_spoiled_payloads_are_refused_or_decode_to_numbers",
        "cluster/test_bad_input.py::test_strange_frames_cost_only_their_sender",
        "cluster/test_limits_live.py::test_messages_that_are_none_end_their_connection",
    ),
    "2 oversize frame, endless message, slow loris": (
        "cluster/test_bad_input.py::test_a_frame_above_the_limit_ends_only_its_connection",
        "cluster/test_threats.py::test_a_message_of_too_many_frames_is_not_looked_at",
        "cluster/test_threats.py::test_who_never_ends_its_handshake_is_ended",
        "cluster/test_limits_live.py::test_connections_above_the_limit_are_ended_and_the_others_stay",
    ),
    "3 replayed push": (
        "cluster/test_simulated.py::test_with_faults_nothing_is_lost_and_nothing_counts_twice",
        "cluster/test_threats.py::test_a_push_that_is_sent_again_counts_once",
    ),
    "4 out of order, gaps": (
        "cluster/test_simulated.py::test_with_faults_nothing_is_lost_and_nothing_counts_twice",
    ),
    "5 stale worker": (
        "cluster/test_elastic.py::test_whoever_goes_in_mid_batch_leaves_nothing_and_holds_nobody",
    ),
    "6 identity spoofed": (
        "cluster/test_keys_safe_live.py::test_a_name_belongs_to_its_key",
        "cluster/test_keys_safe_live.py::test_a_workers_key_cannot_push_for_another_worker",
        "cluster/test_keys_safe_live.py::test_a_packet_in_another_peers_name_is_dropped",
        "cluster/test_keys_safe_live.py::test_a_worker_believes_no_other_key_than_its_companions",
    ),
    "7 unauthenticated peer": (
        "cluster/test_keys_safe_live.py::test_without_keys_nobody_gets_in_where_they_are_asked_for",
        "cluster/test_keys_safe_live.py::test_nobody_new_gets_in_while_the_gate_is_closed",
        "cluster/test_keys_safe_live.py::test_a_revoked_key_is_cut_off_and_the_others_go_on",
        "cluster/test_threats.py::test_no_byte_of_a_stranger_is_read",
    ),
    "8 slow reader": (
        "cluster/test_slow_reader.py::test_a_worker_that_does_not_read_costs_a_version_and_a_window",
    ),
    "9 abuse of names": (
        "cluster/test_threats.py::test_names_and_keys_never_become_paths_or_formats",
        "core/test_keys.py::test_no_name_is_a_path",
        "core/test_limits.py::test_a_model_has_so_many_keys",
    ),
    "10 pickle, code": (
        "test_architecture.py::test_no_bytes_become_code",
        "cluster/test_threats.py::test_optimizers_and_codecs_are_names_in_a_list",
    ),
    "11 clock skew": ("cluster/test_threats.py::test_clocks_that_are_days_apart_do_not_matter",),
    "12 half-open TCP": (
        "cluster/test_partitions.py::"
        "test_row_12_and_13_what_is_cut_is_named_and_goes_on_when_it_heals",
    ),
    "13 partitions, both ways and one way": (
        "cluster/test_partitions.py::"
        "test_row_12_and_13_what_is_cut_is_named_and_goes_on_when_it_heals",
        "cluster/test_nemesis.py::"
        "test_nothing_acknowledged_is_lost_or_doubled_whoever_dies_and_whatever_is_cut",
        "cluster/test_moves_live.py::test_servers_that_cannot_reach_each_other_do_by_way_of_the_broker",
    ),
    "14 broker crash in a loop": (
        "cluster/test_broker_restart_processes.py::"
        "test_bsp_ends_with_the_bits_of_a_run_that_was_never_interrupted",
        "cluster/test_broker_restart_processes.py::test_asp_counts_every_contribution_once",
        "cluster/test_simulated_broker.py::test_under_every_policy_a_broker_that_dies_loses_and_doubles_nothing",
    ),
    "15 server crash in mid-aggregation": (
        "cluster/test_simulated_replicas.py::"
        "test_copies_take_over_and_nothing_that_was_acknowledged_is_lost",
        "cluster/test_simulated_replicas.py::"
        "test_what_is_ahead_of_the_log_and_sums_that_are_asked_for_go_on",
        "cluster/test_simulated_rollback.py::"
        "test_with_faults_all_go_back_together_and_on_from_there",
        "cluster/test_cli.py::test_local_server_that_crashes_is_named_to_the_workers",
        "cluster/test_public_cases.py::"
        "test_d27_a_server_that_dies_takes_all_back_to_the_snapshot_with_another_one",
    ),
    "16 worker crash in mid-push": (
        "cluster/test_victims.py::test_a_worker_that_is_killed_in_mid_backward_leaves_nothing_of_that_batch",
    ),
    "17 disk full, read-only, failing": (
        "cluster/test_starved.py::row_17_snapshots_that_a_disk_has_no_room_for",
        "cluster/test_starved.py::row_17_a_journal_that_a_disk_has_no_room_for",
        "core/test_snapshot_folder.py::"
        "test_what_fails_on_the_way_leaves_the_old_one_and_nothing_of_the_new",
        "core/test_snapshot_folder.py::test_row_17_a_device_that_is_full_leaves_the_old_one",
        "core/test_journal.py::test_a_disk_that_is_full_or_fails_ends_it_and_says_what_to_do",
    ),
    "18 SIGTERM": ("cluster/test_launch.py::test_a_signal_ends_up_and_the_port_is_free_at_once",),
    "19 limit of descriptors": (
        "cluster/test_starved.py::row_19_no_descriptor_is_left",
        "cluster/test_descriptors_live.py::"
        "test_a_limit_that_members_would_use_up_is_refused_at_the_start",
        "cluster/test_descriptors_live.py::test_row_19_under_256_a_broker_has_room_for_96",
    ),
    "20 limit of memory": (
        "cluster/test_starved.py::row_20_a_model_that_there_is_no_memory_for",
        "cluster/test_short_of_memory.py::"
        "test_a_push_that_there_is_no_memory_for_costs_that_contribution_alone",
        "cluster/test_short_of_memory.py::"
        "test_a_server_that_has_no_memory_for_an_update_ends_the_run_with_its_reason",
    ),
    "21 hung loop, held lock": (
        "cluster/test_watchdog.py::test_row_21_a_loop_that_hangs_is_told_once_with_where_it_stands",
        "cluster/test_watchdog.py::test_row_21_code_that_holds_pythons_lock_is_found_without_it",
        "cluster/test_public_cases.py::"
        "test_d28_who_computes_is_not_dead_and_who_holds_pythons_lock_is_told_so",
        "cluster/test_stopped.py::"
        "test_a_worker_that_stands_still_for_too_long_is_evicted_and_nothing_counts_twice",
    ),
    "22 cancelled task of a user": (
        "cluster/test_lifecycle_live.py::test_answers_after_cancelled_pulls_belong_to_their_requests",
    ),
    "23 misuse of threads and forks": (
        "cluster/test_victims.py::test_a_fork_is_named_in_asyncio_too",
    ),
}


@pytest.mark.source
@pytest.mark.parametrize("row", ROWS)
def test_each_row_has_its_tests(row: str) -> None:
    for name in ROWS[row]:
        file, _, function = name.partition("::")
        tree = ast.parse((TESTS / file).read_text("utf-8"))
        names = {
            one.name
            for one in ast.walk(tree)
            if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)
        }
        assert function in names, f"{row}: {name}"


# --- 2 -------------------------------------------------------------------------------------------


@pytest.mark.one_loop
async def test_a_message_of_too_many_frames_is_not_looked_at(caplog, monkeypatch):
    async with cluster(1) as made, made.worker(0) as worker:
        await worker.init({"w": np.zeros(2, np.float32)}, rule="sgd:lr=1")
        seen = []
        monkeypatch.setattr(made.servers[0]._data, "_limited", seen.append)
        sender = worker._driver._data[0].socket
        sender.send_multipart([b""] + [b"x"] * 100)
        await until(lambda: "dropped a message of 10" in caplog.text)
        assert not [frames for frames in seen if len(frames) > 8]


@pytest.mark.one_loop
async def test_who_never_ends_its_handshake_is_ended(tmp_path, monkeypatch):
    monkeypatch.setattr("zkv_net.sockets.HANDSHAKE_MS", 200)
    async with safe(Keys(tmp_path)) as made:
        for address in (made.address, made.broker.data_address, made.servers[0].address):
            reader, writer = await asyncio.open_connection(LOOPBACK, int(address.split(":")[-1]))
            # A greeting that never goes on.
            writer.write(b"\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f")
            try:
                async with asyncio.timeout(10):
                    while await reader.read(100):
                        pass
            except ConnectionResetError:
                pass
            writer.close()


# --- 3 -------------------------------------------------------------------------------------------


@pytest.mark.one_loop
async def test_a_push_that_is_sent_again_counts_once(monkeypatch):
    async with cluster(1) as made, made.worker(0) as worker:
        post = worker._driver._post

        def thrice(server, frames):
            for _ in range(3):
                post(server, frames)

        monkeypatch.setattr(worker._driver.nearby, "_post", thrice)
        await worker.init({"w": np.zeros(2, np.float32)}, rule="sgd:lr=1")
        for _ in range(10):
            async with worker.batch() as batch:
                batch.push("w", np.ones(2, np.float32))
        await batch.wait()
        assert (await worker.pull("w")).tolist() == [-10.0, -10.0]


# --- 7 -------------------------------------------------------------------------------------------


@pytest.mark.one_loop
async def test_no_byte_of_a_stranger_is_read(tmp_path, monkeypatch):
    """Whoever has no key, or one that is not let in: nothing of it comes to any handler."""
    keys = Keys(tmp_path)
    keys.make("stranger", "worker", add=False)
    heard = []
    async with safe(keys) as made:
        broker, server = made.broker, made.servers[0]
        await until(lambda: broker.router.members.complete)
        before = len(broker.router.hub.peers())
        for listening in (broker._control, broker._relay._front, server._data):
            handle = listening._handle
            monkeypatch.setattr(
                listening, "_handle", lambda frames, h=handle: (heard.append(frames), h(frames))
            )
        known = {route for route in broker._control._links}
        for options in ({"keys": keys.folder("stranger")}, {}):
            with pytest.raises((NotAuthorised, TimeoutError)):
                await made.worker(0, connect_timeout_s=0.5, **options).connect()
        for address in (made.address, broker.data_address, server.address):
            with sockets.create_connection((LOOPBACK, int(address.split(":")[-1]))) as plain:
                plain.sendall(b"GET / HTTP/1.1\r\n\r\n" + os.urandom(500))
        strangers = [f for f in heard if f[0].bytes not in known and not f[-1].get("User-Id")]
        assert strangers == []
        assert len(broker.router.hub.peers()) == before


# --- 9 -------------------------------------------------------------------------------------------

ODD_NAMES = (
    "../../outside",
    "/etc/passwd",
    "a/b\\c",
    "%s%s%n{0.__class__}{x}",
    "$(touch outside)`touch outside`",
    "\x1b[31mred\n\r\t",
    "<b>&amp;",
    "con",
    "a" * 255,
)
ABUSE = """
import json, sys, numpy as np, zkv
names = json.loads(sys.argv[1])
with zkv.connect(name="../../outside" + chr(10) + "%s{0}") as worker:
    worker.init({name: np.zeros(2, np.float32) for name in names}, rule="sgd:lr=1")
    with worker.batch() as batch:
        for name in names:
            batch.push(name, np.ones(2, np.float32))
    batch.wait()
    values = worker.pull(names)
    print(all(value.tolist() == [-1.0, -1.0] for value in values.values()))
"""


@pytest.mark.cluster
def test_names_and_keys_never_become_paths_or_formats(tmp_path: Path) -> None:
    inside = tmp_path / "deep" / "inside"
    (inside / "trace").mkdir(parents=True)
    train = program(inside, ABUSE)
    environment = {"ZKV_REPORT": str(inside), "ZKV_TRACE": str(inside / "trace")}
    with launched("up", "--servers", "2", "--bind", "tcp://127.0.0.1:0", env=environment) as up:
        broker = up.line(r"broker at (tcp://\S+)")[1]
        run = Launched(
            *(sys.executable, train, json.dumps(ODD_NAMES)),
            env=environment | {"ZKV_BROKER": broker, "RANK": "0", "WORLD_SIZE": "1"},
        )
        assert run.end() == 0, run.text
        assert run.said[-1] == "True", run.text
        model = inside / "model.safetensors"
        for words in (("status",), ("status", "--json"), ("export", str(model))):
            done = subprocess.run(
                [sys.executable, "-m", "zkv_cli", *words, "--broker", broker],
                capture_output=True,
                text=True,
                timeout=30,
            )
            assert done.returncode == 0, done.stderr
    from safetensors.numpy import load_file

    assert set(load_file(model)) == set(ODD_NAMES)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["deep"]
    assert sorted(path.name for path in inside.parent.iterdir()) == ["inside"]
    assert not [path for path in inside.rglob("*") if "outside" in path.name]


# --- 10 ------------------------------------------------------------------------------------------


@pytest.mark.one_loop
@pytest.mark.parametrize(
    "text", ["os.system", "__import__('os')", "sgd:lr=__import__('os')", "x;y"]
)
async def test_optimizers_and_codecs_are_names_in_a_list(text):
    async with cluster(1) as made, made.worker(0) as worker:
        with pytest.raises(ValueError, match=r"rule|setting|number"):
            await worker.init({"w": np.zeros(2, np.float32)}, rule=text)
        await worker.init({"v": np.zeros(2, np.float32)}, rule="sgd:lr=1")
        for setting in ("codec", "codec_down", "policy", "staleness"):
            with pytest.raises(Exception, match=r".") as raised:
                await worker.set(**{setting: text})
            assert type(raised.value).__module__ == "zkv.errors"
        async with worker.batch() as batch:
            batch.push("v", np.ones(2, np.float32))
        assert await batch.wait() == "committed"


# --- 11 ------------------------------------------------------------------------------------------

SKEWED = """
import numpy as np, zkv
with zkv.connect() as worker:
    worker.init({"w": np.zeros(2, np.float32)}, rule="sgd:lr=1")
    for _ in range(5):
        with worker.batch() as batch:
            batch.push("w", np.ones(2, np.float32))
    batch.wait()
    print("reached", worker.pull("w").tolist())
"""


@pytest.mark.cluster
@pytest.mark.netns
@pytest.mark.parametrize("day_s", [86_400, 864_000])
def test_clocks_that_are_days_apart_do_not_matter(tmp_path: Path, day_s: int) -> None:
    later = ["unshare", "--time", f"--monotonic={day_s}", f"--boottime={day_s}", "--fork", "--"]
    works = subprocess.run([*later, "true"], capture_output=True)
    if works.returncode:
        pytest.skip(f"no time namespaces here: {works.stderr.decode()}")
    clock = [sys.executable, "-c", "import time; print(time.monotonic())"]
    here, there = (
        float(subprocess.run([*way, *clock], capture_output=True, check=True).stdout)
        for way in ([], later)
    )
    assert there - here > day_s - 100
    train = program(tmp_path, SKEWED)
    with launched("broker", "--bind", "tcp://127.0.0.1:0", "--servers", "1") as broker:
        address = broker.line(r"broker at (tcp://\S+)")[1]
        server = Launched(*later, sys.executable, "-m", "zkv_cli", "server", "--broker", address)
        try:
            server.line("server 0 of 1 is in")
            env = {"ZKV_BROKER": address}
            for way in ([], later):
                run = Launched(*way, sys.executable, train, env=env)
                assert run.end() == 0, run.text
                assert "reached" in run.said[-1]
        finally:
            for pid in server.session():
                os.kill(pid, 9)
            server.process.wait(10)
