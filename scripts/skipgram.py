"""Identifiers of Python's standard library get meanings by the company they keep (`scripts/skipgram
--help`): skip-gram with negative sampling (Mikolov et al., 2013), its two tables on servers.

A row's number is a hash of the identifier, so that no worker needs to know a vocabulary: whoever
meets a name first makes its row. This file is the program of each worker as well: the parent starts
it again for each of them.
"""

from __future__ import annotations

import argparse
import json
import keyword
import os
import re
import subprocess
import sys
import sysconfig
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import zkv

Array = NDArray[Any]
NAMES = re.compile(
    r'"""[\s\S]*?"""|\'\'\'[\s\S]*?\'\'\'|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'|#[^\n]*'
    r"|(\b[A-Za-z_]\w*)"
)
"""Strings and comments, which are skipped, or (the group) a name."""
LEFT_OUT = ("test", "tests", "idlelib", "lib2to3", "site-packages", "__pycache__", "encodings")
COUNT_MIN = 8
"""Names that stand in fewer places are left out."""
OFTEN = 2e-4
"""What part of all names one may be before some of its places are passed over."""
WINDOW, NEGATIVES = 5, 5
REPORTS = 12
WORDS = ("height", "read", "start", "encode", "socket", "lock", "minute", "min", "parent", "sin")
"""Whose neighbours are shown, if they were met."""
KNOWN = 4000
"""Names that neighbours are looked for among: the most frequent."""


# --- the text --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Text:
    """All names of the library in their order: which one, and in which file."""

    names: list[str]
    """Each once, the most frequent first."""
    counts: Array
    places: Array
    """The index of the name that stands there."""
    files: Array


def row_number(name: str) -> int:
    """Return the number of a name's row: 64 bits of a hash."""
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "big")


def sources(count: int) -> list[Path]:
    """Return files of the standard library, at most so many (0: all), without its tests."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    found = sorted(folder.rglob("*.py"))
    own = [one for one in found if not set(one.relative_to(folder).parts) & set(LEFT_OUT)]
    return own[:: max(1, len(own) // count)] if count else own


def read(count: int) -> Text:
    """Read the library, as far as it is to be read."""
    words: list[list[str]] = []
    for path in sources(count):
        found = NAMES.findall(path.read_text("utf-8", "replace"))
        words.append([one for one in found if one and not keyword.iskeyword(one)])
    counted = Counter(one for file in words for one in file)
    names = [name for name, met in counted.most_common() if met >= COUNT_MIN]
    index = {name: at for at, name in enumerate(names)}
    own = [[index[one] for one in file if one in index] for file in words]
    return Text(
        names,
        np.asarray([counted[name] for name in names]),
        np.asarray([one for file in own for one in file]),
        np.repeat(np.arange(len(own)), [len(file) for file in own]),
    )


class Pairs:
    """Names and neighbours of theirs, drawn from the files of one worker, and names by chance."""

    def __init__(self, text: Text, rank: int, world: int, seed: int) -> None:
        self.rng = np.random.default_rng([seed, rank])
        part = text.counts / text.counts.sum()
        passed = self.rng.random(text.places.size) < np.sqrt(OFTEN / part)[text.places]
        mine = passed & (text.files % world == rank)
        self.places, self.files = text.places[mine], text.files[mine]
        self.chance = np.cumsum(text.counts**0.75)
        self.numbers = np.asarray([row_number(name) for name in text.names], np.uint64)

    def draw(self, count: int) -> tuple[Array, Array]:
        """Return rows of centers (pairs,), and of a neighbour and names by chance of each."""
        at = self.rng.integers(0, self.places.size, 2 * count)
        away = self.rng.integers(1, WINDOW + 1, at.size) * self.rng.choice((-1, 1), at.size)
        there = (at + away) % self.places.size
        chosen = np.flatnonzero(self.files[at] == self.files[there])[:count]
        shape = (chosen.size, NEGATIVES)
        drawn = np.searchsorted(self.chance, self.rng.random(shape) * self.chance[-1])
        others = np.concatenate([self.places[there[chosen], None], drawn], axis=1)
        return self.numbers[self.places[at[chosen]]], self.numbers[others]


# --- a worker --------------------------------------------------------------------------------


def gradients(center: Array, other: Array) -> tuple[float, Array, Array]:
    """Return the mean loss of pairs and its gradients.

    `center` is (pairs, dim), `other` (pairs, 1 + negatives, dim), float32: the first one of each
    is a neighbour.
    """
    scores = np.einsum("pd,pkd->pk", center, other)
    scores[:, 0] *= -1
    # log(1 + e^s), and its derivative, without overflow.
    losses = np.logaddexp(0, scores)
    slope = np.exp(scores - losses).astype(np.float32)
    slope[:, 0] *= -1
    slope /= len(center)
    return (
        float(losses.sum() / len(center)),
        np.einsum("pk,pkd->pd", slope, other),
        slope[:, :, None] * center[:, None, :],
    )


def work(asked: argparse.Namespace) -> None:
    """Train, and (the first worker) say how the loss falls."""
    text = read(asked.files)
    tables = {
        "in": zkv.Table(asked.dim, initial=f"uniform:{-0.5 / asked.dim},{0.5 / asked.dim}"),
        "out": zkv.Table(asked.dim, initial="zeros"),
    }
    with zkv.connect() as worker:
        worker.init({}, tables=tables)
        pairs = Pairs(text, worker.rank, worker.world, asked.seed)
        every = max(1, asked.batches // REPORTS)
        losses: list[float] = []
        for turn in range(asked.batches):
            centers, others = pairs.draw(asked.pairs)
            with worker.batch(weight=len(centers)) as batch:
                center, other = batch.rows("in", centers), batch.rows("out", others)
                loss, of_center, of_other = gradients(center, other)
                batch.push_rows("in", centers, of_center)
                batch.push_rows("out", others, of_other)
                losses.append(loss)
            if (turn + 1) % every == 0 and worker.rank == 0:
                mean = sum(losses[-every:]) / every
                print(json.dumps({"batch": turn + 1, "loss": round(mean, 4)}), flush=True)
        batch.wait()


# --- all together ----------------------------------------------------------------------------


def trained(asked: argparse.Namespace, broker: str) -> list[dict[str, float]]:
    """Run the workers, tell each of their reports, and return these."""
    reports: list[dict[str, float]] = []
    children = []
    for rank in range(asked.workers):
        env = {
            **os.environ,
            "ZKV_BROKER": broker,
            "ZKV_RANK": str(rank),
            "WORLD_SIZE": str(asked.workers),
            # One core each, or they fight for them.
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
        }
        command = [sys.executable, __file__, "--worker", *sys.argv[1:]]
        children.append(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True))
    try:
        assert children[0].stdout is not None
        for line in children[0].stdout:
            reports.append(json.loads(line))
            if not asked.json:
                print(
                    f"batch {reports[-1]['batch']:>6}   loss {reports[-1]['loss']:.4f}", flush=True
                )
        if any([child.wait() for child in children]):
            sys.exit("a worker has failed")
    finally:
        for child in children:
            child.kill()
            child.communicate()
    return reports


def neighbours(rows: Array, at: int, count: int) -> list[int]:
    """Return which rows point most nearly where row `at` does, by cosine."""
    units = rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-12)
    nearest = np.argsort(-(units @ units[at]))
    return [one for one in nearest.tolist() if one != at][:count]


def shown(asked: argparse.Namespace, broker: str, text: Text) -> dict[str, list[str]]:
    """Return the neighbours of some names, as the servers have them now."""
    known = text.names[:KNOWN]
    with zkv.connect(broker, observer=True) as observer:
        rows = observer.rows("in", [row_number(name) for name in known])
    wanted = asked.words.split(",") if asked.words else WORDS
    return {
        word: [known[one] for one in neighbours(rows, known.index(word), 6)]
        for word in wanted
        if word in known
    }


def parsed(arguments: Sequence[str]) -> argparse.Namespace:
    """Return what the command line asks for."""
    parser = argparse.ArgumentParser(prog="scripts/skipgram")
    for name, default in (
        ("--workers", 3),
        ("--servers", 2),
        ("--batches", 600),
        ("--pairs", 2048),
        ("--dim", 64),
        ("--files", 0),
        ("--seed", 0),
    ):
        parser.add_argument(name, type=int, default=default)
    parser.add_argument("--policy", default="bsp")
    parser.add_argument("--optimizer", default="adagrad:lr=0.1")
    parser.add_argument("--words", default="")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args(arguments)
    least = {"seed": 0, "files": 0}
    for name in ("workers", "servers", "batches", "pairs", "dim", "files", "seed"):
        if getattr(asked, name) < least.get(name, 1):
            parser.error(f"--{name} is at least {least.get(name, 1)}")
    return asked


def main() -> int:
    """Train and show, or be one worker."""
    asked = parsed(sys.argv[1:])
    if asked.worker:
        work(asked)
        return 0
    began, text = time.monotonic(), read(asked.files)
    if not asked.json:
        told = f"{text.places.size} places of {len(text.names)} names in {text.files[-1] + 1} files"
        print(f"{told}; {asked.workers} workers, {asked.servers} servers", flush=True)
    options: Any = {"policy": asked.policy, "optimizer": asked.optimizer, "workers": asked.workers}
    with zkv.local(asked.servers, **options) as cluster:
        reports = trained(asked, cluster.address)
        near = shown(asked, cluster.address, text)
    took_s = round(time.monotonic() - began, 1)
    if asked.json:
        print(json.dumps({"loss": reports, "neighbours": near, "took_s": took_s}))
        return 0
    for word, others in near.items():
        print(f"{word:>12}: {', '.join(others)}")
    print(f"took {took_s} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
