"""What codecs with a scale for each block share: which sizes a block may have, and its texts."""

from __future__ import annotations

from zkv_codecs.kernels.numpy_blocks import BLOCK_MAX, BLOCK_MIN


def checked(codec: str, block: int) -> None:
    """Raise ValueError if kernels that sum blocks by halving cannot have blocks of this size."""
    if not BLOCK_MIN <= block <= BLOCK_MAX or block & (block - 1):
        raise ValueError(
            f"{codec}: block {block}; give a power of two from {BLOCK_MIN} to {BLOCK_MAX}"
        )
