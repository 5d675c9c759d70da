"""Sums in two levels: dense inside each node, over its fast links; then between nodes; then inside again."""

import torch
import torch.distributed as dist
from torch import Tensor

from dlrm.comm import cost
from dlrm.comm.collectives.buffers import Buffers
from dlrm.comm.collectives.collective import Collective, Select, share_of
from dlrm.comm.collectives.messages import after, share, slices, swap
from dlrm.comm.collectives.process_groups import Nodes
from dlrm.comm.links import Links


class Levels(Collective):
    """Each rank sums a shard over its node, then over nodes with those of the same place, and hands it round.

    Of one node, this is dense and lossless.

    Args:
        between: sums shards over `nodes.between`; None where there is one node.
        nodes: where ranks are.
        buffers: as for `Collective`.
    """

    def __init__(self, between: Collective | None, nodes: Nodes, buffers: Buffers | None) -> None:
        super().__init__(nodes.group, buffers)
        self._between = between
        self._group = nodes.inside
        self._per_node = nodes.per_node
        self._place = dist.get_rank(nodes.group) % nodes.per_node
        self.is_lossless = between is None or between.is_lossless

    def sent_bytes(self, num_values: int, num_kept: int) -> float:
        """As `Collective.sent_bytes`."""
        inside = 2 * (self._per_node - 1) * num_values * torch.float32.itemsize
        if self._between is None:
            return inside / self._per_node
        lengths = [each.stop - each.start for each in slices(num_values, self._per_node)]
        between = sum(
            self._between.sent_bytes(length, share_of(num_kept, length, num_values)) for length in lengths
        )
        return (inside + between) / self._per_node

    def predict_s(self, links: Links, num_values: int, num_kept: int) -> float:
        """As `Collective.predict_s`."""
        link, shard = links.inside, -(-num_values // self._per_node)
        num_bytes = shard * torch.float32.itemsize
        inside_s = 2 * cost.all_gather_s(link.latency_s, link.s_per_byte, self._per_node, num_bytes)
        if self._between is None:
            return inside_s
        kept = share_of(num_kept, shard, num_values)
        return inside_s + self._between.predict_s(links.of_one_place(), shard, kept)

    def _sum_in_place(self, vector: Tensor) -> None:
        shard = self._reduce_scatter(vector)
        if self._between is not None:
            self._between.sum_in_place(shard)
        self._gather(vector)

    def _reduce_into(self, total: Tensor, vector: Tensor, select: Select) -> None:
        assert self._between is not None  # else it is lossless
        own = slices(vector.numel(), self._per_node)[self._place]
        shard = self._reduce_scatter(vector)
        vector[: own.start].zero_()
        vector[own.stop :].zero_()
        self._between.reduce_into(total[own], shard, select)
        self._gather(total)

    def _reduce_scatter(self, vector: Tensor) -> Tensor:
        """Sum over the node, in place, in this rank's shard of `vector`, which is returned."""
        bounds = slices(vector.numel(), self._per_node)
        own = vector[bounds[self._place]]
        peers = after(self._place, self._per_node)
        memory = self.buffers.take("levels", own.numel() * len(peers), torch.float32, vector.device)
        received = dict(zip(peers, memory.view(len(peers), own.numel()), strict=True))
        swap({peer: vector[bounds[peer]] for peer in peers}, received, self._group)
        for peer in sorted(peers):
            own.add_(received[peer])
        return own

    def _gather(self, vector: Tensor) -> None:
        """Hand round the shards of `vector`, in place."""
        if self._per_node > 1:
            share([vector[each] for each in slices(vector.numel(), self._per_node)], self._group)
