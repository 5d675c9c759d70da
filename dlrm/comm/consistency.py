"""Checks that all ranks are about to do the same exchange, and propagation of errors to all of them.

The messages of an exchange depend on state that ranks must share: how many values are sent, whose turn it is
to select. Ranks with different states would wait for messages that are never sent, or mistake one for
another. In a preflight, a small all-gather, a mismatch raises on all ranks instead. Its message also carries
scalars that must be summed exactly, whatever happens to the gradient.

Dense fp32 sums have no preflight. A rank without a gradient sends zeros instead, as many as the other ranks
wait for, and behind them sets a flag that all ranks read from the sum. Parameters and options are compared
once, when an exchange is made.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from dlrm.comm.late import LateScalars

NUM_FLAGS: Final = 2
"""fp32 values at the end of a sum: the number of failed ranks, and the sum of their rank numbers."""


class DisagreementError(RuntimeError):
    """Ranks are about to do different exchanges, or one of them cannot take part."""


class Intent(NamedTuple):
    """The exchange that a rank is about to do."""

    exchange: int
    """Number of the exchange in the run, counted from 1."""
    num_values: int
    """Size of the gradient."""
    state: int
    """32-bit digest of the state that decides which messages are sent."""

    def __str__(self) -> str:
        return f"is at exchange {self.exchange:,} of {self.num_values:,} values, in state {self.state:08x}"


def run_preflight(
    intent: Intent,
    problem: Exception | None,
    energy: float,
    scalars: Tensor,
    group: dist.ProcessGroup | None,
) -> tuple[list[float], Tensor]:
    """Return only if all ranks are about to do the same exchange; all ranks call it together.

    `problem` is why this rank cannot take part, and `scalars`, `[n]`, are of any float dtype.

    Returns:
        The energies of all ranks, and the sums of the scalars, in their dtype: the same bits everywhere.

    Raises:
        DisagreementError: on all ranks; a rank with a problem raises that.
    """
    num_ranks = dist.get_world_size(group)
    if num_ranks == 1:
        if problem is not None:
            raise problem
        return [energy], scalars
    header = [problem is not None, *intent, energy]
    own = torch.tensor(list(map(float, header)), dtype=torch.float64)
    message = torch.cat([own.to(scalars.device), scalars.double()])
    messages = [torch.empty_like(message) for _ in range(num_ranks)]
    dist.all_gather(messages, message, group=group)
    gathered = torch.stack(messages)
    headers = gathered[:, : len(header)].tolist()
    if problem is not None:
        raise problem
    for rank, each in enumerate(headers):
        if each[0]:
            raise DisagreementError(
                f"rank {rank} cannot take part in exchange {intent.exchange:,}: its own message says why. "
                "Nothing was sent"
            )
    check_same(
        [Intent(*map(int, each[1:4])) for each in headers],
        "Nothing was sent. Give all ranks the same model, options and state, and decide only by values that "
        "all agreed on",
    )
    # added in the order of ranks, which an all-reduce does not promise
    return [each[4] for each in headers], gathered[:, len(header) :].sum(0).to(scalars.dtype)


def check_same(states: Sequence[object], advice: str) -> None:
    """Raise a `DisagreementError` with the advice unless the states of all ranks are the same."""
    for rank, state in enumerate(states):
        if state != states[0]:
            raise DisagreementError(f"ranks disagree: rank 0 {states[0]}, and rank {rank} {state}. {advice}")


class ErrorFlags:
    """Writes this rank's error flag into a vector before its sum, and reads all ranks' flags afterwards.

    To read a number from a GPU is to wait for all queued work. There flags are read before the next exchange,
    when their copy has long arrived.
    """

    def __init__(self, rank: int, on_gpu: bool) -> None:
        self._rank = rank
        self._late: LateScalars[int] = LateScalars(on_gpu)

    def write(self, flags: Tensor, problem: Exception | None) -> None:
        """Overwrite the last `NUM_FLAGS` values of a vector: zeros, or this rank's `problem`."""
        flags.zero_()
        if problem is not None:
            flags[0], flags[1] = 1, self._rank

    def read(self, flags: Tensor, problem: Exception | None, exchange: int) -> None:
        """Check the summed flags, fp32 `[NUM_FLAGS]`, now or, on a GPU, later; `exchange` is counted from 1.

        Raises:
            DisagreementError: another rank has failed; a failed rank raises its own problem.
        """
        if problem is not None:
            flags.tolist()  # a rank that ends before its message is sent would leave the others waiting
            raise problem
        found = self._late.give(flags, exchange)
        if found is not None:
            _check(found[0], f"cannot take part in exchange {exchange:,}", "Nothing of it counts")

    def read_late(self) -> None:
        """Check flags whose copy was still under way in `read`, which would have raised the same."""
        found = self._late.take()
        if found is None:
            return
        flags, exchange = found
        what = f"could not take part in exchange {exchange:,}, which was the last"
        _check(flags, what, "Replicas differ since then: go back to a saved state")


def _check(flags: Sequence[float], what: str, advice: str) -> None:
    num_ranks, sum_of_ranks = map(int, flags)
    if num_ranks:
        who = f"rank {sum_of_ranks}" if num_ranks == 1 else f"{num_ranks} ranks"
        raise DisagreementError(f"{who} {what}: its own message says why. {advice}")


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

    Options are compared by their `repr`. `problem` is why this rank cannot exchange gradients: it is raised
    here, and reported by the other ranks.

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
