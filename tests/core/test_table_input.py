"""Bad input about tables: a server refuses it with its reason, at the cost of its sender alone, and
a worker is told."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rig import Rig
from strategies import placed

from zkv import control as c
from zkv import data_messages as d
from zkv.dtypes import Array
from zkv.errors import KeyMismatch, ProtocolError
from zkv.layout import Layout
from zkv.optimizer_spec import optimizer
from zkv.table_layout import place_of
from zkv.tables import Table, part_of
from zkv.wire import (
    MODEL,
    PULLS,
    BlockSpec,
    ContributionId,
    KeyEntry,
    KeySpec,
    Segment,
    TableEntry,
    TableSpec,
)
from zkv_brokers.catalog import Catalog, Pending
from zkv_brokers.coding import Coding
from zkv_brokers.decisions import Decisions
from zkv_brokers.grants import ToWorker
from zkv_brokers.shard import FromWorker, ToBroker
from zkv_workers.config import SessionConfig
from zkv_workers.row_reads import RowReads
from zkv_workers.row_signals import AskRows

ROWS = 1000
TABLE = Table(2, initial="zeros", rows=ROWS, rule="sgd:lr=1").spec("emb")
ENTRY = TableEntry(9, TABLE, [90, 91])
BLOCKS = [BlockSpec(90, 0, []), BlockSpec(91, 1, [])]
IDS = np.arange(ROWS, dtype=np.uint64)
OWN = IDS[part_of(IDS, 2) == 0]
"""The rows of server 0."""
HONEST = 3


def rig_of_a_table() -> Rig:
    """Two servers with a key and a table; each worker has a grant, the honest one a pull too."""
    rig = Rig(placed([KeySpec("a", "float32", (2,))], 2))
    rig.init({0: np.zeros(2, np.float32)})
    rig.log(c.Init(2, 1, [], BLOCKS, False, (ENTRY,)))
    rig.layout.add([], BLOCKS, tables=(ENTRY,))
    rig.log(*(c.Grant(who, MODEL, 1, 0, []) for who in (1, 2, HONEST)))
    rig.log(c.Grant(HONEST, PULLS, 7, 0, [], rows=True))
    return rig


def payload(ids: Any, values: Any = None) -> Array:
    """Return rows as they travel."""
    numbers = np.asarray(ids, np.uint64)
    rows = np.ones((numbers.size, 2), np.float32) if values is None else values
    return np.concatenate([numbers.view(np.uint8), rows.reshape(-1).view(np.uint8)])


def push(rig: Rig, who: int, sent: Array, *, bid: int = 90, piece: int = 0, **more: Any) -> None:
    message = d.Push(ContributionId(who, MODEL, 1), 1, place_of(bid, piece), "none", 0)
    rig.data(
        0, d.Push(*[more.get(n, getattr(message, n)) for n in message.__struct_fields__]), sent
    )


# --- what is pushed ----------------------------------------------------------------------------


def spoiled(at: int) -> Array:
    values = np.ones((3, 2), np.float32)
    values[at, 1] = np.nan
    return values


ELSEWHERE = int(IDS[part_of(IDS, 2) == 1][0])


@pytest.mark.parametrize(
    ("sent", "more", "says"),
    [
        (payload([OWN[3], OWN[2]]), {}, f"row {OWN[2]} stands behind row {OWN[3]}: they must"),
        (payload([OWN[2], OWN[2]]), {}, f"row {OWN[2]} stands twice"),
        (payload([OWN[0], ROWS]), {}, f"row {ROWS} is out of range: the table has rows 0 to 999"),
        (payload([2**64 - 1]), {}, f"row {2**64 - 1} is out of range"),
        (payload([ELSEWHERE]), {}, f"row {ELSEWHERE} is not of part 0 of 2"),
        (payload(OWN[:3])[:-1], {}, "47 bytes are no rows of 16 bytes"),
        (payload(OWN[:3], spoiled(1)), {}, f"the gradient of row {OWN[1]} has NaN or Inf"),
        (payload(OWN[:3]), {"codec": "int8"}, "codec 'int8' cannot be used for rows"),
        (payload(OWN[:3]), {"form": d.Form(1, "", 0, 0)}, "cannot be used for rows"),
        (payload([ELSEWHERE]), {"bid": 91}, "server 0 holds no block 91"),
        (payload(OWN[:3]), {"bid": 77}, "server 0 holds no block 77"),
    ],
)
def test_what_makes_no_sense_voids_its_contribution_and_no_other(
    sent: Array, more: dict[str, Any], says: str
) -> None:
    rig = rig_of_a_table()
    push(rig, HONEST, payload(OWN[:4]))
    push(rig, 1, sent, **more)
    ((server, void),) = rig.said(c.Void)
    assert (server, void.contribution.incarnation) == (0, 1)
    assert void.key == ("?" if "holds no" in says else "emb")
    assert says in void.reason
    finish(rig, HONEST, [90])
    rig.log(c.Commit(MODEL, 1, [c.Counted(ContributionId(HONEST, MODEL, 1), 1.0)], None))
    part = rig.shards[0].tables.parts[90]
    assert part.arrays()[0].tolist() == OWN[:4].tolist()
    assert (part.arrays()[1] == -1).all()


def finish(rig: Rig, who: int, places: list[int]) -> None:
    for server in range(2):
        end = d.Done(ContributionId(who, MODEL, 1), 1, 1.0, [], [0], 0)
        rig.data(server, end if server else d.Done(end.contribution, 1, 1.0, places, [0], 0))


def held(rig: Rig) -> list[int]:
    """Return the servers that hold all of a contribution, in the order in which they said so."""
    said = [(server, name) for server, one in rig.said(c.Held) for name, _ in one.contributions]
    return [server for server, name in said if name.group == MODEL]


def test_a_contribution_is_complete_with_its_last_piece() -> None:
    rig = rig_of_a_table()
    finish(rig, 1, [90, place_of(90, 1)])
    assert held(rig) == [1]
    push(rig, 1, payload(OWN[:4]), piece=1)
    push(rig, 1, payload(OWN[:4]), piece=1)
    assert held(rig) == [1]
    push(rig, 1, payload(OWN[:4]))
    assert held(rig) == [1, 0]
    # What was not named by the end is no part of it.
    push(rig, 1, payload(OWN[4:5]), piece=2)
    rig.log(c.Commit(MODEL, 1, [c.Counted(ContributionId(1, MODEL, 1), 1.0)], None))
    part = rig.shards[0].tables.parts[90]
    assert part.arrays()[0].tolist() == OWN[:4].tolist()
    assert (part.arrays()[1] == -2).all()


# --- what is asked -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bid", "sent", "says"),
    [
        (90, OWN[[3, 2]].view(np.uint8), f"table 'emb': row {OWN[2]} stands behind row {OWN[3]}"),
        (90, OWN[[2, 2]].view(np.uint8), f"table 'emb': row {OWN[2]} stands twice"),
        (90, np.asarray([ROWS], np.uint64).view(np.uint8), f"table 'emb': row {ROWS} is out of"),
        (90, np.asarray([ELSEWHERE], np.uint64).view(np.uint8), "is not of part 0 of 2"),
        (90, np.zeros(9, np.uint8), "9 bytes are no row numbers"),
        (
            90,
            np.zeros(8 * 70_000, np.uint8),
            "70000 rows are asked for at once; 65536 are the most",
        ),
        (91, OWN[:1].view(np.uint8), "there is no part of a table in block 91"),
    ],
)
def test_whoever_asks_nonsense_is_answered_why(bid: int, sent: Array, says: str) -> None:
    rig = rig_of_a_table()
    rig.data(0, d.AskRows(1, MODEL, 1, bid, 5, 0), sent)
    ((_, rows),) = rig.said(d.Rows)
    assert (rows.incarnation, rows.number) == (1, 5)
    assert says in rows.refused
    rig.data(0, d.AskRows(1, MODEL, 1, 90, 6, 0), OWN[:2].view(np.uint8))
    assert [(one.number, one.refused) for _, one in rig.said(d.Rows)][1:] == [(6, "")]


def test_nothing_is_answered_under_a_grant_that_is_over() -> None:
    rig = rig_of_a_table()
    ids = OWN[:2].view(np.uint8)

    def answered(who: int, group: int, grant: int) -> bool:
        before = len(rig.said(d.Rows))
        rig.data(0, d.AskRows(who, group, grant, 90, 5, 0), ids)
        return len(rig.said(d.Rows)) > before

    assert answered(1, MODEL, 1)
    assert answered(HONEST, PULLS, 7)
    assert not answered(1, MODEL, 2)
    assert not answered(1, PULLS, 7)
    rig.log(c.Discard(1, MODEL, 1, -1), c.Discard(HONEST, PULLS, 7, -1))
    finish(rig, 2, [])
    for who, group, grant in ((1, MODEL, 1), (2, MODEL, 1), (HONEST, PULLS, 7)):
        assert not answered(who, group, grant)
    assert answered(HONEST, MODEL, 1)
    rig.log(c.Epoch(2, [1, 2], []))
    assert not answered(HONEST, MODEL, 1)
    assert not rig.shards[0].tables.pins


# --- any order of anything ---------------------------------------------------------------------

few = st.integers(0, 3)
who = st.sampled_from([0, 1, 2, 9])
names = st.builds(ContributionId, who, st.sampled_from([MODEL, PULLS, 5]), few)
places = st.builds(place_of, st.sampled_from([0, 90, 91, 77]), few)
groups = st.sampled_from([MODEL, PULLS, 5])
nonsense = st.one_of(
    st.builds(d.AskRows, who, groups, few, st.sampled_from([0, 90, 91]), few, st.integers(0, 9)),
    st.builds(d.Push, names, few, places, st.sampled_from(["none", "zip"]), few),
    st.builds(d.Done, names, few, st.just(1.0), st.lists(places, max_size=3), st.just([]), few),
)
bits = st.one_of(
    st.binary(max_size=40).map(lambda raw: np.frombuffer(raw, np.uint8)),
    st.lists(st.sampled_from(OWN[:9].tolist()), max_size=4).map(payload),
    st.lists(st.sampled_from(OWN[:9].tolist()), max_size=4).map(
        lambda ids: np.asarray(ids, np.uint64).view(np.uint8)
    ),
)


@given(st.lists(st.tuples(st.integers(0, 1), nonsense, bits), max_size=25))
@settings(max_examples=150)
def test_no_message_about_rows_breaks_a_shard_or_changes_a_row(
    sent: list[tuple[int, d.Data, Array]],
) -> None:
    rig = rig_of_a_table()
    for server, message, raw in sent:
        given_bits = raw if isinstance(message, d.Push | d.AskRows) else None
        try:
            actions = rig.shards[server].handle(FromWorker(message, given_bits), 0.0)
        except ProtocolError:
            continue
        for action in actions:
            assert isinstance(action, ToBroker | ToWorker)
            if isinstance(action, ToWorker):
                d.encode_data(action.message)
    assert not any(len(part) for one in rig.shards for part in one.tables.parts.values())
    honest = ContributionId(HONEST, MODEL, 1)
    push(rig, HONEST, payload(OWN[:4]))
    finish(rig, HONEST, [90])
    rig.log(c.Commit(MODEL, 1, [c.Counted(honest, 1.0)], None))
    assert rig.shards[0].tables.parts[90].arrays()[0].tolist() == OWN[:4].tolist()


# --- at a worker -------------------------------------------------------------------------------


class Reads:
    """A worker's reads, and what they have answered."""

    def __init__(self) -> None:
        self.answers: dict[int, Any] = {}
        layout = Layout()
        layout.add([], BLOCKS, tables=(ENTRY,))
        config = SessionConfig("w", "tcp://b:1")
        take = self.answers.__setitem__
        self.reads = RowReads(layout, config, take, take)

    def ask(self, token: int, ids: Any, batch: int = 1) -> list[Any]:
        event = AskRows(token, 9, np.asarray(ids, np.uint64), batch)
        self.reads.ask(event, 1, MODEL, 1, 0)
        return self.reads.ready(0.0)


def test_rows_of_the_wrong_size_or_a_refusal_end_their_call_alone() -> None:
    made = Reads()
    ids = np.sort([*OWN[:2], ELSEWHERE])
    first, second = made.ask(1, ids), made.ask(2, OWN[:2])
    assert [(one.server, one.payload.nbytes) for one in first] == [(0, 16), (1, 8)]
    made.reads.take(d.Rows(0, 1, first[0].message.number), np.zeros(15, np.uint8), 0.1)
    assert isinstance(made.answers[1], KeyMismatch)
    assert "server 0: 15 bytes came where 16 were asked" in str(made.answers[1])
    made.reads.take(d.Rows(0, 1, second[0].message.number, "no"), np.empty(0, np.uint8), 0.1)
    assert "server 0: no" in str(made.answers[2])
    # What belonged to them is of no use any more, and nothing is owed.
    made.reads.take(d.Rows(1, 1, first[1].message.number), np.zeros(8, np.uint8), 0.2)
    made.reads.take(d.Rows(1, 1, 999), np.zeros(8, np.uint8), 0.2)
    assert made.reads.owing() == set()


@pytest.mark.parametrize(
    ("rows", "raw", "says"),
    [
        (d.Rows(0, 1, 1, "", 2, -1), np.zeros(31, np.uint8), "31 bytes came where 32 were asked"),
        (d.Rows(0, 1, 1, "", 2, 0), np.zeros(32, np.uint8), "place 0 follows place 0"),
        (d.Rows(0, 1, 1, "no"), np.zeros(0, np.uint8), "no"),
    ],
)
def test_all_rows_end_with_an_answer_that_makes_no_sense(
    rows: d.Rows, raw: Array, says: str
) -> None:
    made = Reads()
    made.reads.ask(AskRows(1, 9, None, 0, 7), 1, PULLS, 7, 0)
    asked = made.reads.ready(0.0)
    assert [(one.server, one.message.start, one.payload.size) for one in asked] == [
        (0, 0, 0),
        (1, 0, 0),
    ]
    made.reads.take(rows, raw, 0.1)
    assert says in str(made.answers[1])
    assert made.reads.owing() == set()


def test_all_rows_are_asked_for_piece_by_piece_and_put_in_order() -> None:
    made = Reads()
    made.reads.ask(AskRows(1, 9, None, 0, 7), 1, PULLS, 7, 0)
    made.reads.ready(0.0)
    one = np.arange(2, dtype=np.float32)
    made.reads.take(d.Rows(0, 1, 1, "", 1, 40), payload([50], one), 0.1)
    (again,) = made.reads.ready(0.1)
    assert (again.server, again.message.start, again.message.bid) == (0, 40, 90)
    made.reads.take(d.Rows(1, 1, 2, "", 0, -1), np.empty(0, np.uint8), 0.2)
    assert made.answers == {}
    made.reads.take(d.Rows(0, 1, again.message.number, "", 1, -1), payload([7], one + 5), 0.2)
    ids, rows = made.answers[1]
    assert ids.tolist() == [7, 50]
    assert rows.tolist() == [[5, 6], [0, 1]]


def test_a_call_of_a_batch_that_is_cancelled_is_answered_and_others_go_on() -> None:
    made = Reads()
    made.ask(1, OWN[:2])
    (other,) = made.ask(2, OWN[:2], batch=2)
    made.ask(3, OWN[:2], batch=3)
    made.reads.drop(1)
    made.reads.give_up(3)
    assert made.answers == {1: None}
    rows = np.arange(4, dtype=np.float32).view(np.uint8)
    made.reads.take(d.Rows(0, 1, other.message.number), rows, 0.1)
    assert made.answers[2].tolist() == [[0, 1], [2, 3]]


def test_what_does_not_come_is_asked_again() -> None:
    made = Reads()
    (one,) = made.ask(1, OWN[:2])
    assert made.reads.ready(1.0) == []
    assert made.reads.ready(60.0) == [one]
    assert made.reads.owing() == {0}


@pytest.mark.parametrize(
    ("entry", "blocks"),
    [
        (TableEntry(9, TABLE, []), BLOCKS),
        (TableEntry(9, TABLE, [90, 92]), BLOCKS),
        (TableEntry(9, TABLE, [90, 90]), BLOCKS),
        (TableEntry(9, TableSpec("emb", 2, "int7", "zeros", 0), [90]), BLOCKS),
        (TableEntry(9, TABLE, [90]), [BlockSpec(90, 0, [Segment(0, 0, 2)])]),
    ],
)
def test_a_table_that_cannot_be_is_not_believed(entry: TableEntry, blocks: Any) -> None:
    layout = Layout()
    with pytest.raises(ProtocolError):
        layout.add([KeyEntry(0, KeySpec("a", "float32", (2,)))], blocks, tables=(entry,))
    assert not layout.tables
    assert not layout.blocks


# --- an initialiser that dies ------------------------------------------------------------------


def test_tables_of_an_initialisation_that_is_dropped_are_forgotten() -> None:
    rig = rig_of_a_table()
    rig.log(c.Drop(2))
    for shard in rig.shards:
        assert not shard.tables.parts
        assert not shard.layout.tables
        assert not {90, 91} & shard.layout.blocks.keys()
    # The same numbers may come again.
    rig.log(c.Init(3, 2, [], BLOCKS, False, (ENTRY,)))
    assert list(rig.shards[1].tables.parts) == [91]


def test_the_next_worker_initialises_what_a_dead_one_has_offered() -> None:
    catalog, out, spec = Catalog(Layout(), Coding()), Decisions(0), optimizer("sgd")
    key = KeySpec("a", "float32", (2,))
    offer = c.Offer(5, [key], False, 0.0, (TABLE,))
    for worker in (11, 22):
        pending = catalog.offer(worker, offer, False, 2, spec, out)
        assert isinstance(pending, Pending)
    (again,) = catalog.lost(11, 2, spec, out)
    (entry,) = again.tables
    assert (again.incarnation, entry.spec) == (22, TABLE)
    assert again.missing == {0, 1}
    first, drop, second = out.entries
    assert isinstance(drop, c.Drop)
    assert isinstance(first, c.Init)
    assert isinstance(second, c.Init)
    assert [one.spec for one in first.tables] == [one.spec for one in second.tables] == [TABLE]
    assert not set(first.tables[0].bids) & set(entry.bids)
    catalog.held(again.init, 0)
    done = catalog.held(again.init, 1)
    assert done is again
    told = catalog.complete(again, 9)
    assert told.tables == (entry,)
    assert catalog.layout.table("emb") == entry
    assert catalog.layout.servers_in(MODEL) == {0, 1}
    # Who comes later finds it, and only just so.
    assert catalog.offer(33, offer, True, 2, spec, out) is None
    other = c.Offer(6, [key], False, 0.0, (TABLE, TABLE))
    assert "'emb' stands twice" in str(catalog.offer(33, other, False, 2, spec, out))
