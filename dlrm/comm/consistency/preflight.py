"""The preflight: ranks verify by a small all-gather that all are about to do the same exchange.

The messages of an exchange depend on state that ranks must share: how many values are sent, whose turn it is
to select. Ranks with different states would wait for messages that are never sent, or mistake one for
another; after the preflight, a mismatch raises on all ranks instead. Its message also carries scalars that
must be summed exactly, whatever happens to the gradient.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor


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

    Args:
        intent: of this rank.
        problem: why this rank cannot take part; None: it can.
        energy: a number of this rank, gathered along.
        scalars: `[n]`, any float dtype, on the device on which the group exchanges tensors.
        group: None is all ranks.

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
