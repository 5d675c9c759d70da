"""Point-to-point messages between the ranks of a group, all of a step in flight at once and without copies.

Gloo's own all-gather and reduce-scatter copy their input and send it around a ring, hop by hop.
"""

from collections.abc import Mapping, Sequence

import torch.distributed as dist
from torch import Tensor


def send_and_receive(
    outgoing: Mapping[int, Tensor], incoming: Mapping[int, Tensor], group: dist.ProcessGroup | None
) -> None:
    """Send and receive tensors, and wait for all of them.

    Args:
        outgoing: contiguous tensors by target, a rank of the group.
        incoming: contiguous tensors to be overwritten, by source, of the sizes that the source sends. No
            message is sent for an empty tensor.
        group: None is all ranks.
    """
    messages = [
        dist.P2POp(operation, tensor, group=group, group_peer=peer)
        for operation, tensors in ((dist.irecv, incoming), (dist.isend, outgoing))
        for peer, tensor in tensors.items()
        if tensor.numel()
    ]
    if messages:
        for work in dist.batch_isend_irecv(messages):
            work.wait()


def all_gather_in_place(pieces: Sequence[Tensor], group: dist.ProcessGroup | None) -> None:
    """Fill every rank's piece on all ranks; each rank has filled its own before.

    Args:
        pieces: contiguous tensors by rank, of sizes that all ranks know.
        group: None is all ranks.
    """
    rank = dist.get_rank(group)
    peers = peers_after(rank, len(pieces))
    send_and_receive(dict.fromkeys(peers, pieces[rank]), {peer: pieces[peer] for peer in peers}, group)


def peers_after(rank: int, num_ranks: int) -> list[int]:
    """List all other ranks from the next one on, so that no rank is the first target of all."""
    return [(rank + step) % num_ranks for step in range(1, num_ranks)]


def split_evenly(num_values: int, num_ranks: int) -> list[slice]:
    """Split a vector among ranks into slices of equal length; the last ones may be shorter, or empty."""
    length = -(-num_values // num_ranks)
    return [
        slice(min(rank * length, num_values), min((rank + 1) * length, num_values))
        for rank in range(num_ranks)
    ]
