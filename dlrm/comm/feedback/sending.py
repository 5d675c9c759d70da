"""What of a gradient travels now, and what is owed: error feedback around one collective.

A vector is chosen from, the collective takes what it sends out of it, and the rest stays in the memory. Where
nothing is owed and nothing will be, the gradient is summed where it is.
"""

from dataclasses import dataclass

from torch import Tensor

from dlrm.comm.collectives import Collective, Select, keeping
from dlrm.comm.compression.compressors import Compressor
from dlrm.comm.controllers import Choice, Controller
from dlrm.comm.feedback.error_feedback import Memory


def is_lossless(collective: Collective) -> bool:
    """Whether it leaves nothing behind: of one rank, none does."""
    return collective.is_lossless or collective.num_ranks == 1


def is_controlled(collective: Collective) -> bool:
    """Whether a controller says how much of it travels."""
    return collective.is_sparse and not is_lossless(collective)


@dataclass(frozen=True, kw_only=True)
class Sent:
    """What was exchanged, and how."""

    total: Tensor
    """fp32 `[d]`: over ranks."""
    collective: Collective
    num_kept: int
    """Values that this rank has sent."""


class Sending:
    """Chooses, sends and owes. All ranks call it together.

    Args:
        num_values: of the gradient, `d`.
        compressor: chooses, where the collective is sparse.
        memory: of `d` values.
        controller: says how much travels.
        dense: for steps in which all of it travels.
    """

    def __init__(
        self,
        num_values: int,
        compressor: Compressor,
        memory: Memory,
        controller: Controller,
        dense: Collective,
    ) -> None:
        self._num_values, self._dense = num_values, dense
        self._compressor, self._memory, self._controller = compressor, memory, controller

    def way(self, collective: Collective) -> str:
        """All that decides, besides gradients, which messages will be sent: alike where ranks will agree."""
        kinds = [type(each).__name__ for each in (self._compressor, self._memory, self._controller)]
        state = collective.state_dict() if hasattr(collective, "state_dict") else None
        return repr((collective.name, state, kinds, self._controller.position))

    def sum(self, gradient: Tensor, collective: Collective, is_owed: bool) -> Sent:
        """The sum over ranks of what they choose to send.

        Args:
            gradient: fp32 `[d]`; overwritten, maybe.
            collective: the same on all ranks.
            is_owed: whether any rank owes something, which is added.
        """
        vector = self._memory.add(gradient) if is_owed else gradient
        choice = Choice(self._num_values)
        if is_controlled(collective):
            choice = self._controller.choose(vector, self._compressor)
        if collective.is_sparse and choice.num_kept >= self._num_values:
            collective = self._dense  # all values travel without their indices
        num_kept = choice.num_kept if collective.is_sparse else self._num_values
        if not is_owed and is_lossless(collective):
            collective.sum_in_place(gradient)
            return Sent(total=gradient, collective=collective, num_kept=num_kept)
        if not is_owed:
            vector = self._memory.add(gradient)
        shares: list[float] = []
        total = collective.reduce(vector, self._select(vector, choice, shares))
        if shares and not self._compressor.is_exact:
            num_kept = round(shares[0] * self._num_values)
        return Sent(total=total, collective=collective, num_kept=num_kept)

    def _select(self, vector: Tensor, choice: Choice, shares: list[float]) -> Select:
        """What the controller has selected, if the whole vector is asked for; else the compressor selects.

        The share of the values that were selected is added to `shares`.
        """
        by_share = keeping(self._compressor, choice.num_kept, self._num_values)

        def select(part: Tensor) -> Tensor:
            is_whole = part.data_ptr() == vector.data_ptr() and part.numel() == vector.numel()
            indices = choice.indices if is_whole and choice.indices is not None else by_share(part)
            shares.append(indices.numel() / max(part.numel(), 1))
            return indices

        return select
