"""Process groups for two-level sums: the ranks of a node, and those of one local rank on all nodes."""

from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from dlrm.comm.links import ranks_per_node


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

    Returns:
        A single node of all ranks where the variable is not set, or nodes differ in size.
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
