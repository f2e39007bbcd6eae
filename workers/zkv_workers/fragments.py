"""How a model is divided into fragments, of which local rounds contribute one at a time.

Douillard et al., "Streaming DiLoCo with overlapping communication: Towards a Distributed Free
Lunch", arXiv:2501.18512. All workers of a run have to divide alike, so this is a function of what
they share: the keys, their order and their blocks. Pure: knows no batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from zkv.dtypes import DTYPES
from zkv.errors import ConfigError
from zkv.layout import Layout, size_of
from zkv.policy import policy
from zkv.wire import MODEL

Fragments = int | Sequence[str | Sequence[str]]
"""How many, or the patterns of the keys of each."""


def count_of(fragments: Fragments) -> int:
    """Return how many fragments that is.

    Raises:
        ValueError: less than one, or neither a number nor patterns.
    """
    if type(fragments) is int and fragments >= 1:
        return fragments
    if isinstance(fragments, list | tuple) and len(fragments) > 1 and all(map(patterns, fragments)):
        return len(fragments)
    raise ValueError(
        f"fragments={fragments!r}: give how many (at least 1), or a list of at least two, with the "
        'patterns of the keys of each, such as [["embed*", "head*"], "block.*"]'
    )


def patterns(fragment: str | Sequence[str]) -> tuple[str, ...]:
    """Return one fragment's patterns."""
    return (fragment,) if isinstance(fragment, str) else tuple(fragment)


def check_h(h: int, fragments: Fragments) -> int:
    """Return how many local batches a round has, if each key is to be contributed every `h`.

    Raises:
        ValueError: less than one, or it is not a multiple of the number of fragments.
    """
    if type(h) is not int or h < 1:
        raise ValueError(f"h={h!r}: a round has at least one local batch")
    count = count_of(fragments)
    if h % count:
        up = -(-h // count) * count
        raise ValueError(
            f"h={h} with {count} fragments: one of them is contributed every h / {count} local "
            f"batches, so choose a multiple of {count}, such as h={up}"
        )
    return h // count


def check_policy(text: str) -> None:
    """Check that under this policy all contributions of an update are of the same fragment.

    Raises:
        ConfigError: they are not, or a worker contributes twice before it has the update.
    """
    chosen = policy(text)
    if not (chosen.distinct and chosen.cancel):
        raise ConfigError(
            f"fragments under policy {text}: contributions to one update would be of different "
            "fragments, or of changes that were contributed before; use policy bsp or k-bsp:K, or "
            "fragments=1"
        )


def divided(layout: Layout, fragments: Fragments) -> list[list[int]]:
    """Return the numbers of each fragment's keys, in order of initialisation.

    All trained keys of the model are in one of them. By number they are divided by bytes: the
    largest first, each to the fragment that has least, so that layers of one size take turns
    ("strided"). Small keys that share a block stay together, or it would travel with each of them.

    Raises:
        ConfigError: a key matches no pattern, or a fragment has no key.
    """
    kids = [kid for kid in layout.kids_in(MODEL) if _is_trained(layout, kid)]
    if isinstance(fragments, int):
        found = _by_bytes(layout, kids, fragments)
    else:
        found = _by_pattern(layout, kids, [patterns(one) for one in fragments])
    return [sorted(one) for one in found]


def _is_trained(layout: Layout, kid: int) -> bool:
    return DTYPES[layout.entries[kid].spec.dtype].floating


def _by_bytes(layout: Layout, kids: Sequence[int], count: int) -> list[list[int]]:
    together: dict[int, list[int]] = {}
    for kid in kids:
        together.setdefault(layout.blocks_with(kid)[0].bid, []).append(kid)
    if len(together) < count:
        raise ConfigError(
            f"fragments={count}: the model has only {len(together)} parts that travel apart (keys, "
            f"or small keys that share a block); choose at most {len(together)}"
        )
    sizes = {first: sum(_nbytes(layout, kid) for kid in some) for first, some in together.items()}
    found: list[list[int]] = [[] for _ in range(count)]
    held = [(0, 0)] * count
    for first in sorted(together, key=lambda one: -sizes[one]):
        at = held.index(min(held))
        found[at] += together[first]
        # Keys without elements take turns, too, so that no fragment is left without a key.
        held[at] = (held[at][0] + sizes[first], held[at][1] + 1)
    return found


def _nbytes(layout: Layout, kid: int) -> int:
    spec = layout.entries[kid].spec
    return size_of(spec) * DTYPES[spec.dtype].itemsize


def _by_pattern(
    layout: Layout, kids: Sequence[int], wanted: Sequence[tuple[str, ...]]
) -> list[list[int]]:
    found: list[list[int]] = [[] for _ in wanted]
    for kid in kids:
        key = str(layout.entries[kid].spec.key)
        at = next((at for at, some in enumerate(wanted) if _matches(key, some)), None)
        if at is None:
            raise ConfigError(
                f"key {key!r} matches no pattern of fragments={list(map(list, wanted))}, so its "
                'changes would never be contributed; name it, or add "*" to the last fragment'
            )
        found[at].append(kid)
    for some, members in zip(wanted, found, strict=True):
        if not members:
            raise ConfigError(
                f"the fragment of {', '.join(some)} has no key: none that is trained matches, or "
                "an earlier fragment has them all"
            )
    return found


def _matches(key: str, some: Sequence[str]) -> bool:
    return any(fnmatchcase(key, pattern) for pattern in some)
