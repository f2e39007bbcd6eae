"""`zkv.data`: how the samples of a data set are dealt out to the workers. A thin re-export.

The whole set is named by its size alone; loading the samples of a batch is the user's.
"""

from __future__ import annotations

from zkv.pool import Shard as Shard
from zkv.pool import permutation as permutation

__all__ = ["Shard", "permutation", "shard"]


def shard(
    n: int, seed: int = 0, *, size: int = 32, passes: int | None = 1, retry: bool = True
) -> Shard:
    """Deal samples 0…n−1 out in batches of `size`, each once per pass over all live workers.

    Args:
        n: how many samples there are.
        seed: decides their order, a new one in each pass; at least 0.
        size: samples in a batch; the last batch of a pass may have fewer.
        passes: how often each sample is to count; None for as long as the workers go on.
        retry: whether samples of a batch that did not count (cancelled, refused, or its worker is
            gone) are handed out again; if not, they are counted as skipped.

    Raises:
        ValueError: a number is out of its range.
    """
    return Shard(n, seed, size, passes, retry)
