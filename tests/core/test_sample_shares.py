"""How often samples get into the model: laws over histories of a synchroniser, and 2, 5, 7."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zkv import pool
from zkv.compute_times import compute_times
from zkv.policy import SyncPolicy, asp, bsp, k_asp, k_batch_asp, k_batch_bsp, k_bsp, policy, ssp
from zkv.pool import permutation
from zkv.sample_shares import SAMPLES_MAX, WAYS, Assignment, SampleShares, SamplesReport
from zkv.simulator import Simulation
from zkv.sync import (
    Action,
    Cancel,
    Commit,
    Contribution,
    Discard,
    Finished,
    Joined,
    Start,
    Synchronizer,
)

ORACLE = json.loads((Path(__file__).parent.parent / "fixtures" / "sync_oracle.json").read_text())

policies = st.one_of(
    st.just(bsp()),
    st.just(asp()),
    st.integers(0, 2).map(ssp),
    *(st.integers(1, 4).map(make) for make in (k_bsp, k_batch_bsp, k_asp, k_batch_asp)),
)
few = st.builds(
    Assignment,
    samples=st.integers(5, 30),
    batch=st.integers(1, 12),
    way=st.sampled_from(WAYS),
    seed=st.integers(0, 3),
)


@st.composite
def histories(draw: st.DrawFn) -> tuple[list[int], list[Action]]:
    """Workers, and what a synchroniser decides about them: void and late contributions too."""
    workers = sorted(draw(st.sets(st.integers(0, 99), min_size=1, max_size=5)))
    synchronizer = Synchronizer(draw(policies), members_min=len(workers))
    actions: list[Action] = []
    open_: set[tuple[int, int]] = set()
    late: set[tuple[int, int]] = set()

    def hear(some: list[Action]) -> None:
        actions.extend(some)
        for action in some:
            if isinstance(action, Start):
                open_.add((action.worker, action.grant))
            elif isinstance(action, Cancel):
                open_.discard((action.worker, action.grant))
                late.add((action.worker, action.grant))

    for worker in workers:
        hear(synchronizer.handle(Joined(worker)))
    for _ in range(draw(st.integers(0, 40))):
        among = late if late and draw(st.integers(0, 5)) == 0 else open_
        whose = draw(st.sampled_from(sorted(among)))
        among.remove(whose)
        hear(synchronizer.handle(Finished(*whose, draw(st.integers(0, 5)) == 0)))
    return workers, actions


Piece = tuple[int, int, tuple[int, ...]]
"""Pass, place in it, and the samples."""


@dataclass
class Book:
    """The same by hand: lists of samples, each batch sorted out by itself."""

    how: Assignment
    workers: list[int]
    passes: int = 0
    """How many were begun, of all decks."""
    counted: Counter[tuple[Any, int, int]] = field(default_factory=Counter)
    """By deck, pass and sample."""
    skipped: Counter[tuple[Any, int, int]] = field(default_factory=Counter)
    figures: Counter[tuple[int, str]] = field(default_factory=Counter)
    open: dict[tuple[int, int], Piece] = field(default_factory=dict)
    back: list[Piece] = field(default_factory=list)
    decks: dict[Any, Iterator[Piece]] = field(default_factory=dict)

    def deck(self, worker: int) -> Any:
        return worker if self.how.way == "fixed" else "all"

    def fresh(self, own: range) -> Iterator[Piece]:
        number = 0
        while True:
            number, self.passes = number + 1, self.passes + 1
            order = [own[at] for at in permutation(len(own), self.how.seed, number)]
            for at in range(0, len(own), self.how.batch):
                yield number, at, tuple(order[at : at + self.how.batch])

    def hear(self, action: Action) -> None:
        match action:
            case Start(worker, grant, _):
                self.open[worker, grant] = self.take(worker)
            case Commit():
                for one in action.contributions:
                    self.settle(one.worker, self.open.pop((one.worker, one.grant)), "counted")
            case Cancel(worker, grant) | Discard(worker, grant):
                piece = self.open.pop((worker, grant), None)
                if piece is not None:
                    self.settle(worker, piece, "lost")

    def take(self, worker: int) -> Piece:
        if self.back:
            self.back.sort()
            return self.back.pop(0)
        fixed = self.how.way == "fixed"
        first, step = (self.workers.index(worker), len(self.workers)) if fixed else (0, 1)
        own = range(first, self.how.samples, step)
        return next(self.decks.setdefault(self.deck(worker), self.fresh(own)))

    def settle(self, worker: int, piece: Piece, fate: str) -> None:
        number, _, samples = piece
        if fate == "lost":
            fate = "returned" if self.how.way == "retry" else "skipped"
        self.figures[worker, fate] += len(samples)
        if fate == "returned":
            self.back.append(piece)
            return
        book = self.counted if fate == "counted" else self.skipped
        book.update((self.deck(worker), number, sample) for sample in samples)

    def counts(self) -> list[int]:
        times = Counter[int]()
        for (_, _, sample), count in self.counted.items():
            times[sample] += count
        return [times[sample] for sample in range(self.how.samples)]


# --- laws ----------------------------------------------------------------------------------------


@given(few, histories())
def test_every_figure_is_that_of_a_book_kept_by_hand(
    how: Assignment, history: tuple[list[int], list[Action]]
) -> None:
    workers, actions = history
    shares, book = SampleShares(how, workers), Book(how, workers)
    for action in actions:
        shares.hear(action)
        book.hear(action)
        report, counts = shares.report(), book.counts()
        assert shares.counts.tolist() == counts
        assert shares.batches_kept == len(book.open) + len(book.back)
        for name in ("counted", "skipped", "returned"):
            by_rank = [getattr(share, name) for share in report.shares]
            assert by_rank == [book.figures[worker, name] for worker in workers], name
        # Samples and workers are two ways to count the same.
        assert report.counted == sum(counts)
        assert sum(report.parts) == (1 if report.counted else 0)
        assert report.histogram == dict(sorted(Counter(counts).items()))
        assert (report.least, report.most) == (min(counts), max(counts))
        assert (report.mean, report.never) == (Fraction(sum(counts), len(counts)), counts.count(0))


@given(few, histories())
def test_in_a_pass_each_sample_counts_or_is_skipped_once_at_most(
    how: Assignment, history: tuple[list[int], list[Action]]
) -> None:
    """And with `retry` counts differ by the passes at most of which a part has counted."""
    workers, actions = history
    shares, book = SampleShares(how, workers), Book(how, workers)
    for action in actions:
        shares.hear(action)
        book.hear(action)
        assert max((book.counted + book.skipped).values(), default=1) == 1
        if how.way == "retry":
            assert not book.skipped
            in_pass = Counter(number for _, number, _ in book.counted)
            partly = sum(counted < how.samples for counted in in_pass.values())
            report = shares.report()
            assert report.most - report.least <= partly


@given(few, histories())
def test_an_order_is_drawn_once_for_each_pass_whatever_comes_back(
    how: Assignment, history: tuple[list[int], list[Action]]
) -> None:
    workers, actions = history
    book = Book(how, workers)
    for action in actions:
        book.hear(action)
    with mock.patch.object(pool, "permutation", wraps=permutation) as drawn:
        shares = SampleShares(how, workers)
        for action in actions:
            shares.hear(action)
    assert drawn.call_count == book.passes


@given(few, histories())
def test_a_fixed_sample_counts_for_its_own_worker(
    how: Assignment, history: tuple[list[int], list[Action]]
) -> None:
    workers, actions = history
    shares = SampleShares(Assignment(how.samples, how.batch, "fixed", how.seed), workers)
    for action in actions:
        shares.hear(action)
    for rank, share in enumerate(shares.report().shares):
        assert shares.counts[rank :: len(workers)].sum() == share.counted


@given(
    workers=st.integers(1, 6),
    part=st.integers(1, 12),
    batch=st.integers(1, 14),
    updates=st.integers(1, 20),
    speeds=st.lists(st.integers(1, 9), min_size=6, max_size=6),
)
def test_equal_fixed_parts_under_bsp_stay_level(
    workers: int, part: int, batch: int, updates: int, speeds: list[int]
) -> None:
    times = ",".join(map(str, speeds[:workers]))
    report = run(bsp(), times, Assignment(workers * part, batch, "fixed"), updates=updates)
    assert report.parts == (Fraction(1, workers),) * workers
    passes, more = divmod(updates, -(-part // batch))
    assert (report.least, report.most) == (passes, passes + (more > 0))


def run(rule: SyncPolicy | str, times: str, how: Assignment, **end: Any) -> SamplesReport:
    """What becomes of the samples in a simulated run."""
    written = compute_times(times)
    shares = SampleShares(how, written.workers)
    chosen = policy(rule) if isinstance(rule, str) else rule
    Simulation(chosen, written, listener=shares.hear).run(**end)
    return shares.report()


# --- numbers -------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("until", [15, 60])
@pytest.mark.parametrize("text", [name for name in ORACLE if name != "about"])
def test_workers_of_2_5_and_7_have_the_samples_of_the_batches_they_have_applied(
    text: str, until: int, way: Any
) -> None:
    """The batches are the oracle's; each worker's part and the whole are whole batches of 10."""
    report = run(text, "2,5,7", Assignment(90, 10, way), until=until)
    expected = ORACLE[text]["through"][str(until)]
    assert [share.counted for share in report.shares] == [10 * n for n in expected["applied"]]
    lost = [10 * n for n in expected["cancelled"]]
    assert [share.returned + share.skipped for share in report.shares] == lost


def test_asp_with_2_5_and_7_favours_the_samples_of_the_quick_if_they_are_fixed() -> None:
    """Shares are 35:14:10 of 59; from a pool all samples count as often."""
    fixed = run("asp", "2,5,7", Assignment(30, 10, "fixed"), until=70)
    assert fixed.parts == (Fraction(35, 59), Fraction(14, 59), Fraction(10, 59))
    assert fixed.histogram == {10: 10, 14: 10, 35: 10}
    dealt = run("asp", "2,5,7", Assignment(30, 10), until=70)
    assert dealt.parts == fixed.parts
    # 59 batches are 19 passes of 3, and 2 more.
    assert dealt.histogram == {19: 10, 20: 20}
    level = run("bsp", "2,5,7", Assignment(30, 10, "fixed"), until=70)
    assert level.histogram == {10: 30}


def test_k_bsp_with_2_5_and_7_never_sees_the_samples_of_the_slowest_if_they_are_fixed() -> None:
    """Every batch of the third worker is cancelled: 12 through 60."""
    fixed = run("k-bsp:2", "2,5,7", Assignment(30, 10, "fixed"), until=60)
    assert fixed.histogram == {0: 10, 12: 20}
    assert [share.skipped for share in fixed.shares] == [0, 0, 120]
    again = run("k-bsp:2", "2,5,7", Assignment(30, 10, "retry"), until=60)
    assert [share.returned for share in again.shares] == [0, 0, 120]
    # It is given the third batch of pass 1 again and again. The 24 batches that count are the other
    # two, passes 2 to 8, and the first batch of pass 9.
    counts = np.full(30, 7)
    counts[permutation(30, 0, 1)[:20]] += 1
    counts[permutation(30, 0, 9)[:10]] += 1
    assert again.histogram == dict(sorted(Counter(counts.tolist()).items()))
    # A new pass begins with each round, and its third batch is skipped.
    skipped = run("k-bsp:2", "2,5,7", Assignment(30, 10, "skip"), until=60)
    assert skipped.mean == 8
    assert skipped.least < 8 < skipped.most


def test_two_passes_of_which_a_part_has_counted_may_set_two_samples_two_apart() -> None:
    """The bound is met: two workers hold one sample, of two passes; a third counts the other."""
    held, other = permutation(2, 2, 1).tolist()
    assert permutation(2, 2, 2).tolist() == [held, other]
    shares = SampleShares(Assignment(2, 1, seed=2), [1, 2, 3])
    for action in (
        Start(1, 1, 0),
        Start(2, 1, 0),
        Commit(1, (Contribution(2, 1, 0),)),
        Start(3, 1, 1),
        Start(2, 2, 1),
        Commit(2, (Contribution(2, 2, 1),)),
    ):
        shares.hear(action)
    assert (shares.counts[held], shares.counts[other]) == (0, 2)


# --- values --------------------------------------------------------------------------------------


def test_a_late_contribution_changes_nothing_and_a_void_one_comes_to_nothing() -> None:
    shares = SampleShares(Assignment(8, 4), [7])
    shares.hear(Start(7, 1, 0))
    shares.hear(Cancel(7, 1))
    shares.hear(Start(7, 2, 0))
    shares.hear(Discard(7, 1))
    shares.hear(Commit(1, (Contribution(7, 2, 0),)))
    assert shares.counts[permutation(8, 0, 1)[:4]].tolist() == [1, 1, 1, 1]
    shares.hear(Start(7, 3, 1))
    shares.hear(Discard(7, 3))
    (share,) = shares.report().shares
    assert (share.counted, share.skipped, share.returned) == (4, 0, 8)


def test_a_report_stays_as_it_is_and_nobody_else_counts() -> None:
    shares = SampleShares(Assignment(4, 4), [1])
    shares.hear(Start(1, 1, 0))
    before = shares.report()
    shares.hear(Commit(1, (Contribution(1, 1, 0),)))
    shares.hear(Start(1, 2, 1))
    once = shares.report()
    shares.hear(Commit(2, (Contribution(1, 2, 1),)))
    assert (before.counted, once.counted, shares.report().counted) == (0, 4, 8)
    assert (before.parts, once.parts) == ((0,), (1,))
    with pytest.raises(ValueError, match="read-only"):
        shares.counts[0] = 9
    with pytest.raises(KeyError):
        shares.hear(Commit(3, (Contribution(1, 9, 1),)))


def test_a_report_as_plain_data() -> None:
    plain = run("asp", "2,5,7", Assignment(40, 10, "fixed", 5), until=14).to_plain()
    # Parts of 14, 13 and 13: batches of 10 and 4, of 10 and 3; 7, 2 and 2 of them.
    assert plain.pop("share") == pytest.approx([52 / 78, 13 / 78, 13 / 78])
    assert plain == {
        "n": 40,
        "batch": 10,
        "assign": "fixed",
        "seed": 5,
        "counted": [52, 13, 13],
        "skipped": [0, 0, 0],
        "returned": [0, 0, 0],
        "per_sample": {
            "min": 1,
            "mean": 1.95,
            "max": 4,
            "never": 0,
            "times": {"1": 26, "3": 4, "4": 10},
        },
    }
    assert json.loads(json.dumps(plain)) == plain


def test_ten_thousand_workers_share_a_pool() -> None:
    report = run("asp", "10000*exp:1", Assignment(50_000, 32), until=0.1)
    assert len(report.shares) == 10_000
    assert report.counted == sum(times * count for times, count in report.histogram.items()) > 0
    assert sum(report.histogram.values()) == 50_000


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"samples": 0}, "samples must be 1 to 100000000, given 0"),
        ({"samples": SAMPLES_MAX + 1}, "given 100000001"),
        ({"samples": 9, "batch": 0}, "batch must be 1 to"),
        ({"samples": 9, "seed": -1}, "seed must be 0 to"),
        ({"samples": 9, "way": "fair"}, "assign 'fair' is none of retry, skip, fixed"),
    ],
)
def test_a_value_out_of_its_range_is_named(options: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        Assignment(**options)


def test_each_worker_needs_a_sample_of_its_own() -> None:
    named = "samples must be at least 3 with assign fixed, one for each of the 3 workers, given 2"
    with pytest.raises(ValueError, match=named):
        SampleShares(Assignment(2, way="fixed"), [1, 2, 3])
    assert SampleShares(Assignment(2), [1, 2, 3]).counts.dtype == np.int64
