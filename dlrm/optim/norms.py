"""PTO, the parallel tensor operator: small work that all ranks repeat is divided, and its scalars gathered.

LARS, LAMB and clipping want the norm of every layer. Replicas hold the same layers, so that each rank can
take the norms of some and hear of the others: a few bytes travel instead of all that memory being read by
all (Shi et al., arXiv 2010.10458, name the operator and use it for LARS). A norm is then computed once, by
its owner, and everybody uses the owner's bits. Where a layer is small the message costs more than the work,
and `choose_norms` finds out by trying.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dlrm.comm.links import best_time_s, finish

Norms = Callable[[Sequence[Tensor]], Tensor]
"""From tensors, on one device, to their Euclidean norms, fp32 `[len(tensors)]`."""

EPS: Final = 1e-6
"""Added to the norm that gradients are divided by when they are clipped, as `torch.nn.utils` does."""


def local_norms(tensors: Sequence[Tensor]) -> Tensor:
    """The Euclidean norm of each tensor, fp32 `[len(tensors)]`, also of those of a lower precision."""
    if not tensors:
        return torch.zeros(0)
    return torch.stack(torch._foreach_norm(list(tensors), 2, torch.float32))


class SharedNorms:
    """Norms of tensors that all ranks hold alike, each of them computed by one rank.

    To the bit what `local_norms` gives, where all ranks compute alike; where they do not (machines of several
    kinds), all ranks still get the same bits.

    Args:
        group: of the replicas; None is all ranks.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group
        self._rank, self._num_ranks = dist.get_rank(group), dist.get_world_size(group)

    def __call__(self, tensors: Sequence[Tensor]) -> Tensor:
        """The norms; all ranks of the group call it together.

        Args:
            tensors: of the same number, shapes and order on all ranks, and all on one device.

        Returns:
            fp32 `[len(tensors)]`, the same bits on all ranks.
        """
        if not tensors:
            return torch.zeros(0)
        device = tensors[0].device
        shares = divide(tuple(tensor.numel() for tensor in tensors), self._num_ranks)
        mine, width = shares[self._rank], max(map(len, shares))
        found = torch.zeros(self._num_ranks, width, device=device)
        own = torch.zeros(width, device=device)
        own[: len(mine)] = local_norms([tensors[index] for index in mine])
        dist.all_gather(list(found.unbind()), own, group=self._group)
        return found.flatten()[_places(shares, device)]


@functools.cache
def divide(sizes: tuple[int, ...], num_ranks: int) -> tuple[tuple[int, ...], ...]:
    """Which tensors each rank takes: the largest first, each by the rank that has least to do so far.

    Args:
        sizes: of the tensors, in values.
        num_ranks: at least 1.
    """
    shares: list[list[int]] = [[] for _ in range(num_ranks)]
    load = [0] * num_ranks
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        rank = load.index(min(load))
        shares[rank].append(index)
        load[rank] += sizes[index]
    return tuple(map(tuple, shares))


@functools.cache
def _places(shares: tuple[tuple[int, ...], ...], device: torch.device) -> Tensor:
    """Where each tensor's norm lies among what was gathered: `[ranks, longest share]`, flat."""
    width = max(map(len, shares))
    found = {
        index: rank * width + place for rank, share in enumerate(shares) for place, index in enumerate(share)
    }
    return torch.tensor([found[index] for index in range(len(found))], device=device)


def choose_norms(parameters: Iterable[nn.Parameter], group: dist.ProcessGroup | None = None) -> Norms:
    """The faster way to the norms of these parameters, tried out; all ranks of the group call it together.

    Args:
        parameters: replicas, equal on all ranks.
        group: of the replicas; None is all ranks.

    Returns:
        `SharedNorms` or `local_norms`: the same for all ranks, by the times of the slowest.
    """
    tensors = [parameter.detach() for parameter in parameters]
    if not dist.is_initialized() or dist.get_world_size(group) == 1 or not tensors:
        return local_norms
    device = tensors[0].device

    def time_s(norms: Norms) -> float:
        def work() -> None:
            norms(tensors)
            finish(device)

        return best_time_s(work, device, group)

    shared = SharedNorms(group)
    return shared if time_s(shared) < time_s(local_norms) else local_norms


@torch.no_grad()
def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float, norms: Norms = local_norms) -> Tensor:
    """Shrink all gradients by one factor, in place, where their norm as a single vector is above `max_norm`.

    The factor is that of `torch.nn.utils.clip_grad_norm_`. A gradient with a value that is no number makes
    the norm none, and with it all gradients: nothing is hidden.

    Args:
        parameters: those without a gradient are passed over.
        max_norm: that gradients keep at most.
        norms: how norms are found; `SharedNorms` wants gradients that are equal on all ranks, as they are
            after their exchange.

    Returns:
        The norm before, fp32 scalar.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if not gradients:
        return torch.zeros(())
    total: Tensor = torch.linalg.vector_norm(norms(gradients))
    factor = torch.clamp(max_norm / (total + EPS), max=1.0)
    torch._foreach_mul_(gradients, factor)
    return total
