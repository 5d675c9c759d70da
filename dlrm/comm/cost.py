"""Cost formulas of collectives by latency and bandwidth, from Tyagi & Swany (arXiv 2312.02493).

In all of them `alpha_s` is the latency of a message, `beta_s` the seconds per byte, and logarithms are to the
base of 2. In those of sparse sums, `num_bytes` is the size of the whole vector and `kept` the share of its
values that is sent; indices are as large as values. Collectives predict their times by these formulas.
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


def sparse_all_gather_s(
    alpha_s: float, beta_s: float, num_ranks: int, num_bytes: float, kept: float
) -> float:
    """Seconds of an all-gather of selected values and their indices."""
    return all_gather_s(alpha_s, beta_s, num_ranks, 2 * kept * num_bytes)


def ar_topk_ring_s(alpha_s: float, beta_s: float, num_ranks: int, num_bytes: float, kept: float) -> float:
    """Seconds of AR-Topk over a ring: indices are broadcast, values summed."""
    selected = kept * num_bytes
    broadcast = broadcast_s(alpha_s, beta_s, num_ranks, selected)
    return broadcast + ring_s(alpha_s, beta_s, num_ranks, selected)


def ar_topk_tree_s(alpha_s: float, beta_s: float, num_ranks: int, num_bytes: float, kept: float) -> float:
    """Seconds of AR-Topk over a tree."""
    selected = kept * num_bytes
    return broadcast_s(alpha_s, beta_s, num_ranks, selected) + tree_s(alpha_s, beta_s, num_ranks, selected)


def winner(alpha_s: float, beta_s: float, num_ranks: int, num_bytes: float, kept: float) -> Winner:
    """Predict the fastest way to sum the largest values of all ranks, as the paper does."""
    costs: dict[Winner, float] = {
        "all-gather": sparse_all_gather_s(alpha_s, beta_s, num_ranks, num_bytes, kept),
        "ring": ar_topk_ring_s(alpha_s, beta_s, num_ranks, num_bytes, kept),
        "tree": ar_topk_tree_s(alpha_s, beta_s, num_ranks, num_bytes, kept),
    }
    return min(costs, key=costs.__getitem__)
