"""Which key is sent with which codec: one for all, exceptions by pattern, small tensors dense.

As text: `topk:0.01+int8+ef;*.bias=none;small=4096;nonfinite=skip`. In place of the codec for all
may stand one of two that adapt while training goes on: `auto`, which chooses for each key
(`zkv_codecs.auto`), or `bits:...`, which chooses one width for all (`zkv_codecs.bits`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from zkv.layout import Layout, size_of
from zkv.wire import BlockSpec
from zkv_codecs import bits_spec
from zkv_codecs.auto import Auto, auto, is_auto
from zkv_codecs.backend import Backend
from zkv_codecs.bits import CODECS, BitController
from zkv_codecs.feedback import Codec
from zkv_codecs.frames import warm
from zkv_codecs.spec import codec

SMALL = 16_384
"""64 KiB of float32, up to which keys share blocks (`zkv.placement`): together such keys are few of
a model's bytes, and last layers and norms among them bear one bit or two badly."""
NONFINITE = ("raise", "skip", "zero")
OPTIONS = ("small", "nonfinite")


@dataclass(frozen=True, slots=True)
class Plan:
    """A choice of codec for every key.

    `exceptions` are (pattern, codec) in their order, the first match counts; patterns are matched
    case-sensitively against str(key) with *, ? and [set]. Keys of fewer than `small` elements are
    sent dense unless an exception names them. `nonfinite` says what happens to a NaN or Inf in a
    gradient for a lossy codec: "raise" (the push is refused), "skip" (the key counts as not pushed)
    or "zero" (those elements count as 0).

    `adaptive` is what chooses in place of `codec`, which is then where it starts.
    """

    codec: Codec = field(default_factory=Codec)
    exceptions: tuple[tuple[str, Codec], ...] = ()
    small: int = SMALL
    nonfinite: str = "raise"
    adaptive: Auto | BitController[Any] | None = None

    def __post_init__(self) -> None:
        if self.nonfinite not in NONFINITE:
            raise ValueError(f"nonfinite={self.nonfinite!r}: choose one of {', '.join(NONFINITE)}")
        if self.small < 0:
            raise ValueError(f"small={self.small}: it counts elements, so it is at least 0")

    @property
    def text(self) -> str:
        """What `plan` reads as this plan."""
        parts = [self.codec.text if self.adaptive is None else self.adaptive.text]
        parts += [f"{pattern}={one.text}" for pattern, one in self.exceptions]
        if self.small != SMALL:
            parts.append(f"small={self.small}")
        if self.nonfinite != "raise":
            parts.append(f"nonfinite={self.nonfinite}")
        return ";".join(parts)

    def __str__(self) -> str:
        return self.text

    def warm(self, backend: Backend) -> None:
        """Load the kernels that these codecs need."""
        for one in self.codecs():
            warm(one.chain, backend)

    def codecs(self) -> Iterator[Codec]:
        """Yield all codecs that may be used, some perhaps twice."""
        match self.adaptive:
            case None:
                yield self.codec
            case Auto(candidates=texts):
                yield from map(codec, texts)
            case _:
                yield from map(codec, CODECS.values())
        yield from (one for _, one in self.exceptions)

    def _exception(self, key: str | int) -> Codec | None:
        return next(
            (one for pattern, one in self.exceptions if fnmatchcase(str(key), pattern)), None
        )

    def for_key(self, key: str | int, size: int) -> Codec:
        """Return the codec of a key of `size` elements."""
        special = self._exception(key)
        if special is not None:
            return special
        return self.codec if size >= self.small else NONE

    def exempt(self, key: str | int, size: int) -> str:
        """Return why a key of `size` elements has not the codec for all: the text of what it has
        instead; "" if nothing sets it apart. Keys of which this differs should share no bucket.
        """
        special = self._exception(key)
        if special is not None:
            return special.text
        return "" if size >= self.small else NONE.text

    def for_block(self, layout: Layout, block: BlockSpec) -> Codec:
        """Return the codec of a block: its key's; of a bucket, the one that all its keys have.

        A bucket of keys with different codecs is sent dense, and so is one whose codec chooses
        elements or factorises: it would choose among unlike keys. Integers are sent dense too.
        """
        if not block.segments or not layout.dtype(block).floating:
            return NONE
        specs = [layout.entries[kid].spec for kid in block.kids]
        codecs = {self.for_key(spec.key, size_of(spec)) for spec in specs}
        return suited(codecs.pop(), block) if len(codecs) == 1 else NONE

    def adapts(self, layout: Layout, block: BlockSpec) -> bool:
        """Whether a block's codec is the one that `adaptive` chooses."""
        if self.adaptive is None or not block.segments or not layout.dtype(block).floating:
            return False
        specs = [layout.entries[kid].spec for kid in block.kids]
        return all(
            size_of(spec) >= self.small and self._exception(spec.key) is None for spec in specs
        )


NONE = Codec()


def suited(codec: Codec, block: BlockSpec) -> Codec:
    """Return the codec, or `NONE` if it would choose among the elements of unlike keys."""
    mixes = any(stage.kind in ("sparsify", "lowrank") for stage in codec.chain.stages)
    return NONE if mixes and len(block.segments) > 1 else codec


def plan(text: str) -> Plan:
    """Return the plan of this text.

    Raises:
        ValueError: it is none; the text says which part is wrong.
    """
    first, *rest = (part.strip() for part in text.split(";"))
    exceptions: list[tuple[str, Codec]] = []
    options: dict[str, str] = {}
    for part in rest:
        name, equals, value = part.partition("=")
        if not equals or not name.strip() or not value.strip():
            raise ValueError(
                f"codec {part!r}: behind the first ';' write PATTERN=CODEC, small=N or "
                f"nonfinite={'|'.join(NONFINITE)}"
            )
        name, value = name.strip(), value.strip()
        if name not in OPTIONS:
            exceptions.append((name, codec(value)))
        elif name in options:
            raise ValueError(f"codec {text!r}: {name} is given twice")
        else:
            options[name] = value
    small = options.get("small", str(SMALL))
    if not (small.isascii() and small.isdigit() and len(small) <= 12):
        raise ValueError(f"codec: small={small!r}: give a count of elements, as in small=4096")
    nonfinite = options.get("nonfinite", "raise")
    adaptive: Auto | BitController[Any] | None = None
    start = NONE
    if is_auto(first):
        adaptive = auto(first)
    elif bits_spec.is_bits(first):
        adaptive = bits_spec.controller(first)
        start = codec(adaptive.start().codec)
    else:
        start = codec(first)
    return Plan(start, tuple(exceptions), int(small), nonfinite, adaptive)
