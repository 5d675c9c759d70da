"""SelSync (arXiv 2307.07950): ranks train on by themselves, and meet when a gradient has changed much.

Each step, a rank updates its replicas of the dense parameters with its own gradient alone. It says with one
flag whether the smoothed energy of its gradients has changed by a share of `delta` or more; the flag travels
in a sum of scalars that is due in any case. If any rank has said so, all replace their parameters by the mean
over ranks. Parameters are averaged and not gradients: after steps alone they differ, and the same update
would leave them apart.

With delta 0 ranks meet in each step. For SGD, also with momentum, that is bulk-synchronous training; the mean
of updates is the update by the mean. For Adagrad and Adam it is an algorithm of its own, because their
accumulators grow by the mean of squares instead of the square of the mean. With a delta above all changes,
each rank trains alone.

State of the optimizer that has a parameter's shape (momentum, accumulators) is averaged along with it. Left
alone, equal parameters would go on with unequal momentum or learning rates, and the ranks with the smallest
accumulators would have the last word. Step counters are equal on all ranks as they are.

Only replicas are averaged. Shards of tables have one owner; what the caller does not hand over is not
touched.

A checkpoint holds one set of dense parameters, and so is taken where ranks have met: unless `is_joined`, call
`average` before saving, and before evaluating. It costs an exchange, of those steps only. A run that saves
thus meets in steps in which another does not. A worker that dies between two meetings takes its own steps
since the last one along; the others `average` with whoever takes its place, after that one has copied a
survivor's.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from dlrm.comm.controllers.agreement import Agree
from dlrm.comm.controllers.measures import Ewma


def averaged_state(optimizer: Optimizer) -> list[Tensor]:
    """The optimizer's state that belongs to single values of parameters, in the same order on all ranks.

    Every parameter needs a gradient in each step, of zeros if it was not used: some optimizers make their
    state when they first see one.
    """
    return [
        value
        for group in optimizer.param_groups
        for parameter in group["params"]
        for name, value in sorted(optimizer.state[parameter].items())
        if name != "step" and isinstance(value, Tensor) and value.shape == parameter.shape
    ]


def total_over_ranks(vector: Tensor) -> Tensor:
    """The sum over all ranks, in place."""
    dist.all_reduce(vector)
    return vector


class SelSync:
    """Says when ranks meet, and lets them.

    All ranks call its methods in the same steps.

    Args:
        agree: tells the number of ranks, and whether all of them average equally many values.
        delta: relative change of the smoothed squared norm from which on it is significant; 0: meet in each
            step. The paper uses 0.3 and 0.5.
        total: gives the sum over ranks of an fp32 `[d]`, the same bits on all ranks; it may change its
            argument.
    """

    def __init__(
        self, *, agree: Agree, delta: float = 0.3, total: Callable[[Tensor], Tensor] = total_over_ranks
    ) -> None:
        if not 0 <= delta < math.inf:
            raise ValueError(f"delta is {delta}; choose 0 (meet in each step) or more, such as 0.3")
        self._agree, self._delta, self._total = agree, delta, total
        self._energy = Ewma(agree.num_ranks)
        self.is_joined = True
        """Whether the replicas are equal: nobody has taken a step since they were averaged."""

    def should_sync(self, gradient_norm: float | Tensor, scalars: Tensor) -> tuple[bool, Tensor]:
        """Whether any rank finds its gradient significant; once a step, between backward and update.

        If it says so, call `average` after the update.

        Args:
            gradient_norm: L2 norm of this rank's gradient; no number counts as significant, for all must see.
            scalars: fp32 `[n]`, whatever has to be summed in this step: the flag travels as one more.

        Returns:
            Whether; and the sums of the scalars over ranks.
        """
        change = self._relative_change(float(gradient_norm) ** 2)
        flag = scalars.new_tensor([not change < self._delta])
        *sums, flags = torch.split(self._total(torch.cat([scalars, flag])), [scalars.numel(), 1])
        self.is_joined = False
        return bool(flags > 0), sums[0]

    def average(self, parameters: Sequence[Tensor], optimizer_state: Sequence[Tensor] = ()) -> None:
        """Replace parameters and optimizer state by their means over ranks, in place.

        Args:
            parameters: the replicas.
            optimizer_state: see `averaged_state`.

        Raises:
            ValueError: on all ranks, if they hand over unequally many values.
        """
        tensors = [tensor.detach() for tensor in (*parameters, *optimizer_state)]
        self._check_size(sum(tensor.numel() for tensor in tensors))
        total = self._total(torch.cat([tensor.reshape(-1).float() for tensor in tensors]))
        total = total / self._agree.num_ranks
        pieces = torch.split(total, [tensor.numel() for tensor in tensors])
        for tensor, piece in zip(tensors, pieces, strict=True):
            tensor.copy_(piece.view_as(tensor))
        self.is_joined = True

    def state_dict(self) -> dict[str, Any]:
        """Smoothed energies, which differ from rank to rank; ready for JSON."""
        return {"energies": self._energy.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there, with equal replicas. A rank without a state may begin anew: flags are agreed."""
        self._energy.load_state_dict(state["energies"])
        self.is_joined = True

    def _relative_change(self, energy: float) -> float:
        """Of the smoothed energy, by this step's; 0 in the first step, which has nothing to compare with."""
        before = self._energy.mean
        self._energy.add(energy)
        now = self._energy.mean
        if math.isnan(before) and math.isfinite(now):
            return 0.0
        if before == 0:
            return math.inf if now else 0.0
        return abs((now - before) / before)

    def _check_size(self, num_values: int) -> None:
        """Refuse unequal numbers of values; the verdict is agreed, so that no rank waits for the others."""
        (total,) = self._agree(torch.tensor([float(num_values)], dtype=torch.float64))
        differs = float(total != num_values * self._agree.num_ranks)
        (complaints,) = self._agree(torch.tensor([differs], dtype=torch.float64))
        if complaints:
            raise ValueError(
                f"ranks would average unequally many values, {num_values} here of {total:.0f} on all: each "
                "parameter needs a gradient in every step, if only of zeros; and leave out shards of tables"
            )
