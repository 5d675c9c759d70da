"""Sums in two: inside each node first, so that between nodes each number travels once and not once a rank.

The other way to have two levels is to exchange pooled embeddings between nodes and to split the operator
among the ranks of each. It is left out because the exchange or this one sends as little between nodes, or
less [derived]. With `M` nodes of `L` ranks, `B` samples, `T` tables of `k` columns, and `out` numbers a
sample that are summed, a node sends in a step, both ways together and in numbers:

- exchange: `2 (M-1)/M B/M T k`, the embeddings of its `T/M` tables for all other nodes' samples
- exchange between nodes, split inside: the same, since all `T k` have to reach each node; and, as each needs
  all of the operator's weights then, their gradients, which no split operator is to send
- split, sums in one: `2 (M-1)/M B L out`, from each of its ranks
- split, sums in two: `2 (M-1)/M B out`

So the third costs less than the first where `M L out < T k`, and the last already where `M out < T k`; the
second never does. What it would save is inside a node, where a rank sends `1/M` of this one's
`2 (L-1)/L B out`: on the faster links.

Ranks of one node meet in one all-to-all, then those with the same place in their nodes in another. Both are
collectives of the whole group in which most ranks send each other nothing, so that no groups are made.
"""

from collections.abc import Sequence
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor

from dlrm.sharding.splitting.exchange import SplitExchange


class TwoLevelExchange(SplitExchange):
    """An `SplitExchange` between ranks that share nodes.

    Args:
        group: as there; the ranks of a node lie one after the other.
        ranks_per_node: a divisor of the number of ranks.
        wire_dtype: as there; what is summed inside a node is rounded once more before it leaves it.

    Raises:
        ValueError: nodes would have different numbers of ranks.
    """

    def __init__(
        self, group: dist.ProcessGroup, ranks_per_node: int, wire_dtype: torch.dtype | None = None
    ) -> None:
        super().__init__(group, wire_dtype)
        if self.world_size % ranks_per_node:
            raise ValueError(
                f"{self.world_size} ranks do not make nodes of {ranks_per_node} each; choose a ranks_per_node"
                " that divides their number, or 1 for sums in one"
            )
        self.ranks_per_node: Final = ranks_per_node

    def reduce_scatter(self, partial: Tensor, batch_sizes: Sequence[int]) -> Tensor:
        """As `SplitExchange.reduce_scatter`."""
        pieces = torch.split(partial, list(batch_sizes))
        by_place = torch.cat([pieces[rank] for rank in self._by_place()])
        peers = sum(self._of_place(batch_sizes, self.rank))
        received = self.all_to_all(
            by_place,
            [sum(self._of_place(batch_sizes, rank)) if self._is_near(rank) else 0 for rank in self._ranks()],
            [peers if self._is_near(rank) else 0 for rank in self._ranks()],
        )
        summed = _sum(received, self.ranks_per_node, partial.dtype)
        own = batch_sizes[self.rank]
        received = self.all_to_all(
            summed,
            [batch_sizes[rank] if self._is_peer(rank) else 0 for rank in self._ranks()],
            [own if self._is_peer(rank) else 0 for rank in self._ranks()],
        )
        return _sum(received, self.world_size // self.ranks_per_node, partial.dtype)

    def gather(self, own: Tensor, batch_sizes: Sequence[int]) -> Tensor:
        """As `SplitExchange.gather`."""
        ones = [1] * (own.dim() - 1)
        of_peers = self.all_to_all(
            own.repeat(self.world_size // self.ranks_per_node, *ones),
            [own.shape[0] if self._is_peer(rank) else 0 for rank in self._ranks()],
            [batch_sizes[rank] if self._is_peer(rank) else 0 for rank in self._ranks()],
        )
        by_place = self.all_to_all(
            of_peers.repeat(self.ranks_per_node, *ones),
            [of_peers.shape[0] if self._is_near(rank) else 0 for rank in self._ranks()],
            [sum(self._of_place(batch_sizes, rank)) if self._is_near(rank) else 0 for rank in self._ranks()],
        )
        pieces = torch.split(by_place, [batch_sizes[rank] for rank in self._by_place()])
        in_order = sorted(zip(self._by_place(), range(self.world_size), strict=True))
        return torch.cat([pieces[place] for _, place in in_order])

    def _ranks(self) -> range:
        return range(self.world_size)

    def _by_place(self) -> list[int]:
        """All ranks: the first ones of all nodes, then the second ones, and so on."""
        return sorted(self._ranks(), key=lambda rank: (rank % self.ranks_per_node, rank))

    def _of_place(self, batch_sizes: Sequence[int], rank: int) -> Sequence[int]:
        """Batch sizes of those with the same place in their nodes as `rank`."""
        return batch_sizes[rank % self.ranks_per_node :: self.ranks_per_node]

    def _is_near(self, rank: int) -> bool:
        return rank // self.ranks_per_node == self.rank // self.ranks_per_node

    def _is_peer(self, rank: int) -> bool:
        return (rank - self.rank) % self.ranks_per_node == 0


def _sum(received: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    pieces = received.view(count, received.shape[0] // count, *received.shape[1:])
    return pieces.sum(0, dtype=torch.promote_types(dtype, torch.float32)).to(dtype)
