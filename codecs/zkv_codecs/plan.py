"""Which key is sent with which codec: one for all, exceptions by pattern, small tensors dense.

As text: `topk:0.01+int8+ef;*.bias=none;small=1024;nonfinite=skip`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from zkv.layout import Layout, size_of
from zkv.wire import BlockSpec
from zkv_codecs.backend import Backend
from zkv_codecs.feedback import Codec
from zkv_codecs.frames import warm
from zkv_codecs.spec import codec

SMALL = 1024
"""Below so many elements what a codec saves is less than what its frame and kernels cost."""
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
    """

    codec: Codec = field(default_factory=Codec)
    exceptions: tuple[tuple[str, Codec], ...] = ()
    small: int = SMALL
    nonfinite: str = "raise"

    def __post_init__(self) -> None:
        if self.nonfinite not in NONFINITE:
            raise ValueError(f"nonfinite={self.nonfinite!r}: choose one of {', '.join(NONFINITE)}")
        if self.small < 0:
            raise ValueError(f"small={self.small}: it counts elements, so it is at least 0")

    @property
    def text(self) -> str:
        """What `plan` reads as this plan."""
        parts = [self.codec.text]
        parts += [f"{pattern}={one.text}" for pattern, one in self.exceptions]
        if self.small != SMALL:
            parts.append(f"small={self.small}")
        if self.nonfinite != "raise":
            parts.append(f"nonfinite={self.nonfinite}")
        return ";".join(parts)

    def warm(self, backend: Backend) -> None:
        """Load the kernels that these codecs need."""
        for one in (self.codec, *(one for _, one in self.exceptions)):
            warm(one.chain, backend)

    def for_key(self, key: str | int, size: int) -> Codec:
        """Return the codec of a key of `size` elements."""
        for pattern, one in self.exceptions:
            if fnmatchcase(str(key), pattern):
                return one
        return self.codec if size >= self.small else NONE

    def for_block(self, layout: Layout, block: BlockSpec) -> Codec:
        """Return the codec of a block: its key's; of a bucket, the one that all its keys have.

        A bucket of keys with different codecs is sent dense, and so is one whose codec chooses
        elements or factorises: it would choose among unlike keys. Integers are sent dense too.
        """
        if not block.segments or not layout.dtype(block).floating:
            return NONE
        specs = [layout.entries[kid].spec for kid in block.kids]
        codecs = {self.for_key(spec.key, size_of(spec)) for spec in specs}
        if len(codecs) != 1:
            return NONE
        (codec,) = codecs
        mixes = any(stage.kind in ("sparsify", "lowrank") for stage in codec.chain.stages)
        return NONE if mixes and len(block.segments) > 1 else codec


NONE = Codec()


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
        raise ValueError(f"codec: small={small!r}: give a count of elements, as in small=1024")
    nonfinite = options.get("nonfinite", "raise")
    return Plan(codec(first), tuple(exceptions), int(small), nonfinite)
