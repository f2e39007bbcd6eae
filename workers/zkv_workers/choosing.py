"""`codec=auto` at one worker: what its candidates cost here is measured, and each key has its own.

A unit is what shares a codec: all blocks of a key, or the keys of a bucket. Each is measured on its
first block before that is sent, so that even a first batch need not be dense on a slow link. From
then on: what the codec in use costs and keeps back, and what bytes cost on the link, as batches go.
Decisions are those of `zkv_codecs.auto`; here they get their numbers.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

import numpy as np

from zkv.dtypes import Array
from zkv.layout import Layout, size_of
from zkv.wire import BlockSpec
from zkv_codecs.auto import Auto, Conditions, Key, Measured, feeds_back
from zkv_codecs.backend import Backend
from zkv_codecs.feedback import Codec, Encoded
from zkv_codecs.frames import to_payload
from zkv_codecs.link_speed import LinkSpeed
from zkv_codecs.packed import Packed, dense
from zkv_codecs.plan import NONE, suited
from zkv_codecs.spec import codec as codec_of

EARLY = 10
"""Batches after each of which a choice is made; later after every EVERY-th."""
EVERY = 10
REPEATS = 3
"""Of a measurement; the shortest counts, as a scheduler only ever adds."""
FASTEST = 1e15
"""Bytes per second: what a link that is never the limit counts as."""
PILED_UP_MAX = 1e6
NOISE = (128, 128)
"""The shape of the noise that codecs are tried on: more would tell the same to two digits."""
FADE = 0.8
"""Of sums of squares from one decision to the next."""
LOOK_EVERY, LOOKS, LOOK_SHARE = 1000, 2, 0.01
"""After so many batches, or if there was no dense one yet, so many are sent dense to see the link,
if that costs at most this share of the time since the last one."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes and seconds of what went up and came down, since the worker joined.

    Up: bytes that were acknowledged, and seconds in which any were not. Down: the model's blocks,
    and seconds between their grants and the last of them.
    """

    up: int
    up_s: float
    down: int
    down_s: float


@dataclass(slots=True)
class Unit:
    """What shares a codec."""

    name: str | int
    elements: int
    itemsize: int
    """Bytes of a stored element."""
    candidates: dict[str, Codec]
    current: Codec = NONE
    why: str = "not sent yet"
    measured: dict[str, Measured] = field(default_factory=dict)
    squares: dict[str, tuple[float, float]] = field(default_factory=dict)
    """By codec with feedback: sums of squares of what was kept back, and of gradients."""


class Chooser:
    """Chooses the codecs of one worker's units."""

    def __init__(
        self, auto: Auto, backend: Backend, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.auto = auto
        self.decoders = 1.0
        """Contributions that are decoded in a step one after the other: workers over servers."""
        self.link = LinkSpeed()
        self.units: dict[tuple[int, ...], Unit] = {}
        self._noise: dict[str, float] = {}
        self.looking = False
        """Whether the present batch is sent dense, to see the link."""
        self._backend = backend
        self._clock = clock
        self._batches = 0
        self._steps: deque[float] = deque(maxlen=9)
        """Seconds of late batches without those of their transfers."""
        self._last: tuple[float, Traffic] | None = None
        self._dense = 0
        """Dense batches in a row."""
        self._seen_at, self._seen_s = 0, clock()
        """At which batch, and when, the link was last seen with a dense one."""

    # --- batches -----------------------------------------------------------------------------

    def begin(self, traffic: Traffic) -> None:
        """A batch begins: take in what the one before has shown, and choose anew if it is time."""
        now, last = self._clock(), self._last
        self._last = (now, traffic)
        self._batches += 1
        before = Traffic(0, 0.0, 0, 0.0) if last is None else last[1]
        sent, busy_s = traffic.up - before.up, traffic.up_s - before.up_s
        self.link.add(sent, busy_s)
        self.link.add_down(traffic.down - before.down, traffic.down_s - before.down_s)
        if last is None:
            return
        self._steps.append(max(0.0, now - last[0] - busy_s))
        if self._due:
            for unit in self.units.values():
                _take_error(unit)
            self._decide(self.units.values())
        self._look(now, sent)

    @property
    def _due(self) -> bool:
        return self._batches <= EARLY or self._batches % EVERY == 0

    def _look(self, now: float, sent: int) -> None:
        """Send two batches dense if the link was not seen so for long, and it costs little."""
        dense = _nbytes(self.units.values())
        if 2 * sent > dense:
            self._dense += 1
            self._seen_at, self._seen_s = self._batches, now
            self.looking = self.looking and self._dense < LOOKS
            return
        cost_s = LOOKS * dense / self.link.slowest_bytes_per_s
        wanted = self._batches - self._seen_at >= LOOK_EVERY or not self.link.most * 2 > dense
        self.looking = wanted and cost_s <= LOOK_SHARE * (now - self._seen_s)
        self._dense = 0

    # --- units -------------------------------------------------------------------------------

    def unit(self, layout: Layout, block: BlockSpec) -> Unit:
        """Return the unit that a block belongs to."""
        kids = tuple(block.kids)
        found = self.units.get(kids)
        if found is None:
            specs = [layout.entries[kid].spec for kid in kids]
            texts = {text: codec_of(text) for text in self.auto.candidates}
            found = self.units[kids] = Unit(
                specs[0].key if len(kids) == 1 else f"{specs[0].key} and {len(kids) - 1} more",
                sum(size_of(spec) for spec in specs),
                layout.dtype(block).itemsize,
                {text: one for text, one in texts.items() if suited(one, block) == one},
            )
        return found

    def codec(self, unit: Unit, given: Packed) -> Codec:
        """Return the codec for a block of a unit; its first block ever is measured."""
        if not unit.measured:
            self._measure(unit, given)
            self._decide([unit])
        return NONE if self.looking else unit.current

    def encoded(
        self, unit: Unit, codec: Codec, given: Packed, residual: Array | None, nbytes: int, s: float
    ) -> None:
        """Take in what encoding a block has cost: bytes, seconds, and what was kept back."""
        known = unit.measured.get(codec.text)
        if known is None or not given.size:
            return
        part = min(1.0, given.size / unit.elements) * (1 - FADE)
        unit.measured[codec.text] = replace(
            known,
            encode_s=known.encode_s + part * (s / given.size - known.encode_s),
            nbytes=known.nbytes + part * (nbytes / given.size - known.nbytes),
        )
        if residual is not None and feeds_back(codec.text) and self._due:
            kept, all_ = unit.squares.get(codec.text, (0.0, 0.0))
            unit.squares[codec.text] = (kept + _square(residual), all_ + _square(given.values))

    def _measure(self, unit: Unit, given: Packed) -> None:
        """Encode and decode a block with every candidate."""
        for text, codec in unit.candidates.items():
            unit.measured[text] = self._measured(codec, given, unit.itemsize)

    def _measured(self, codec: Codec, given: Packed, itemsize: int) -> Measured:
        size = max(1, given.size)
        total = np.zeros(given.size, np.float32)
        encode, decode = [], []
        for _ in range(REPEATS):
            began = self._clock()
            if codec == NONE:
                nbytes, sent = given.size * itemsize, None
                given.values.copy()
            else:
                sent, _ = codec.encode(given, codec.start(given.shape), 0, self._backend)
                nbytes = to_payload(sent, self._backend)[1].nbytes
            encoded = self._clock()
            if sent is None:
                total += given.values
            else:
                sent.chain.add(sent.packed, 3.0, total, self._backend)
            encode.append(encoded - began)
            decode.append(self._clock() - encoded)
        error, most = 0.0, None
        if sent is not None:
            error = self._cut(given, sent)
            if feeds_back(codec.text):
                error = _piled_up(error)
                most = max(error, self._of_noise(codec))
        return Measured(min(encode) / size, min(decode) / size, nbytes / size, error, most)

    def _cut(self, given: Packed, sent: Encoded) -> float:
        """Return which part of the norm of what was given was not sent."""
        left = given.values - sent.chain.decode(sent.packed, self._backend).values
        return math.sqrt(_square(left) / (_square(given.values) or 1.0))

    def _of_noise(self, codec: Codec) -> float:
        """Return what a codec keeps back of normal noise, in gradients.

        A first gradient may be concentrated on few elements, and those to come are not.
        """
        known = self._noise.get(codec.text)
        if known is None:
            noise = np.random.default_rng(0).standard_normal(NOISE, np.float32)
            given = replace(dense(noise.reshape(-1)), shape=NOISE)
            sent, _ = codec.encode(given, codec.start(NOISE), 0, self._backend)
            known = self._noise[codec.text] = _piled_up(self._cut(given, sent))
        return known

    def _rest_s(self, units: Iterable[Unit]) -> float:
        """Return the seconds of a step that no codec changes: these units' share, by bytes.

        Before the first step is over one part of them is known: the model came down.
        """
        known, mine = _nbytes(self.units.values()), _nbytes(units)
        if self._steps:
            return statistics.median(self._steps) * mine / max(1, known)
        model, down_s = self.link.down
        return down_s * mine / max(1, known, model)

    def _decide(self, units: Iterable[Unit]) -> None:
        speed = self.link.bytes_per_s
        keys: dict[str | int, Key] = {}
        by_name = {unit.name: unit for unit in units}
        for name, unit in by_name.items():
            measured = {
                text: replace(one, decode_s=one.decode_s * self.decoders)
                for text, one in unit.measured.items()
            }
            keys[name] = Key(unit.elements, measured, unit.current.text)
        rest_s = self._rest_s(by_name.values())
        choices = self.auto.choose(keys, Conditions(min(speed, FASTEST), rest_s))
        for name, choice in choices.items():
            unit = by_name[name]
            unit.current, unit.why = unit.candidates.get(choice.codec, NONE), choice.why


def _nbytes(units: Iterable[Unit]) -> int:
    return sum(unit.elements * unit.itemsize for unit in units)


def _square(values: Array) -> float:
    return float(np.dot(values, values))


def _piled_up(cut: float) -> float:
    """Return a residual's norm, in gradients, if each step cuts off this part of the norm of what
    it is given.

    e² = cut² · (1 + e²) in the long run, while gradients are as good as orthogonal to what is kept
    back. It stands in until a codec was in use and its own residual is known.
    """
    return cut / math.sqrt(max(1 - cut * cut, 1 / PILED_UP_MAX))


def _take_error(unit: Unit) -> None:
    """Say how much the codec in use keeps back, in gradients."""
    text = unit.current.text
    kept, all_ = unit.squares.get(text, (0.0, 0.0))
    if all_ > 0 and text in unit.measured:
        unit.measured[text] = replace(unit.measured[text], error=math.sqrt(kept / all_), most=None)
        unit.squares[text] = (FADE * kept, FADE * all_)
