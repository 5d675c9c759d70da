"""What a rank owes: gradients that it computed and has not sent, as a state that outlives the rank.

The sum over ranks is what counts: whoever holds a residual adds it to its own gradient, and it arrives. So at
another number of ranks, residuals of ranks that are gone fall to others, and nothing is lost.

Lost is a residual that nobody holds any more: its worker died with its memory, or was a step behind when the
others went on. What it owed then never reaches the parameters. It weighs as much as its share of the energy
(sum of squares) of all that was owed, measured every so many steps while all ranks were there.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch

from dlrm.comm.compression.compressors import Compressor
from dlrm.comm.feedback.error_feedback import Memory


@dataclass(frozen=True, kw_only=True)
class LostResiduals:
    """What ranks owed that took it along."""

    step: int
    """Exchanges done when training went on without it."""
    ranks: tuple[int, ...]
    """Whose it was, in the numbering of then."""
    of_ranks: int
    """How many there were then."""
    energy_share: float | None
    """Of the energy of everything that was owed, when that was last measured; None: it never was."""

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Read one back."""
        return cls(**{**data, "ranks": tuple(data["ranks"])})

    def __str__(self) -> str:
        who = ", ".join(map(str, self.ranks))
        share = "an unknown share" if self.energy_share is None else f"{self.energy_share:.1%}"
        return (
            f"at step {self.step}, gradients that rank {who} of {self.of_ranks} had not sent yet: "
            f"{share} of the energy of all that was not sent"
        )


class Residual:
    """The memory of an exchange, and its compressor's state, as a state of this rank alone.

    Args:
        memory: of the exchange.
        compressor: of the exchange.
        rank: of the exchange's group.
        num_ranks: of the exchange's group.
    """

    def __init__(self, memory: Memory, compressor: Compressor, rank: int, num_ranks: int) -> None:
        self._memory, self._compressor = memory, compressor
        self._rank, self._num_ranks = rank, num_ranks
        self.taken_over: list[tuple[int, int]] = []
        """Number of ranks, and rank, of those whose residuals were given to this one and not settled yet."""
        self.is_owed = False
        """Whether any rank owes something: the same on all."""

    @property
    def is_kept(self) -> bool:
        """Whether the memory keeps anything at all."""
        return bool(self._memory.state_dict())

    @property
    def is_worth_saving(self) -> bool:
        """Whether a checkpoint needs this: for what may be owed, or to go on with a compressor's draws."""
        return self.is_kept or bool(self._compressor.state_dict())

    @property
    def energy(self) -> float:
        """Sum of the squares of what is owed; waits for the device."""
        return self._memory.energy

    def state_dict(self) -> dict[str, Any]:
        """What is owed now; its tensors are the live ones."""
        return {
            "rank": self._rank,
            "num_ranks": self._num_ranks,
            "memory": self._memory.state_dict() if self.is_owed else {},
            "compressor": {type(self._compressor).__name__: self._compressor.state_dict()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from the state of one rank."""
        self.inherit([state])

    def inherit(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Owe the sum of what several ranks owed, and nothing else.

        Args:
            states: of any ranks of the same model; none: nothing is owed.

        Raises:
            ValueError: one is of another model, or of a run with other error feedback.
        """
        self.taken_over, self.is_owed = [], False
        for tensor in self._memory.state_dict().values():
            tensor.zero_()
        for state in states:
            place = (state["num_ranks"], state["rank"])
            if state["memory"]:
                self._add(state["memory"])
                self.taken_over.append(place)
            mine = state["compressor"].get(type(self._compressor).__name__)
            if place == (self._num_ranks, self._rank) and mine is not None:
                self._compressor.load_state_dict(mine)

    def _add(self, saved: Mapping[str, torch.Tensor]) -> None:
        before = {name: tensor.clone() for name, tensor in self._memory.state_dict().items()}
        self._memory.load_state_dict(saved)  # which refuses what does not fit
        for name, tensor in self._memory.state_dict().items():
            tensor.add_(before[name])


def losses_of(
    owners: int, energies: Sequence[float], held: Sequence[Sequence[tuple[int, int]]], step: int
) -> LostResiduals | None:
    """What is lost of the residuals of so many ranks.

    Args:
        owners: ranks that there were; 0: nothing went before.
        energies: of their residuals, by rank; of another number of ranks, or none: not known.
        held: by new rank, number of ranks and rank of those whose residuals it holds.
        step: exchanges done.

    Returns:
        None: nothing.
    """
    found = {rank for of_one in held for num_ranks, rank in of_one if num_ranks == owners}
    lost = tuple(rank for rank in range(owners) if rank not in found)
    if not lost:
        return None
    owed = sum(energies) if len(energies) == owners else 0.0
    share = sum(energies[rank] for rank in lost) / owed if owed else None
    return LostResiduals(step=step, ranks=lost, of_ranks=owners, energy_share=share)
