"""Cost formulas of collectives by latency and bandwidth, from Tyagi & Swany (arXiv 2312.02493).

In all of them `alpha_s` is the latency of a message, `beta_s` the seconds per byte, and logarithms are to the
base of 2. Collectives predict their times by these formulas.
"""

from math import log2
from typing import Literal

Winner = Literal["all-gather", "ring", "tree"]


def ring_s(alpha_s: float, beta_s: float, num_ranks: int, num_bytes: float) -> float:
    """Seconds of a ring all-reduce of `num_bytes`."""
    hops = 2 * (num_ranks - 1)
    return hops * alpha_s + hops / num_ranks * num_bytes * beta_s


def tree_s(alpha_s: float, beta_s: float, num_ranks: int, num_bytes: float) -> float:
    """Seconds of a tree all-reduce of `num_bytes`."""
    return 2 * broadcast_s(alpha_s, beta_s, num_ranks, num_bytes)


def broadcast_s(alpha_s: float, beta_s: float, num_ranks: int, num_bytes: float) -> float:
    """Seconds of a broadcast of `num_bytes`."""
    return log2(num_ranks) * (alpha_s + num_bytes * beta_s)


def all_gather_s(alpha_s: float, beta_s: float, num_ranks: int, num_bytes: float) -> float:
    """Seconds of an all-gather of `num_bytes` from each rank, or an all-to-all of as many for each rank."""
    return log2(num_ranks) * alpha_s + (num_ranks - 1) * num_bytes * beta_s


def sparse_sums_s(
    alpha_s: float, beta_s: float, num_ranks: int, num_bytes: float, kept: float
) -> dict[Winner, float]:
    """Seconds of sums of a share `kept` of vectors of `num_bytes`, whose indices are as large as values.

    The ways are an all-gather of values and indices, and AR-Topk over a ring or a tree, which broadcasts
    indices and sums values.
    """
    selected = kept * num_bytes
    broadcast = broadcast_s(alpha_s, beta_s, num_ranks, selected)
    return {
        "all-gather": all_gather_s(alpha_s, beta_s, num_ranks, 2 * selected),
        "ring": broadcast + ring_s(alpha_s, beta_s, num_ranks, selected),
        "tree": broadcast + tree_s(alpha_s, beta_s, num_ranks, selected),
    }


def winner(alpha_s: float, beta_s: float, num_ranks: int, num_bytes: float, kept: float) -> Winner:
    """Predict the fastest of `sparse_sums_s`, as the paper does."""
    costs = sparse_sums_s(alpha_s, beta_s, num_ranks, num_bytes, kept)
    return min(costs, key=costs.__getitem__)
