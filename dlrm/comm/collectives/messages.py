"""Messages between the ranks of a group: all of a step travel at once, straight from and to tensors.

Gloo's own all-gather and reduce-scatter copy what they are given and go round in a ring, hop by hop.
"""

from collections.abc import Mapping, Sequence

import torch.distributed as dist
from torch import Tensor


def swap(
    outgoing: Mapping[int, Tensor], incoming: Mapping[int, Tensor], group: dist.ProcessGroup | None
) -> None:
    """Send and receive, and wait for all of it.

    Args:
        outgoing: contiguous tensors by target, a rank of the group.
        incoming: contiguous tensors, to be overwritten, by source. Sizes must be what the source sends;
            of empty tensors, no message is sent.
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


def share(pieces: Sequence[Tensor], group: dist.ProcessGroup | None) -> None:
    """An all-gather in place: every rank has filled its own piece, and gets those of the others.

    Args:
        pieces: contiguous tensors by rank, of sizes that all ranks know.
        group: None is all ranks.
    """
    rank = dist.get_rank(group)
    peers = after(rank, len(pieces))
    swap(dict.fromkeys(peers, pieces[rank]), {peer: pieces[peer] for peer in peers}, group)


def after(rank: int, num_ranks: int) -> list[int]:
    """All other ranks, starting with the next: nobody is everybody's first target."""
    return [(rank + step) % num_ranks for step in range(1, num_ranks)]


def slices(num_values: int, num_ranks: int) -> list[slice]:
    """Where each rank's part of a vector lies: of equal lengths, but for the last ones, maybe empty."""
    length = -(-num_values // num_ranks)
    return [
        slice(min(rank * length, num_values), min((rank + 1) * length, num_values))
        for rank in range(num_ranks)
    ]
