"""The trace of several processes: laws that Chrome's format and Perfetto want, and what is told."""

from __future__ import annotations

import itertools
import json
import signal
from collections import defaultdict
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zkv.alignment import Alignment
from zkv.errors import ConfigError
from zkv.spans import BATCHES, NETWORK, TRACKS, TRAINING, TURNS, UPDATES, Span, Spans
from zkv_cli import trace_file
from zkv_cli.trace_events import ROLES, Process, document
from zkv_net import tracing

times = st.floats(0, 10).flatmap(lambda a: st.tuples(st.just(a), st.none() | st.floats(a, 12)))
spans = st.builds(
    lambda track, name, at: Span(track, name, *at),
    st.sampled_from([*TRACKS, "of somebody else"]),
    st.text(max_size=3),
    times,
)
alignments = st.none() | st.builds(Alignment, st.floats(-9, 9), st.floats(0, 1), st.just(1))
processes = st.builds(
    Process,
    st.sampled_from(ROLES),
    st.integers(0, 3),
    st.just("name"),
    st.just("host"),
    st.integers(1, 5),
    st.lists(spans, max_size=12),
    alignments,
)


def process(role: str, number: int, *some: Span, ahead_s: float = 0.0, **more: int) -> Process:
    known = Alignment(-ahead_s, 0.001, 3)
    return Process(role, number, f"{role}-{number}", "host", 7, some, known, **more)


@given(st.lists(processes, max_size=5))
def test_tracks_are_unique_named_and_nest_and_all_that_was_left_is_there(some):
    plain = json.loads(json.dumps(document(some)))
    events = plain["traceEvents"]
    drawn = [event for event in events if event["ph"] in "Xi"]
    assert len(drawn) == sum(len(one.spans) for one in some)
    assert all(event["ts"] >= 0 and event.get("dur", 0) >= 0 for event in drawn)
    assert [e["ts"] for e in events if e["ph"] != "M"] == sorted(
        e["ts"] for e in events if e["ph"] != "M"
    )
    tracks = defaultdict(list)
    for event in drawn:
        tracks[event["pid"], event["tid"]].append(event)
    named = [(e["pid"], e["tid"]) for e in events if e["ph"] == "M" and e["name"] == "thread_name"]
    assert sorted(named) == sorted(tracks)
    # Perfetto takes a thread's number for the same thread in every process.
    assert len({tid for _, tid in tracks}) == len(tracks)
    for track in tracks.values():
        assert nests(track)


def nests(track: list[dict[str, float]]) -> bool:
    cut = [(e["ts"], e["ts"] + e.get("dur", 0.0)) for e in track]
    near = 1e-6  # Microseconds: `ts` + `dur` may round.
    return all(
        b0 >= a1 - near or a0 >= b1 - near or (a0 <= b0 + near and b1 <= a1 + near)
        or (b0 <= a0 + near and a1 <= b1 + near)
        for (a0, a1), (b0, b1) in itertools.combinations(cut, 2)
    )  # fmt: skip


def test_an_arrow_leads_from_the_send_to_the_sum_on_one_clock():
    """The worker's clock is 5 s ahead; one push has no sum, and one sum no push: no arrow."""
    worker = process(
        "worker",
        1,
        Span(NETWORK, "send 0", 6.0, 6.5, {}, ("9.0.1.0",)),
        Span(NETWORK, "send 1", 6.0, 6.5, {}, ("9.0.1.1",)),
        ahead_s=5.0,
        incarnation=9,
    )
    server = process("server", 0, Span(UPDATES, "sum 1", 1.25, 2, {}, (), ("9.0.1.0", "8.0.1.0")))
    broker = process("broker", 0, Span(TURNS, "grant", 0.5, None, {"incarnation": 9}))
    plain = document([worker, server, broker])
    by_kind = defaultdict(list)
    for event in plain["traceEvents"]:
        by_kind[event["ph"]].append(event)
    (start,), (end,) = by_kind["s"], by_kind["f"]
    assert (start["id"], start["cat"], start["name"]) == (end["id"], end["cat"], end["name"])
    assert (start["ts"], end["ts"], end["bp"]) == (500_000.0, 750_000.0, "e")
    at = {(e["pid"], e["tid"], e["ts"]): e["name"] for e in by_kind["X"]}
    assert at[start["pid"], start["tid"], start["ts"]] == "send 0"
    assert at[end["pid"], end["tid"], end["ts"]] == "sum 1"
    # What is known of an incarnation is whose it is.
    assert by_kind["i"][0]["args"] == {"worker": 1}
    names = [e["args"]["name"] for e in by_kind["M"] if e["name"] == "process_name"]
    assert [name.split(" (")[0] for name in names] == ["broker", "server 0", "worker 1"]


def test_sends_that_overlap_have_lanes_and_calls_within_calls_have_one():
    several = [Span(NETWORK, "a", 0, 3), Span(NETWORK, "b", 1, 2), Span(BATCHES, "c", 0, 3)]
    nested = [Span(TRAINING, "compute", 0, 3), Span(TRAINING, "push", 1, 2)]
    plain = document([process("worker", 0, *several, *nested)])
    names = [e["args"]["name"] for e in plain["traceEvents"] if e["name"] == "thread_name"]
    assert names == ["training", "network", "network 2", "batches"]


def left(folder: Path, role: str, number: int, events_max: int = 9, known: bool = True) -> None:
    some = Spans(lambda: 1.0, events_max=events_max)
    for _ in range(3):
        some.span(TRAINING, "compute", 0.0, 1.0, batch=1)
    alignment = Alignment(0.5, 0.001, 2) if known else None
    about = {"name": "n", "host": "h"}
    tracing.write(str(folder), role, number, some, alignment, about)


def test_a_file_says_what_is_not_in_it(tmp_path, capsys):
    left(tmp_path, "worker", 0)
    left(tmp_path, "worker", 2, events_max=2)
    left(tmp_path, "server", 0, known=False)
    left(tmp_path, "broker", 0)
    (tmp_path / "worker-9-broken.jsonl").write_bytes(b"{")
    trace_file.finish(tmp_path, tmp_path / "t.json", range(3), 2)
    plain = json.loads((tmp_path / "t.json").read_text("utf-8"))
    missing = plain["otherData"]["missing"]
    assert len(missing) == 5
    for text, part in zip(
        missing,
        (
            "worker-9-broken.jsonl cannot be read",
            "worker 1: it was killed",
            "server 1: it was killed",
            "worker 2: its first 1 spans were dropped",
            "server 0: no round trip",
        ),
        strict=True,
    ):
        assert part in text
    said = capsys.readouterr().out
    assert "t.json has 11 events of 4 processes" in said
    assert "worker 0: +500.000 ms, give or take 1.000 ms (the shortest of 2 round trips)" in said
    assert "server 0: not aligned" in said
    assert all(f"missing: {text}" in said for text in missing)
    assert "ui.perfetto.dev" in said
    assert [path.name for path in tmp_path.glob("*.part")] == []


def test_no_spans_make_no_file(tmp_path, capsys):
    trace_file.finish(tmp_path, tmp_path / "t.json", range(1), 1)
    assert not (tmp_path / "t.json").exists()
    assert "there is no trace" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["", "no/such/trace.json"])
def test_an_output_that_cannot_be_written_is_found_before_the_run(tmp_path, name):
    with pytest.raises(ConfigError, match="--output"):
        trace_file.check_writable(tmp_path / name)


def test_without_a_folder_nothing_is_recorded():
    assert tracing.recorder("") is None
    assert tracing.beat_s("") == 0.5


def test_a_folder_that_takes_nothing_is_a_warning(tmp_path, caplog):
    left(tmp_path / "absent", "worker", 0)
    assert "the spans of worker 0 are lost" in caplog.text


def test_a_bound_on_sends_that_nobody_answers(monkeypatch):
    from zkv.data_messages import Ack, Push
    from zkv.wire import MODEL, ContributionId

    monkeypatch.setattr(tracing, "SENDS_MAX", 2)
    ticks = itertools.count()
    recorded = Spans(lambda: float(next(ticks)))
    sends = tracing.Sends(recorded)
    name = ContributionId(5, MODEL, 1)
    for bid in (0, 1, 1, 2):
        sends.push(0, Push(name, 1, bid, "none", 0), None)
    sends.acknowledged(Ack(0, 5, [(name, bid) for bid in (0, 1, 2, -1)]))
    found = [(span.name, span.start_s) for span in recorded.kept]
    # The first send of what was sent twice counts; the oldest had to go.
    assert found == [("send 1", 1.0), ("send 2", 2.0)]


def test_a_programs_own_word_on_sigterm_is_left_alone():
    before = signal.getsignal(signal.SIGTERM)

    def mine(number: int, frame: object) -> None:
        raise AssertionError(number, frame)

    signal.signal(signal.SIGTERM, mine)
    try:
        tracing.before_sigterm(lambda: None)
        assert signal.getsignal(signal.SIGTERM) is mine
    finally:
        signal.signal(signal.SIGTERM, before)
