"""Sums in two levels.

Inside each node first, so that each number travels between nodes once, not once a rank.

The alternative, exchanging pooled embeddings between nodes and splitting the operator among the ranks of a
node, is left out because the exchange or the two-level sum sends as little between nodes, or less [derived].
With `M` nodes of `L` ranks, `B` samples, `T` tables of `k` columns, and `out` summed numbers a sample, a node
sends in a step, both ways together and in numbers:

- exchange: `2 (M-1)/M B/M T k`, the embeddings of its `T/M` tables for all other nodes' samples
- exchange between nodes, split inside: the same, as all `T k` have to reach each node; and, as each needs all
  of the operator's weights then, their gradients, which a split avoids
- split, flat sums: `2 (M-1)/M B L out`, from each of its ranks
- split, two-level sums: `2 (M-1)/M B out`

So flat sums cost less than the exchange if `M L out < T k`, two-level sums already if `M out < T k`, and an
exchange between nodes never.

Both levels are all-to-alls of the whole group in which most ranks send each other nothing, so that no further
process groups are needed.
"""

from collections.abc import Sequence
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor

from dlrm.sharding.splitting.exchange import SplitExchange


class TwoLevelExchange(SplitExchange):
    """A `SplitExchange` between ranks that share nodes, which sums inside nodes first.

    The ranks of a node are consecutive. Sums inside a node are rounded once more before they leave it.

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
        """This rank's rows of the sum over ranks, in the dtype of `partial`."""
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
        """All ranks' rows in the order of ranks, in the wire dtype."""
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
        """Batch sizes of the ranks with the same position in their nodes as `rank`."""
        return batch_sizes[rank % self.ranks_per_node :: self.ranks_per_node]

    def _is_near(self, rank: int) -> bool:
        return rank // self.ranks_per_node == self.rank // self.ranks_per_node

    def _is_peer(self, rank: int) -> bool:
        return (rank - self.rank) % self.ranks_per_node == 0


def _sum(received: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    pieces = received.view(count, received.shape[0] // count, *received.shape[1:])
    return pieces.sum(0, dtype=torch.promote_types(dtype, torch.float32)).to(dtype)
