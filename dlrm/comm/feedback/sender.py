"""Sends a share of gradient and residual through a collective; the rest becomes the new residual."""

from dataclasses import dataclass

from torch import Tensor

from dlrm.comm.collectives import Collective, Select, select_share
from dlrm.comm.compression.compressors import Compressor
from dlrm.comm.controllers import Controller, Selection
from dlrm.comm.feedback.error_feedback import ErrorFeedback


def leaves_no_residual(collective: Collective) -> bool:
    """Whether a collective sends everything exactly, as each does in a group of one rank."""
    return collective.is_lossless or collective.num_ranks == 1


def is_controlled(collective: Collective) -> bool:
    """Whether a controller decides how much a collective sends."""
    return collective.is_sparse and not leaves_no_residual(collective)


@dataclass(frozen=True, kw_only=True)
class Sent:
    """The result of one exchange."""

    total: Tensor
    """fp32 `[d]`: the sum over ranks."""
    collective: Collective
    """The collective that was used."""
    num_kept: int
    """Values that this rank has sent."""


class Sender:
    """Selects and sends values, with error feedback; all ranks call it together.

    Args:
        num_values: of the gradient, `d`.
        compressor: selects, where the collective is sparse.
        feedback: the residual of `d` values.
        controller: decides how much is sent.
        dense: collective for steps in which all values are sent.
    """

    def __init__(
        self,
        num_values: int,
        compressor: Compressor,
        feedback: ErrorFeedback,
        controller: Controller,
        dense: Collective,
    ) -> None:
        self._num_values, self._dense = num_values, dense
        self._compressor, self._feedback, self._controller = compressor, feedback, controller

    def describe(self, collective: Collective) -> str:
        """All state that decides which messages are sent, besides gradients: equal where ranks agree."""
        kinds = [type(each).__name__ for each in (self._compressor, self._controller)]
        state = collective.state_dict() if hasattr(collective, "state_dict") else None
        return repr((collective.name, state, kinds, self._feedback.keeps, self._controller.position))

    def sum(self, gradient: Tensor, collective: Collective, has_residual: bool) -> Sent:
        """Sum over ranks what each of them selects.

        Args:
            gradient: fp32 `[d]`; may be overwritten.
            collective: the same on all ranks.
            has_residual: whether any rank has a residual, which is added.
        """
        vector = self._feedback.add(gradient) if has_residual else gradient
        selection = Selection(self._num_values)
        if is_controlled(collective):
            selection = self._controller.choose(vector, self._compressor)
        if collective.is_sparse and selection.num_kept >= self._num_values:
            collective = self._dense  # all values are sent, so that indices would be a waste
        num_kept = selection.num_kept if collective.is_sparse else self._num_values
        if not has_residual and leaves_no_residual(collective):
            collective.sum_in_place(gradient)
            return Sent(total=gradient, collective=collective, num_kept=num_kept)
        if not has_residual:
            vector = self._feedback.add(gradient)
        shares: list[float] = []
        total = collective.reduce(vector, self._select(vector, selection, shares))
        if shares and not self._compressor.is_exact:
            num_kept = round(shares[0] * self._num_values)
        return Sent(total=total, collective=collective, num_kept=num_kept)

    def _select(self, vector: Tensor, selection: Selection, shares: list[float]) -> Select:
        """Make a `Select` that reuses the controller's indices, if any, and appends the selected share."""
        by_share = select_share(self._compressor, selection.num_kept, self._num_values)

        def select(part: Tensor) -> Tensor:
            # the controller's indices are into the whole vector, not into a shard of it
            is_whole = part.data_ptr() == vector.data_ptr() and part.numel() == vector.numel()
            indices = selection.indices if is_whole and selection.indices is not None else by_share(part)
            shares.append(indices.numel() / max(part.numel(), 1))
            return indices

        return select
