"""Dense all-reduces, plain or encoded: a ring, optimal in bytes, and a tree, for high latencies.

Encoded sums round twice, once each way; the rounding error remains in the vector of the rank that encoded.
"""

from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from dlrm.comm import cost
from dlrm.comm.collectives.collective import (
    Buffers,
    Collective,
    Select,
    all_gather_in_place,
    peers_after,
    send_and_receive,
    split_evenly,
)
from dlrm.comm.compression.wire_codecs import WireCodec
from dlrm.comm.links import Links


class _DenseSum(Collective):
    """An all-reduce of all values, encoded by a codec on the wire."""

    shape: ClassVar[str]
    is_sparse = False

    def __init__(
        self, codec: WireCodec, group: dist.ProcessGroup | None = None, buffers: Buffers | None = None
    ) -> None:
        super().__init__(group, buffers)
        self._codec = codec
        self.name = f"{self.shape} {codec.name}"
        self.is_lossless = self._codec.is_lossless


class Ring(_DenseSum):
    """A ring all-reduce: the backend's own in fp32; encoded, a reduce-scatter and an all-gather of messages.

    Args:
        codec: of values on the wire.
    """

    shape = "ring"

    def sent_bytes(self, num_values: int, num_kept: int) -> float:
        """See `Collective.sent_bytes`."""
        return 2 * (self.num_ranks - 1) / self.num_ranks * sum(self._slice_bytes(num_values))

    def predict_s(self, links: Links, num_values: int, num_kept: int) -> float:
        """See `Collective.predict_s`."""
        num_bytes = sum(self._slice_bytes(num_values))
        if self.is_lossless:
            link = links.slowest
            return cost.ring_s(link.latency_s, link.s_per_byte, self.num_ranks, num_bytes)
        link, num_slices = links.all_to_all, self.num_ranks
        return 2 * cost.all_gather_s(link.latency_s, link.s_per_byte, num_slices, num_bytes / num_slices)

    def _slice_bytes(self, num_values: int) -> list[int]:
        """Lengths of the messages of all ranks' slices."""
        bounds = split_evenly(num_values, self.num_ranks)
        return [self._codec.num_bytes(each.stop - each.start) for each in bounds]

    def _sum_in_place(self, vector: Tensor) -> None:
        dist.all_reduce(vector, group=self.group)

    def _reduce_into(self, total: Tensor, vector: Tensor, select: Select) -> None:
        bounds = split_evenly(vector.numel(), self.num_ranks)
        sizes = self._slice_bytes(vector.numel())
        encoded = self.buffers.take_messages("ring.sums", sizes, vector.device)
        own = vector[bounds[self.rank]]
        self._sum_own_slice([vector[each] for each in bounds], encoded, own)
        self._codec.pack(own, encoded[self.rank])
        all_gather_in_place(encoded, self.group)
        for each, message in zip(bounds, encoded, strict=True):
            self._codec.unpack(message, total[each])

    def _sum_own_slice(self, pieces: list[Tensor], outgoing: list[Tensor], own: Tensor) -> None:
        """Send each rank its slice in `outgoing`, and add the others' messages to this rank's slice."""
        peers = peers_after(self.rank, self.num_ranks)
        for peer in peers:
            self._codec.pack(pieces[peer], outgoing[peer])
        sizes = [self._codec.num_bytes(own.numel())] * len(peers)
        received = self.buffers.take_messages("ring.received", sizes, own.device)
        incoming = dict(zip(peers, received, strict=True))
        send_and_receive({peer: outgoing[peer] for peer in peers}, incoming, self.group)
        for peer in sorted(incoming):  # in the order of ranks, so that runs can be repeated bit for bit
            self._codec.add(incoming[peer], own)


class Tree(_DenseSum):
    """A binomial tree all-reduce: log N hops to rank 0, which has the sum, and log N back.

    Args:
        codec: of values on the wire; each rank encodes the sum of its branch.
    """

    shape = "tree"

    def __init__(
        self, codec: WireCodec, group: dist.ProcessGroup | None = None, buffers: Buffers | None = None
    ) -> None:
        super().__init__(codec, group, buffers)
        # the lowest set bit of a rank is its distance to its parent; rank 0 is the root
        lowest = self.rank & -self.rank or 1 << (self.num_ranks - 1).bit_length()
        self._parent = self.rank - lowest if self.rank else None
        steps = [1 << bit for bit in range(lowest.bit_length() - 1)]
        self._children = [self.rank + step for step in steps if self.rank + step < self.num_ranks]

    def sent_bytes(self, num_values: int, num_kept: int) -> float:
        """See `Collective.sent_bytes`."""
        return 2 * (self.num_ranks - 1) / self.num_ranks * self._codec.num_bytes(num_values)

    def predict_s(self, links: Links, num_values: int, num_kept: int) -> float:
        """See `Collective.predict_s`; hops inside nodes come first and last."""
        num_bytes = self._codec.num_bytes(num_values)
        return sum(
            cost.tree_s(link.latency_s, link.s_per_byte, num_ranks, num_bytes)
            for link, num_ranks in ((links.inside, links.ranks_per_node), (links.between, links.num_nodes))
        )

    def _sum_in_place(self, vector: Tensor) -> None:
        received = self.buffers.take("tree.values", vector.numel(), torch.float32, vector.device)
        for child in self._children:  # one at a time: they share the buffer
            send_and_receive({}, {child: received}, self.group)
            vector.add_(received)
        self._broadcast_sum(vector)

    def _reduce_into(self, total: Tensor, vector: Tensor, select: Select) -> None:
        num_bytes = self._codec.num_bytes(vector.numel())
        data = self.buffers.take("tree.data", num_bytes, torch.uint8, vector.device)
        for child in self._children:
            send_and_receive({}, {child: data}, self.group)
            self._codec.add(data, vector)
        self._codec.pack(vector, data)
        self._broadcast_sum(data)
        self._codec.unpack(data, total)

    def _broadcast_sum(self, tensor: Tensor) -> None:
        """Send the branch's sum to the parent, replace it by the sum of all, and pass that on."""
        if self._parent is not None:
            send_and_receive({self._parent: tensor}, {}, self.group)
            send_and_receive({}, {self._parent: tensor}, self.group)
        for child in reversed(self._children):  # the largest branch has the most hops before it
            send_and_receive({child: tensor}, {}, self.group)
