"""What ranks tell each other before an exchange: a few numbers, so that no two of them do different things.

Which messages an exchange sends depends on what ranks have agreed on before: how many values travel, whose
turn it is to choose. Ranks whose states differed would wait for messages that nobody sends, or take one for
another. So each rank tells all others first where it stands, and whether it can go on; where they disagree,
all of them know it at once and say so.

The same message carries scalars that must arrive whole, whatever becomes of the gradient.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


class DisagreementError(RuntimeError):
    """Ranks are about to do different exchanges, or one of them cannot do its part."""


@dataclass(frozen=True, kw_only=True)
class Intent:
    """What a rank is about to do."""

    exchange: int
    """Which one of the run, counted from 1."""
    num_values: int
    """Of its gradient."""
    way: int
    """A digest of what decides which messages it will send, 32 bits."""

    def __str__(self) -> str:
        return f"is at exchange {self.exchange:,} of {self.num_values:,} values, in state {self.way:08x}"


class Preflight:
    """Tells and hears. All ranks call it together, with equally many scalars.

    Args:
        device: on which the group's backend exchanges tensors.
        group: None is all ranks.
    """

    def __init__(self, device: torch.device, group: dist.ProcessGroup | None = None) -> None:
        self._device, self._group = device, group
        self._num_ranks = dist.get_world_size(group)

    def __call__(
        self, intent: Intent, problem: Exception | None, energy: float, scalars: Tensor
    ) -> tuple[list[float], Tensor]:
        """Go on only if all ranks are about to do the same.

        Args:
            intent: of this rank.
            problem: why it cannot.
            energy: any number of this rank's.
            scalars: `[n]`, any float dtype.

        Returns:
            The energies of all ranks, and the sums of the scalars, in their dtype: the same bits everywhere.

        Raises:
            DisagreementError: on all ranks; on one with a problem, that.
        """
        if self._num_ranks == 1:
            if problem is not None:
                raise problem
            return [energy], scalars
        words = [problem is not None, intent.exchange, intent.num_values, intent.way, energy]
        own = torch.tensor(list(map(float, words)), dtype=torch.float64)
        mine = torch.cat([own.to(self._device), scalars.double()])
        every = [torch.empty_like(mine) for _ in range(self._num_ranks)]
        dist.all_gather(every, mine, group=self._group)
        heard = torch.stack(every)
        told = heard[:, : len(words)].tolist()
        if problem is not None:
            raise problem
        _check([bool(each[0]) for each in told], [_intent(each[1:4]) for each in told])
        # added in one order on all ranks, which an all-reduce does not promise
        return [each[4] for each in told], heard[:, len(words) :].sum(0).to(scalars.dtype)


def check_standings(standings: Sequence[str]) -> None:
    """Refuse to go on from states that are not the same everywhere.

    Args:
        standings: by rank, what it would go on from.

    Raises:
        DisagreementError: some differ.
    """
    for rank, standing in enumerate(standings):
        if standing != standings[0]:
            raise DisagreementError(
                f"ranks disagree: rank 0 {standings[0]}, and rank {rank} {standing}. Give all ranks the same "
                "options, and the state of one moment"
            )


def _intent(numbers: Sequence[float]) -> Intent:
    exchange, num_values, way = map(int, numbers)
    return Intent(exchange=exchange, num_values=num_values, way=way)


def _check(has_problem: Sequence[bool], intents: Sequence[Intent]) -> None:
    """Refuse an exchange that is not the same everywhere."""
    if any(has_problem):
        raise DisagreementError(
            f"rank {has_problem.index(True)} cannot take part in exchange {intents[0].exchange:,}: its own "
            "message says why. Nothing was sent"
        )
    for rank, intent in enumerate(intents):
        if intent != intents[0]:
            raise DisagreementError(
                f"ranks disagree: rank 0 {intents[0]}, and rank {rank} {intent}. Nothing was sent. Give all "
                "ranks the same model, options and state, and decide only by values that all agreed on"
            )
