"""What LARS and LAMB share: which parameters decay, and how far a layer is trusted."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from dlrm.comm.pto import Norms


def decay_of(parameter: nn.Parameter, weight_decay: float) -> float:
    """The weight decay of a parameter: none of biases, and of whatever else has a single dimension.

    So Jia et al., arXiv 1807.11205, for biases and the parameters of batch normalization.
    """
    return weight_decay if parameter.dim() > 1 else 0.0


def paired_norms(norms: Norms, left: Sequence[Tensor], right: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """The norms of both lists, asked for at once: fp32 `[len(left)]` and `[len(right)]`."""
    found = norms([*left, *right])
    return found[: len(left)], found[len(left) :]


def trust(upper: Tensor, lower: Tensor, unknown: Tensor) -> Tensor:
    """`upper / lower`, elementwise; 1 where it is `unknown`, so that a layer of zeros can begin to learn."""
    return torch.where(unknown, torch.ones_like(upper), upper / lower)


def check_options(lr: float, weight_decay: float) -> None:
    """Refuse what no optimizer here can work with.

    Raises:
        ValueError: a rate or a decay is negative.
    """
    if lr < 0 or weight_decay < 0:
        raise ValueError(f"lr={lr} and weight_decay={weight_decay} must not be negative")
