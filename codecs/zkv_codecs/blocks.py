"""What codecs with bits or blocks share: sizes of blocks, and how many codes there must be."""

from __future__ import annotations

from zkv_codecs.kernels.numpy_blocks import BLOCK_MAX, BLOCK_MIN
from zkv_codecs.packed import Packed, Stage


def checked(codec: str, block: int) -> None:
    """Raise ValueError if kernels that sum blocks by halving cannot have blocks of this size."""
    if type(block) is not int or not BLOCK_MIN <= block <= BLOCK_MAX or block & (block - 1):
        raise ValueError(
            f"{codec}: block {block!r}; give a power of two from {BLOCK_MIN} to {BLOCK_MAX}"
        )


def counted(stage: Stage, packed: Packed, count: int) -> int:
    """Return `count`, how many values the codes of `packed` are to stand for.

    Kernels check nothing: none may be called with less than it reads.

    Raises:
        ValueError: there are not as many codes and scales as the stage makes of so many values.
    """
    sizes, scales = stage.sizes(count), packed.scales
    given = (packed.values.size, 0 if scales is None else scales.size)
    if given != (sizes.values, sizes.scales):
        raise ValueError(
            f"{stage.text}: {given[0]} codes and {given[1]} scales for {count} values;"
            f" {sizes.values} and {sizes.scales} expected"
        )
    return count
