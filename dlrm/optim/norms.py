"""Norms of replicated tensors, divided among the ranks, and gradient clipping by them.

LARS, LAMB and clipping need the norm of every layer. As replicas hold the same layers, each rank can compute
the norms of some and gather the others: a few bytes on the wire save memory reads. Shi et al. (arXiv
2010.10458) call this the parallel tensor operator (PTO) and use it for LARS. For small layers the message
costs more than the work, so that `choose_norms` times both.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dlrm.comm.links import best_time_s, finish

Norms = Callable[[Sequence[Tensor]], Tensor]
"""A function from tensors on one device to their Euclidean norms, fp32 `[len(tensors)]`."""

EPS: Final = 1e-6
"""Added to the divisor in gradient clipping, as in `torch.nn.utils`."""


def local_norms(tensors: Sequence[Tensor]) -> Tensor:
    """Compute the Euclidean norm of each tensor, fp32 `[len(tensors)]` whatever the tensors' precision."""
    if not tensors:
        return torch.zeros(0)
    return torch.stack(torch._foreach_norm(list(tensors), 2, torch.float32))


class SharedNorms:
    """Norms of tensors that all ranks hold alike, each of them computed by one rank.

    The results are those of `local_norms`, and the same bits on all ranks even where machines round
    differently.
    """

    def __init__(self) -> None:
        self._rank, self._num_ranks = dist.get_rank(), dist.get_world_size()

    def __call__(self, tensors: Sequence[Tensor]) -> Tensor:
        """Compute the norms fp32 `[len(tensors)]`; all ranks call it together.

        Args:
            tensors: of the same number, shapes and order on all ranks, and all on one device.
        """
        if not tensors:
            return torch.zeros(0)
        device = tensors[0].device
        shares = divide(tuple(tensor.numel() for tensor in tensors), self._num_ranks)
        mine, width = shares[self._rank], max(map(len, shares))
        found = torch.zeros(self._num_ranks, width, device=device)
        own = torch.zeros(width, device=device)
        own[: len(mine)] = local_norms([tensors[index] for index in mine])
        dist.all_gather(list(found.unbind()), own)
        return found.flatten()[_places(shares, device)]


@functools.cache
def divide(sizes: tuple[int, ...], num_ranks: int) -> tuple[tuple[int, ...], ...]:
    """Assign tensors of these sizes to ranks: the largest first, each to the rank with least work so far."""
    shares: list[list[int]] = [[] for _ in range(num_ranks)]
    load = [0] * num_ranks
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        rank = load.index(min(load))
        shares[rank].append(index)
        load[rank] += sizes[index]
    return tuple(map(tuple, shares))


@functools.cache
def _places(shares: tuple[tuple[int, ...], ...], device: torch.device) -> Tensor:
    """Each tensor's index in the gathered norms `[ranks, longest share]`, flattened."""
    width = max(map(len, shares))
    found = {
        index: rank * width + place for rank, share in enumerate(shares) for place, index in enumerate(share)
    }
    return torch.tensor([found[index] for index in range(len(found))], device=device)


def choose_norms(parameters: Iterable[nn.Parameter]) -> Norms:
    """Time both ways to compute norms and return the faster, by the times of the slowest rank.

    All ranks call it together, with replicas of the same parameters, and get the same answer.
    """
    tensors = [parameter.detach() for parameter in parameters]
    if not dist.is_initialized() or dist.get_world_size() == 1 or not tensors:
        return local_norms
    device = tensors[0].device

    def time_s(norms: Norms) -> float:
        def work() -> None:
            norms(tensors)
            finish(device)

        return best_time_s(work, device)

    shared = SharedNorms()
    return shared if time_s(shared) < time_s(local_norms) else local_norms


@torch.no_grad()
def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float, norms: Norms = local_norms) -> Tensor:
    """Scale all gradients, in place, so that their norm as a single vector is at most `max_norm`.

    The factor is that of `torch.nn.utils.clip_grad_norm_`. A NaN in one gradient makes all gradients NaN, so
    that the failure is visible.

    Args:
        parameters: those without a gradient are left out.
        max_norm: largest norm that stays as it is.
        norms: computes norms; `SharedNorms` needs gradients that are equal on all ranks.

    Returns:
        The norm before clipping, fp32 scalar.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if not gradients:
        return torch.zeros(())
    total: Tensor = torch.linalg.vector_norm(norms(gradients))
    factor = torch.clamp(max_norm / (total + EPS), max=1.0)
    torch._foreach_mul_(gradients, factor)
    return total
