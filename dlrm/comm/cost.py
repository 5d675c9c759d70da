"""What an exchange costs on the wire: formulas of latency and bandwidth.

Tyagi & Swany (arXiv 2312.02493), section B.1 of our notes. `alpha_s` is the latency of a message, `beta_s`
the seconds that a byte takes; logarithms are to the base of 2. The collectives compose their predictions of
these, and `winner` compares three of them as the paper does.
"""

from math import log2
from typing import Literal

Winner = Literal["all-gather", "ring", "tree"]


def ring_s(alpha_s: float, beta_s: float, num_ranks: int, num_bytes: float) -> float:
    """A ring all-reduce of `num_bytes`."""
    hops = 2 * (num_ranks - 1)
    return hops * alpha_s + hops / num_ranks * num_bytes * beta_s


def tree_s(alpha_s: float, beta_s: float, num_ranks: int, num_bytes: float) -> float:
    """A tree all-reduce of `num_bytes`."""
    return 2 * broadcast_s(alpha_s, beta_s, num_ranks, num_bytes)


def broadcast_s(alpha_s: float, beta_s: float, num_ranks: int, num_bytes: float) -> float:
    """A broadcast of `num_bytes`."""
    return log2(num_ranks) * (alpha_s + num_bytes * beta_s)


def all_gather_s(alpha_s: float, beta_s: float, num_ranks: int, num_bytes: float) -> float:
    """An all-gather of `num_bytes` from each rank; an all-to-all of so many for each other one too."""
    return log2(num_ranks) * alpha_s + (num_ranks - 1) * num_bytes * beta_s


def sparse_all_gather_s(
    alpha_s: float, beta_s: float, num_ranks: int, num_bytes: float, kept: float
) -> float:
    """An all-gather of values and indices.

    Args:
        alpha_s: latency of a message.
        beta_s: seconds a byte takes.
        num_ranks: at least 1.
        num_bytes: of the whole vector of values.
        kept: the share of values that travels; indices are as large as values.
    """
    return all_gather_s(alpha_s, beta_s, num_ranks, 2 * kept * num_bytes)


def ar_topk_ring_s(alpha_s: float, beta_s: float, num_ranks: int, num_bytes: float, kept: float) -> float:
    """AR-Topk over a ring: indices are broadcast, values summed. Arguments as of `sparse_all_gather_s`."""
    chosen = kept * num_bytes
    broadcast = broadcast_s(alpha_s, beta_s, num_ranks, chosen)
    return broadcast + ring_s(alpha_s, beta_s, num_ranks, chosen)


def ar_topk_tree_s(alpha_s: float, beta_s: float, num_ranks: int, num_bytes: float, kept: float) -> float:
    """AR-Topk over a tree. Arguments as of `sparse_all_gather_s`."""
    chosen = kept * num_bytes
    broadcast = broadcast_s(alpha_s, beta_s, num_ranks, chosen)
    return broadcast + tree_s(alpha_s, beta_s, num_ranks, chosen)


def winner(alpha_s: float, beta_s: float, num_ranks: int, num_bytes: float, kept: float) -> Winner:
    """The fastest way to sum top-k values, by formula. Arguments as of `sparse_all_gather_s`."""
    costs: dict[Winner, float] = {
        "all-gather": sparse_all_gather_s(alpha_s, beta_s, num_ranks, num_bytes, kept),
        "ring": ar_topk_ring_s(alpha_s, beta_s, num_ranks, num_bytes, kept),
        "tree": ar_topk_tree_s(alpha_s, beta_s, num_ranks, num_bytes, kept),
    }
    return min(costs, key=costs.__getitem__)
