"""Sums in two levels: dense over the fast links inside nodes, and a share per rank between nodes."""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from dlrm.comm import cost
from dlrm.comm.collectives.collective import (
    Buffers,
    Collective,
    Select,
    all_gather_in_place,
    kept_in_part,
    peers_after,
    send_and_receive,
    split_evenly,
)
from dlrm.comm.collectives.dense_sums import Ring
from dlrm.comm.collectives.sparse import SparseAllGather
from dlrm.comm.compression.wire_codecs import WireCodec
from dlrm.comm.links import Links, ranks_per_node


@dataclass(frozen=True, kw_only=True)
class Nodes:
    """The nodes of a process group, all of one size, with consecutive ranks on each."""

    group: dist.ProcessGroup | None
    """All ranks; None is the default group."""
    inside: dist.ProcessGroup | None
    """The ranks of this rank's node, in order; unused where `per_node` is 1."""
    between: dist.ProcessGroup | None
    """The ranks with this one's local rank on all nodes, in order; unused where `num_nodes` is 1."""
    per_node: int
    num_nodes: int


def make_nodes(device: torch.device, group: dist.ProcessGroup | None = None) -> Nodes:
    """Create the groups of nodes from torchrun's LOCAL_WORLD_SIZE; all ranks call it together.

    Where the variable is not set, or nodes differ in size, all ranks count as a single node.
    """
    per_node, num_ranks = ranks_per_node(device, group), dist.get_world_size(group)
    if per_node == 1:
        return Nodes(group=group, inside=None, between=group, per_node=1, num_nodes=num_ranks)
    if per_node == num_ranks:
        return Nodes(group=group, inside=group, between=None, per_node=num_ranks, num_nodes=1)
    ranks, rank = dist.get_process_group_ranks(group), dist.get_rank(group)
    first, local_rank = rank - rank % per_node, rank % per_node
    backend, timeout = dist.get_backend(group), timeout_of(device, group)

    def group_of(members: list[int]) -> dist.ProcessGroup:
        # created by its members alone, as other groups may have other ranks and other nodes
        made: dist.ProcessGroup = dist.new_group(
            members, backend=backend, timeout=timeout, use_local_synchronization=True
        )
        return made

    return Nodes(
        group=group,
        inside=group_of(ranks[first : first + per_node]),
        between=group_of(ranks[local_rank::per_node]),
        per_node=per_node,
        num_nodes=num_ranks // per_node,
    )


def timeout_of(device: torch.device, group: dist.ProcessGroup | None = None) -> timedelta | None:
    """The timeout of a group (None: all ranks) on a device; None if its backend does not report it.

    `dist.new_group` does not inherit it: without an argument, new groups wait half an hour.
    """
    group = group or dist.group.WORLD
    options = getattr(group and group._get_backend(device), "options", None)
    return getattr(options, "_timeout", None)


class _Levels(Collective):
    """A reduce-scatter inside nodes, a collective between nodes for each shard, and an all-gather inside.

    On a single node, without `between`, the sum is dense and lossless.
    """

    def __init__(
        self, name: str, nodes: Nodes, buffers: Buffers | None, make_between: Callable[..., Collective]
    ) -> None:
        super().__init__(nodes.group, buffers)
        self.name = name
        self._between = (
            make_between(group=nodes.between, buffers=self.buffers) if nodes.num_nodes > 1 else None
        )
        self._group = nodes.inside
        self._per_node = nodes.per_node
        self._local_rank = dist.get_rank(nodes.group) % nodes.per_node
        self.is_lossless = self._between is None or self._between.is_lossless

    def sent_bytes(self, num_values: int, num_kept: int) -> float:
        """See `Collective.sent_bytes`."""
        num_bytes: float = 2 * (self._per_node - 1) * num_values * torch.float32.itemsize
        if self._between is not None:
            for each in split_evenly(num_values, self._per_node):
                length = each.stop - each.start
                num_bytes += self._between.sent_bytes(length, kept_in_part(num_kept, length, num_values))
        return num_bytes / self._per_node

    def predict_s(self, links: Links, num_values: int, num_kept: int) -> float:
        """See `Collective.predict_s`."""
        link, shard = links.inside, -(-num_values // self._per_node)
        num_bytes = shard * torch.float32.itemsize
        inside_s = 2 * cost.all_gather_s(link.latency_s, link.s_per_byte, self._per_node, num_bytes)
        if self._between is None:
            return inside_s
        kept = kept_in_part(num_kept, shard, num_values)
        return inside_s + self._between.predict_s(links.one_rank_per_node(), shard, kept)

    def _sum_in_place(self, vector: Tensor) -> None:
        shard = self._reduce_scatter(vector)
        if self._between is not None:
            self._between.sum_in_place(shard)
        self._all_gather(vector)

    def _reduce_into(self, total: Tensor, vector: Tensor, select: Select) -> None:
        assert self._between is not None  # a single node is lossless
        own = split_evenly(vector.numel(), self._per_node)[self._local_rank]
        shard = self._reduce_scatter(vector)
        # other shards are with this node's other ranks now, and with them their residuals
        vector[: own.start].zero_()
        vector[own.stop :].zero_()
        self._between.reduce_into(total[own], shard, select)
        self._all_gather(total)

    def _reduce_scatter(self, vector: Tensor) -> Tensor:
        """Sum this rank's shard of `vector` over the node, in place, and return it."""
        bounds = split_evenly(vector.numel(), self._per_node)
        own = vector[bounds[self._local_rank]]
        peers = peers_after(self._local_rank, self._per_node)
        memory = self.buffers.take("levels", own.numel() * len(peers), torch.float32, vector.device)
        received = dict(zip(peers, memory.view(len(peers), own.numel()), strict=True))
        send_and_receive({peer: vector[bounds[peer]] for peer in peers}, received, self._group)
        for peer in sorted(peers):
            own.add_(received[peer])
        return own

    def _all_gather(self, vector: Tensor) -> None:
        if self._per_node > 1:
            shards = [vector[each] for each in split_evenly(vector.numel(), self._per_node)]
            all_gather_in_place(shards, self._group)


class TwoLevel(_Levels):
    """A two-level all-reduce of all values, so that a node's link carries each value once, not once per rank.

    Jia et al. (arXiv 1807.11205) sum at one rank of each node; here all ranks of a node take a share.

    Args:
        codec: of values on the wire between nodes; inside nodes they are fp32.
        nodes: which ranks share a node.
    """

    is_sparse = False

    def __init__(self, codec: WireCodec, nodes: Nodes, buffers: Buffers | None = None) -> None:
        super().__init__(f"two levels {codec.name}", nodes, buffers, partial(Ring, codec))


class HiTopK(_Levels):
    """HiTopK: dense sums inside nodes, and a `SparseAllGather` of each rank's shard between nodes.

    Shi et al. (MLSys 2021, arXiv 2010.10458). `select` is called with the shard. What a rank does not send
    remains in its shard of its vector, so that error feedback works as for any other collective.

    Args:
        codec: of values on the wire between nodes; inside nodes they are fp32.
        nodes: which ranks share a node.
        exact: whether all ranks select equally many values; if not, they exchange the numbers first.
    """

    is_sparse = True

    def __init__(
        self, codec: WireCodec, nodes: Nodes, *, exact: bool = True, buffers: Buffers | None = None
    ) -> None:
        between = partial(SparseAllGather, codec, exact=exact)
        super().__init__(f"HiTopK {codec.name}", nodes, buffers, between)
