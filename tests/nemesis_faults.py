"""What goes wrong, and when: drawn from a seed alone, so that a run's faults can be had again.

How processes interleave cannot: a seed that has found something is run a few times. Pure.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

KILL_EVERY_S, CUT_EVERY_S, STOP_EVERY_S, TREAT_EVERY_S = 0.75, 2.1, 2.4, 2.7
TERM_EVERY_S = 4.5
SPARES_S = 1.2
"""Nobody is killed twice within this: a process that has not begun proves nothing."""
CUT_S, STOP_S, TREAT_S = (0.1, 0.9), (0.1, 0.6), (0.3, 1.0)
KILLS_LEAST, CUTS_LEAST = 10, 3
"""What a run of any length has."""
BROKER = "broker"
BROKER_SHARE = 0.3
LOSS = 0.2


@dataclass(frozen=True, slots=True)
class Layout:
    """Who there is. `lossy`: those on the relay's wires; `servers_die`: they are killed too."""

    servers: tuple[str, ...]
    workers: tuple[str, ...]
    lossy: tuple[str, ...]
    servers_die: bool = False

    @property
    def everybody(self) -> tuple[str, ...]:
        return (BROKER, *self.servers, *self.workers)

    @property
    def links(self) -> list[tuple[str, str]]:
        """All pairs that have something to say to each other."""
        heads = (BROKER, *self.servers)
        return [
            *((a, b) for at, a in enumerate(heads) for b in heads[at + 1 :]),
            *((a, b) for a in heads for b in self.workers),
        ]


@dataclass(frozen=True, slots=True)
class Fault:
    """Do `kind` at `at_s` to `targets`, and undo it (or start again) `for_s` later.

    kill: SIGKILL; stop: SIGSTOP; term: SIGTERM; cut: each pair of `pairs` is cut, those later in
    the tuple `gap_s` after each other, and mended in the order `mends`; treat: the relay's rules
    (`values`: loss, delay, jitter, double); limit: `values` has Mbit/s; fill: the journal's disk.
    """

    at_s: float
    kind: str
    targets: tuple[str, ...] = ()
    for_s: float = 0.0
    pairs: tuple[tuple[str, str], ...] = ()
    gap_s: float = 0.0
    mends: tuple[int, ...] = ()
    values: tuple[float, ...] = ()

    def __str__(self) -> str:
        what = " ".join(f"{a}>{b}" for a, b in self.pairs) or " ".join(self.targets)
        more = "".join(f" {value:g}" for value in self.values)
        return f"{self.at_s:6.2f} s: {self.kind} {what}{more} for {self.for_s:.2f} s"


def plan(seed: int, seconds: float, layout: Layout, *, cut_s: float = 0.0) -> list[Fault]:
    """Return the faults of a run, in order. `cut_s`: one more cut, so long, if there is room."""
    chance = random.Random(seed)
    drawn: list[Fault] = []
    for every, draw in (
        (min(KILL_EVERY_S, seconds / (KILLS_LEAST + 1.5)), _death),
        (min(CUT_EVERY_S, seconds / (CUTS_LEAST + 1.5)), _cut),
        (STOP_EVERY_S, _stop),
        (TREAT_EVERY_S, _treat),
        (TERM_EVERY_S, _term),
    ):
        drawn += _lane(chance, seconds, layout, every, draw)
    if cut_s and cut_s < seconds:
        worker = chance.choice(layout.workers)
        pairs = _both((worker, other) for other in layout.everybody if other != worker)
        at_s = (seconds - cut_s) * chance.random()
        drawn.append(Fault(at_s, "cut", for_s=cut_s, pairs=pairs))
    return _spaced(sorted(drawn, key=lambda one: one.at_s), layout)


Draw = Callable[[random.Random, float, Layout], Fault]


def _lane(
    chance: random.Random, seconds: float, layout: Layout, every: float, draw: Draw
) -> Iterator[Fault]:
    at_s = every * (0.3 + 0.4 * chance.random())
    while at_s < seconds:
        yield draw(chance, at_s, layout)
        at_s += every * (0.8 + 0.4 * chance.random())


def _between(chance: random.Random, bounds: tuple[float, float]) -> float:
    return bounds[0] + (bounds[1] - bounds[0]) * chance.random()


def _death(chance: random.Random, at_s: float, layout: Layout) -> Fault:
    """A kill, mostly: its process is started again 0 to 0.4 s later."""
    again_s = 0.4 * chance.random()
    if chance.random() < BROKER_SHARE:
        kind = "fill" if chance.random() < 0.15 else "kill"
        return Fault(at_s, kind, (BROKER,), again_s)
    if layout.servers_die and chance.random() < 0.3:
        return Fault(at_s, "kill", (chance.choice(layout.servers),), again_s)
    return Fault(at_s, "kill", (chance.choice(layout.workers),), again_s)


def _term(chance: random.Random, at_s: float, layout: Layout) -> Fault:
    return Fault(at_s, "term", (chance.choice(layout.workers),))


def _both(pairs: Iterator[tuple[str, str]]) -> tuple[tuple[str, str], ...]:
    return tuple(way for a, b in pairs for way in ((a, b), (b, a)))


def _cut(chance: random.Random, at_s: float, layout: Layout) -> Fault:
    """One way, both ways, everybody from one, or links one by one (a swizzle)."""
    for_s = _between(chance, CUT_S)
    links = layout.links
    one, other = chance.sample(chance.choice(links), 2)
    match chance.choice(("one way", "both", "both", "isolate", "swizzle")):
        case "one way":
            pairs: tuple[tuple[str, str], ...] = ((one, other),)
        case "both":
            pairs = ((one, other), (other, one))
        case "isolate":
            pairs = _both((one, each) for each in layout.everybody if each != one)
        case _:
            pairs = _both(iter(chance.sample(links, 4)))
            mends = list(range(len(pairs)))
            chance.shuffle(mends)
            return Fault(at_s, "cut", (), for_s, pairs, 0.05, tuple(mends))
    return Fault(at_s, "cut", (), for_s, pairs, 0.0, tuple(range(len(pairs))))


def _stop(chance: random.Random, at_s: float, layout: Layout) -> Fault:
    return Fault(at_s, "stop", (chance.choice(layout.everybody),), _between(chance, STOP_S))


def _treat(chance: random.Random, at_s: float, layout: Layout) -> Fault:
    """Loss, delay with reordering, doubling, or a slow card."""
    for_s = _between(chance, TREAT_S)
    kind = chance.choice(("loss", "delay", "double", "all", "limit"))
    if kind == "limit" or not layout.lossy:
        one = chance.choice(layout.everybody)
        return Fault(at_s, "limit", (one,), for_s, values=(chance.choice((10.0, 40.0, 100.0)),))
    values = {
        "loss": (LOSS, 0.0, 0.0, 0.0),
        "delay": (0.0, 0.01, 0.04, 0.0),
        "double": (0.0, 0.0, 0.002, LOSS),
        "all": (LOSS / 4, 0.005, 0.01, LOSS / 4),
    }[kind]
    return Fault(at_s, "treat", (chance.choice(layout.lossy),), for_s, values=values)


def _spaced(faults: Sequence[Fault], layout: Layout) -> list[Fault]:
    """Give deaths to others where one would die twice in a row; drop a treatment within another."""
    died: dict[str, float] = {}
    until: dict[tuple[str, str], float] = {}
    found = []
    for one in faults:
        if one.kind in ("kill", "term", "fill"):
            (target,) = one.targets
            if one.at_s < died.get(target, 0.0) and one.kind == "term":
                continue
            if one.at_s < died.get(target, 0.0):
                spare = min(layout.workers, key=lambda name: died.get(name, 0.0))
                one = Fault(one.at_s, "kill", (spare,), one.for_s)
                target = spare
            died[target] = one.at_s + one.for_s + SPARES_S
        elif one.kind in ("treat", "limit", "stop"):
            (target,) = one.targets
            if one.at_s < until.get((one.kind, target), 0.0):
                continue
            until[one.kind, target] = one.at_s + one.for_s + 0.1
        found.append(one)
    return found
