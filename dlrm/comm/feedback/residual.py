"""A rank's residual as checkpointed state, which other ranks can inherit.

Any rank that holds a residual adds it to its own gradient, and the sum over ranks is the same. With another
number of ranks, residuals of missing ranks go to others. A residual is lost if its worker died with its
memory, or was a step behind the survivors; the loss is reported as a share of the energy (sum of squares) of
all residuals, which is measured now and then while all ranks are there.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch

from dlrm.comm.compression.compressors import Compressor
from dlrm.comm.feedback.error_feedback import ErrorFeedback


@dataclass(frozen=True, kw_only=True)
class LostResiduals:
    """Residuals that were lost with their ranks."""

    step: int
    """Exchanges done when training resumed without the residuals."""
    ranks: tuple[int, ...]
    """The ranks that held them, as numbered before the failure."""
    of_ranks: int
    """Number of ranks before the failure."""
    energy_share: float | None
    """Share of the energy of all residuals, when last measured; None: never measured."""

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Restore an instance from its saved fields."""
        return cls(**{**data, "ranks": tuple(data["ranks"])})

    def __str__(self) -> str:
        who = ", ".join(map(str, self.ranks))
        share = "an unknown share" if self.energy_share is None else f"{self.energy_share:.1%}"
        return (
            f"at step {self.step}, gradients that rank {who} of {self.of_ranks} had not sent yet: "
            f"{share} of the energy of all that was not sent"
        )


class Residual:
    """This rank's residual and its compressor's state, for checkpoints.

    Args:
        feedback: of the exchange.
        compressor: of the exchange.
        rank: in the exchange's group.
        num_ranks: of the exchange's group.
    """

    def __init__(self, feedback: ErrorFeedback, compressor: Compressor, rank: int, num_ranks: int) -> None:
        self._feedback, self._compressor = feedback, compressor
        self._rank, self._num_ranks = rank, num_ranks
        self.inherited: list[tuple[int, int]] = []
        """Number of ranks, and rank, of the residuals that were loaded here and are not settled yet."""
        self.is_pending = False
        """Whether any rank has a residual: the same on all ranks."""

    @property
    def needs_saving(self) -> bool:
        """Whether checkpoints must hold this state: residuals are kept, or the compressor has a state."""
        return self._feedback.keeps or bool(self._compressor.state_dict())

    @property
    def energy(self) -> float:
        """Sum of the squares of the residual; waits for the device."""
        return self._feedback.energy

    def state_dict(self) -> dict[str, Any]:
        """The current residual, as live tensors, and the compressor's state."""
        return {
            "rank": self._rank,
            "num_ranks": self._num_ranks,
            "memory": self._feedback.state_dict() if self.is_pending else {},
            "compressor": {type(self._compressor).__name__: self._compressor.state_dict()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state of one rank."""
        self.inherit([state])

    def inherit(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Replace the residual by the sum of several ranks' residuals.

        Args:
            states: of any ranks of the same model; empty: there is no residual.

        Raises:
            ValueError: a state is of another model, or of a run with other error feedback.
        """
        self.inherited, self.is_pending = [], False
        for tensor in self._feedback.state_dict().values():  # live tensors: this clears the residual
            tensor.zero_()
        for state in states:
            place = (state["num_ranks"], state["rank"])
            if state["memory"]:
                self._add(state["memory"])
                self.inherited.append(place)
            mine = state["compressor"].get(type(self._compressor).__name__)
            # random draws continue only on the same rank of as many
            if place == (self._num_ranks, self._rank) and mine is not None:
                self._compressor.load_state_dict(mine)

    def _add(self, saved: Mapping[str, torch.Tensor]) -> None:
        before = {name: tensor.clone() for name, tensor in self._feedback.state_dict().items()}
        self._feedback.load_state_dict(saved)  # checks kind and shape
        for name, tensor in self._feedback.state_dict().items():
            tensor.add_(before[name])


def find_lost(
    owners: int, energies: Sequence[float], held: Sequence[Sequence[tuple[int, int]]], step: int
) -> LostResiduals | None:
    """Find residuals that no rank holds any more.

    Args:
        owners: number of ranks that had residuals; 0: none had.
        energies: of their residuals, by rank; empty, or of another number of ranks: unknown.
        held: `Residual.inherited` of each new rank.
        step: exchanges done.
    """
    found = {rank for of_one in held for num_ranks, rank in of_one if num_ranks == owners}
    lost = tuple(rank for rank in range(owners) if rank not in found)
    if not lost:
        return None
    whole = sum(energies) if len(energies) == owners else 0.0
    share = sum(energies[rank] for rank in lost) / whole if whole else None
    return LostResiduals(step=step, ranks=lost, of_ranks=owners, energy_share=share)
