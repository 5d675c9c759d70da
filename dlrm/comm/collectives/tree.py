"""Dense sums up a binomial tree and down again: fewer, larger messages than a ring's, for slow latencies."""

import torch
import torch.distributed as dist
from torch import Tensor

from dlrm.comm import cost
from dlrm.comm.collectives.buffers import Buffers
from dlrm.comm.collectives.collective import Select
from dlrm.comm.collectives.encoded import EncodedSum
from dlrm.comm.collectives.messages import swap
from dlrm.comm.compression.codecs import WireCodec
from dlrm.comm.links import Links


class Tree(EncodedSum):
    """An all-reduce of all values: log N hops to rank 0, which sums, and log N back.

    Encoded, each rank encodes the sum of its branch, and rank 0 that of all; what is lost by that stays
    behind with who encoded.

    Args:
        codec: for values on the wire.
        group: None is all ranks.
        buffers: as for `Collective`.
    """

    shape = "tree"

    def __init__(
        self, codec: WireCodec, group: dist.ProcessGroup | None = None, buffers: Buffers | None = None
    ) -> None:
        super().__init__(codec, group, buffers)
        lowest = self.rank & -self.rank or 1 << (self.num_ranks - 1).bit_length()
        self._parent = self.rank - lowest if self.rank else None
        steps = [1 << bit for bit in range(lowest.bit_length() - 1)]
        self._children = [self.rank + step for step in steps if self.rank + step < self.num_ranks]

    def sent_bytes(self, num_values: int, num_kept: int) -> float:
        """As `Collective.sent_bytes`."""
        return 2 * (self.num_ranks - 1) / self.num_ranks * self._packing.num_bytes(num_values)

    def predict_s(self, links: Links, num_values: int, num_kept: int) -> float:
        """As `Collective.predict_s`; hops inside nodes come first and last."""
        num_bytes = self._packing.num_bytes(num_values)
        return sum(
            cost.tree_s(link.latency_s, link.s_per_byte, num_ranks, num_bytes)
            for link, num_ranks in ((links.inside, links.ranks_per_node), (links.between, links.num_nodes))
        )

    def _sum_in_place(self, vector: Tensor) -> None:
        received = self.buffers.take("tree.values", vector.numel(), torch.float32, vector.device)
        for child in self._children:
            swap({}, {child: received}, self.group)
            vector.add_(received)
        if self._parent is not None:
            swap({self._parent: vector}, {}, self.group)
            swap({}, {self._parent: vector}, self.group)
        self._hand_down(vector)

    def _reduce_into(self, total: Tensor, vector: Tensor, select: Select) -> None:
        num_bytes = self._packing.num_bytes(vector.numel())
        data = self.buffers.take("tree.data", num_bytes, torch.uint8, vector.device)
        for child in self._children:
            swap({}, {child: data}, self.group)
            self._packing.add(data, vector)
        self._packing.pack(vector, data)
        if self._parent is not None:
            swap({self._parent: data}, {}, self.group)
            swap({}, {self._parent: data}, self.group)
        self._hand_down(data)
        self._packing.unpack(data, total)

    def _hand_down(self, tensor: Tensor) -> None:
        for child in reversed(self._children):  # the largest branch has the longest way to go
            swap({child: tensor}, {}, self.group)
