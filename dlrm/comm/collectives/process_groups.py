"""Which ranks share a node: a group of those, and one of the ranks that have the same place in all nodes.

Sums in two levels go through the first group's fast links and then through the second's slow ones, all of
a node's ranks at once, each with its share.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist

from dlrm.comm.collectives.timeouts import timeout_of
from dlrm.comm.links import ranks_per_node


@dataclass(frozen=True, kw_only=True)
class Nodes:
    """Ranks in nodes of equal size, the ranks of a node one after the other."""

    group: dist.ProcessGroup | None
    """All of them; None is the default group."""
    inside: dist.ProcessGroup | None
    """Of this rank's node, in order; meaningless where `per_node` is 1."""
    between: dist.ProcessGroup | None
    """Of those with this rank's place in all nodes, in order; meaningless where `num_nodes` is 1."""
    per_node: int
    num_nodes: int


def make_nodes(device: torch.device, group: dist.ProcessGroup | None = None) -> Nodes:
    """The nodes of torchrun's environment (`LOCAL_WORLD_SIZE`), agreed; all ranks call it together.

    Args:
        device: of this rank's tensors.
        group: whose ranks are meant; None is all.

    Returns:
        One node of all ranks where the environment says nothing, or nodes are not alike.
    """
    per_node, num_ranks = ranks_per_node(device, group), dist.get_world_size(group)
    if per_node == 1:
        return Nodes(group=group, inside=None, between=group, per_node=1, num_nodes=num_ranks)
    if per_node == num_ranks:
        return Nodes(group=group, inside=group, between=None, per_node=num_ranks, num_nodes=1)
    ranks, rank = dist.get_process_group_ranks(group), dist.get_rank(group)
    first, place = rank - rank % per_node, rank % per_node
    backend, timeout = dist.get_backend(group), timeout_of(device, group)

    def group_of(members: list[int]) -> dist.ProcessGroup:
        # made by its members alone, as other groups may have other ranks and other nodes
        made: dist.ProcessGroup = dist.new_group(
            members, backend=backend, timeout=timeout, use_local_synchronization=True
        )
        return made

    return Nodes(
        group=group,
        inside=group_of(ranks[first : first + per_node]),
        between=group_of(ranks[place::per_node]),
        per_node=per_node,
        num_nodes=num_ranks // per_node,
    )
