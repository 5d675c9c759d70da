"""Finds the parameters whose gradients are exchanged, and checks that all ranks have the same."""

import itertools
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer


def named_parameters(model: nn.Module, optimizer: Optimizer) -> dict[str, nn.Parameter]:
    """Return the trained parameters of an optimizer by their names in the model, in its order.

    Raises:
        ValueError: the optimizer has parameters of another model, or none.
    """
    wanted = {id(each) for group in optimizer.param_groups for each in group["params"] if each.requires_grad}
    found = {name: each for name, each in model.named_parameters() if id(each) in wanted}
    if len(found) < len(wanted) or not found:
        raise ValueError(
            f"of the {len(wanted)} parameters that the optimizer trains, {len(found)} are the model's; make "
            "the optimizer for parameters of this model"
        )
    return found


def check_alike(
    parameters: Mapping[str, nn.Parameter],
    group: dist.ProcessGroup | None,
    options: object = None,
    problem: Exception | None = None,
) -> None:
    """Check that all ranks have the same parameters and options; all ranks call it together.

    Args:
        parameters: of this rank, by name, in order.
        group: None is all ranks.
        options: of the exchange, compared by their `repr`.
        problem: why this rank cannot exchange gradients; it is raised here, and reported by the other ranks.

    Raises:
        ValueError: on all ranks; says what differs, or which rank has a problem.
    """
    found: list[Any] = [None] * dist.get_world_size(group)
    own = [f"{name} {each.dtype} {list(each.shape)}" for name, each in parameters.items()]
    dist.all_gather_object(found, (problem is not None, repr(options), own), group=group)
    if problem is not None:
        raise problem
    for rank, (has_problem, theirs, other) in enumerate(found):
        if has_problem:
            raise ValueError(f"rank {rank} cannot exchange gradients: its own message says why")
        if theirs != found[0][1]:
            raise ValueError(
                f"rank {rank} would exchange gradients by {theirs}, and rank 0 by {found[0][1]}; give all "
                "ranks the same options"
            )
        for here, there in itertools.zip_longest(found[0][2], other, fillvalue="nothing more"):
            if here != there:
                raise ValueError(
                    f"rank {rank} would exchange the gradient of {there}, and rank 0 that of {here}; build "
                    "the same model and optimizer on all ranks"
                )


def shaped_like(piece: Tensor, parameter: nn.Parameter) -> Tensor:
    """View flat values `[parameter.numel()]` in the shape and memory layout of a parameter.

    Fused optimizers need the same layout of a parameter and its gradient.
    """
    strides = torch.empty_like(parameter, device="meta").stride()
    return piece.as_strided(parameter.shape, strides)
