"""Placements as values, and their text: which server a block goes to.

A placement is one rule and what restricts it: pins, groups of keys that stay on one server, and
caps for each server. `zkv.assignment` reads the fields; `zkv.placement` cuts keys into the blocks
that are placed. Servers are known by their numbers (their places in the cluster), so a placement is
the same on every machine, in whatever order servers and workers have come. This module knows
nothing of blocks, arrays, time, sockets or files.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from zkv.errors import ConfigError
from zkv.optim import parse_number
from zkv.sizes import exact, size

FORMS = (
    "by_size, by_hash[:VIRTUAL_NODES] or by_load[:PATTERN=LOAD,...], and behind semicolons "
    "pin:PATTERN=SERVER, together=PATTERN|PATTERN|..., blocks=N, bytes=SIZE, load=NUMBER, for "
    "example 'by_size;pin:embed.*=0;together=head.*|norm.*;bytes=1GiB'"
)
"""The text that `placement` reads, for messages."""
VIRTUAL_NODES = 64
"""Shares of the ring then differ by about 1 / sqrt(64) of themselves."""
VIRTUAL_NODES_MAX = 4096
TEXT_SHOWN = 200
COUNT_MAX = 10**9
BYTES_MAX = 2**49


@dataclass(frozen=True, slots=True)
class BySize:
    """Largest block first to the server with the fewest bytes (LPT): the default."""

    def __str__(self) -> str:
        return "by_size"


@dataclass(frozen=True, slots=True)
class ByHash:
    """Consistent hashing: a key's place on a ring decides, on which each server has `virtual`
    points. One server more or less moves only what it takes or leaves, about 1 / (n + 1) of all
    (Karger et al., "Consistent Hashing and Random Trees", STOC 1997; with virtual nodes as in
    DeCandia et al., "Dynamo", SOSP 2007). Raises ValueError for `virtual` out of its range."""

    virtual: int = VIRTUAL_NODES

    def __post_init__(self) -> None:
        if not 1 <= self.virtual <= VIRTUAL_NODES_MAX:
            raise ValueError(
                f"by_hash:{self.virtual}: give from 1 to {VIRTUAL_NODES_MAX} points on the ring "
                "for each server"
            )

    def __str__(self) -> str:
        return "by_hash" if self.virtual == VIRTUAL_NODES else f"by_hash:{self.virtual}"


@dataclass(frozen=True, slots=True)
class ByLoad:
    """As `BySize`, but by the load of each key: `loads` are (pattern, load of each such key), the
    first match counts. A key that none matches has the load of its bytes, at the mean load of a
    byte of the others. Raises ValueError for a load below 0 and a pattern that is none."""

    loads: tuple[tuple[str, float], ...] = ()

    def __post_init__(self) -> None:
        for pattern, load in self.loads:
            _check_pattern(pattern, ";,")
            if not load >= 0:
                raise ValueError(f"by_load: {pattern}={load!r}: a load is not negative")

    def load_of(self, key: str | int) -> float | None:
        """Return the load given for a key; None if none is."""
        return next((load for one, load in self.loads if fnmatchcase(str(key), one)), None)

    def __str__(self) -> str:
        given = ",".join(f"{pattern}={_number(load)}" for pattern, load in self.loads)
        return f"by_load:{given}" if given else "by_load"


Rule = BySize | ByHash | ByLoad


@dataclass(frozen=True, slots=True)
class Caps:
    """What a server takes at most: blocks, bytes of values, load; None: any number.

    A load is in the unit of `ByLoad.loads`, and in bytes where none is given. Raises ValueError for
    a cap that nothing can meet.
    """

    blocks: int | None = None
    nbytes: int | None = None
    load: float | None = None

    def __post_init__(self) -> None:
        for name, cap, most in (
            ("blocks", self.blocks, COUNT_MAX),
            ("bytes", self.nbytes, BYTES_MAX),
        ):
            if cap is not None and not 1 <= cap <= most:
                raise ValueError(f"{name}={cap}: a server takes from 1 to {most}")
        if self.load is not None and not self.load > 0:
            raise ValueError(f"load={self.load!r}: a server takes more than 0")

    def __bool__(self) -> bool:
        return self != Caps()

    def texts(self) -> Iterator[str]:
        """Yield the parts of the text that state them."""
        if self.blocks is not None:
            yield f"blocks={self.blocks}"
        if self.nbytes is not None:
            yield f"bytes={exact(self.nbytes)}"
        if self.load is not None:
            yield f"load={_number(self.load)}"


@dataclass(frozen=True, slots=True)
class Placement:
    """A rule, and what restricts it.

    Patterns are matched case-sensitively against str(key) with *, ? and [set], as those of codecs
    and optimizers. `pins` are (pattern, server), the first match counts; a server is a number from
    0, or a name that it was given. Each of `together` is a group: all keys that match any of its
    patterns. Groups with a key in common are one. Raises ValueError for a pattern that is none, and
    if one is pinned to two servers.
    """

    rule: Rule = field(default_factory=BySize)
    pins: tuple[tuple[str, str], ...] = ()
    together: tuple[tuple[str, ...], ...] = ()
    caps: Caps = field(default_factory=Caps)

    def __post_init__(self) -> None:
        pinned: dict[str, str] = {}
        for pattern, server in self.pins:
            _check_pattern(pattern, ";")
            if not server or server != server.strip() or set(server) & set(";="):
                raise ValueError(f"pin:{pattern}={server}: name a server by its number or --name")
            if pinned.setdefault(pattern, server) != server:
                raise ValueError(
                    f"pin:{pattern} names two servers, {pinned[pattern]} and {server}; choose one"
                )
        for group in self.together:
            if not group:
                raise ValueError("together= names no pattern")
            for pattern in group:
                _check_pattern(pattern, ";|")

    @property
    def text(self) -> str:
        """What `placement` reads as this value."""
        parts = [str(self.rule)]
        parts += [f"pin:{pattern}={server}" for pattern, server in self.pins]
        parts += [f"together={'|'.join(group)}" for group in self.together]
        return ";".join([*parts, *self.caps.texts()])

    @property
    def named(self) -> str:
        """What messages begin with: its text, cut off if it is long, as they have more to say."""
        more = "..." if len(self.text) > TEXT_SHOWN else ""
        return f"placement {self.text[:TEXT_SHOWN]}{more}"

    def __str__(self) -> str:
        return self.text

    def pinned(self, key: str | int) -> tuple[str, str] | None:
        """Return the (pattern, server) that pins a key; None if none does."""
        return next((one for one in self.pins if fnmatchcase(str(key), one[0])), None)

    def groups_of(self, key: str | int) -> list[int]:
        """Return which of `together` a key belongs to."""
        return [
            at
            for at, group in enumerate(self.together)
            if any(fnmatchcase(str(key), pattern) for pattern in group)
        ]

    def check(self, servers: int) -> None:
        """Check that pins name servers that a cluster of so many can have.

        Raises:
            ConfigError: a number is too high; names are checked when keys are placed.
        """
        for pattern, server in self.pins:
            if server.isdecimal():
                server_number(self, pattern, server, servers)


DEFAULT = Placement()


def server_number(
    placement: Placement, pattern: str, server: str, servers: int, names: Sequence[str] = ()
) -> int:
    """Return the number of the server that a pin names; `names` are those of the servers.

    Raises:
        ConfigError: there is no such server; those that there are are named.
    """
    if server.isdecimal() and int(server) < servers:
        return int(server)
    if server in names:
        return names.index(server)
    there = f"0 to {servers - 1}" if servers > 1 else "0"
    named = f" ({', '.join(names[:8])}{', ...' if len(names) > 8 else ''})" if names else ""
    raise ConfigError(
        f"{placement.named}: pin:{pattern}={server} names no server of this cluster; its "
        f"servers are {there}{named}; pin to one of them, or start more (--servers)"
    )


def placement(text: str) -> Placement:
    """Return the placement that a text names; raises ValueError with the part that is wrong.

    >>> placement("by_hash:16;pin:embed.*=0").rule == ByHash(16)
    True
    >>> str(placement("by_size; bytes=2048KiB"))
    'by_size;bytes=2MiB'
    """
    first, *rest = (part.strip() for part in text.split(";"))
    pins: list[tuple[str, str]] = []
    groups: list[tuple[str, ...]] = []
    options: dict[str, str] = {}
    try:
        for part in rest:
            name, equals, value = part.partition("=")
            name, value = name.strip(), value.strip()
            if part.startswith("pin:") and equals:
                pattern, _, server = part.removeprefix("pin:").rpartition("=")
                pins.append((pattern.strip(), server.strip()))
            elif name == "together" and value:
                groups.append(tuple(one.strip() for one in value.split("|")))
            elif name not in ("blocks", "bytes", "load") or not value:
                raise ValueError(f"{part!r} is no part of a placement")
            elif name in options:
                raise ValueError(f"{name} is given twice")
            else:
                options[name] = value
        return Placement(_rule(first), tuple(pins), tuple(groups), _caps(options))
    except ValueError as error:
        raise ValueError(f"placement {text[:TEXT_SHOWN]!r}: {error}; the form is {FORMS}") from None


def _rule(text: str) -> Rule:
    name, colon, argument = text.partition(":")
    if text == "by_size":
        return BySize()
    if name == "by_hash":
        return ByHash(_count("by_hash", argument)) if colon else ByHash()
    if name == "by_load" and (argument or not colon):
        return ByLoad(tuple(map(_load, argument.split(",") if colon else ())))
    raise ValueError(f"{text!r} is no rule")


def _load(text: str) -> tuple[str, float]:
    pattern, _, load = text.strip().rpartition("=")
    return pattern.strip(), parse_number(f"load of {pattern!r}", load.strip())


def _caps(options: dict[str, str]) -> Caps:
    return Caps(
        _count("blocks", options["blocks"]) if "blocks" in options else None,
        size(options["bytes"]) if "bytes" in options else None,
        parse_number("load", options["load"]) if "load" in options else None,
    )


def _count(name: str, text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 12):
        raise ValueError(f"{name}: {text!r} is no count")
    return int(text)


def _number(value: float) -> str:
    return repr(int(value) if value == int(value) and value < 2**53 else value)


def _check_pattern(pattern: str, without: str) -> None:
    if not pattern or pattern != pattern.strip() or set(pattern) & set(without):
        raise ValueError(
            f"pattern {pattern!r}: it must not be empty, begin or end with blanks or contain "
            f"{' or '.join(map(repr, without))}; ? stands for any character"
        )
