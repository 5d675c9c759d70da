"""SelSync (arXiv 2307.07950): ranks train on their own, and average parameters when a gradient changes much.

Each step, a rank updates its replicas of the dense parameters with its own gradient. A flag tells whether the
smoothed energy of its gradients has changed by a share of `delta` or more; it is sent in a sum of scalars
that is due in any case. If any rank has set it, all replace their parameters by the mean over ranks.
Gradients cannot be averaged instead: replicas differ, and equal updates would leave them apart.

With delta 0 ranks average in each step. For SGD, also with momentum, that equals bulk-synchronous training.
For Adagrad and Adam it does not, because their accumulators grow by the mean of squares instead of the square
of the mean. State of the optimizer that has a parameter's shape is averaged too; otherwise equal parameters
would continue with unequal momentum or rates. Shards of tables have one owner and are not averaged.

A checkpoint holds one set of dense parameters: call `average` before saving and evaluating unless
`is_joined`. A worker that dies loses its own steps since the last average. The others `average` with its
replacement, once that has copied a survivor's replica.

On a GPU no step waits for a decision: norm and flag are read a step after they are computed, so that ranks
average two steps after the one whose gradient has changed. With delta 0 there is nothing to read.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from dlrm.comm.controllers.controller import Ewma, SumOverRanks
from dlrm.comm.late import LateScalars


def averaged_state(optimizer: Optimizer) -> list[Tensor]:
    """List the optimizer's state tensors of a parameter's shape, in the same order on all ranks.

    Every parameter needs a gradient in each step, if only zeros, because some optimizers create their state
    when they first see a gradient.
    """
    return [
        value
        for group in optimizer.param_groups
        for parameter in group["params"]
        for name, value in sorted(optimizer.state[parameter].items())
        if name != "step" and isinstance(value, Tensor) and value.shape == parameter.shape
    ]


def _total_over_ranks(vector: Tensor) -> Tensor:
    dist.all_reduce(vector)
    return vector


class SelSync:
    """Decides when ranks average their replicas, and averages them; all ranks call it in the same steps.

    Args:
        agree: adds numbers over ranks.
        delta: relative change of the smoothed squared norm above which it is significant; 0: average in each
            step. The paper uses 0.3 and 0.5.
        total: sums an fp32 `[d]` over ranks, with the same bits on all ranks; may change its argument.
    """

    def __init__(
        self,
        *,
        agree: SumOverRanks,
        delta: float = 0.3,
        total: Callable[[Tensor], Tensor] = _total_over_ranks,
    ) -> None:
        self._agree, self._delta, self._total = agree, delta, total
        self._energy = Ewma(agree.num_ranks)
        self._norms: LateScalars[None] | None = None
        self._flags: LateScalars[None] | None = None
        self.is_joined = True
        """Whether the replicas are equal: no rank has taken a step since they were averaged."""

    def should_sync(self, gradient_norm: float | Tensor, scalars: Tensor) -> tuple[bool, Tensor]:
        """Check once a step, between backward pass and update, whether any rank's gradient is significant.

        Args:
            gradient_norm: L2 norm of this rank's gradient; NaN counts as significant.
            scalars: fp32 `[n]` to be summed over ranks in this step; the flag is sent with them.

        Returns:
            Whether to call `average` after the update, and the sums of the scalars.
        """
        if self._norms is None or self._flags is None:
            on_gpu = scalars.device.type == "cuda"
            self._norms, self._flags = LateScalars(on_gpu), LateScalars(on_gpu)
        norm = self._norms.give(torch.as_tensor(gradient_norm, dtype=torch.float64).reshape(1), None)
        change = 0.0 if norm is None else self._relative_change(norm[0][0] ** 2)
        flag = scalars.new_full((1,), float(not change < self._delta))  # 1 for NaN
        *sums, flags = torch.split(self._total(torch.cat([scalars, flag])), [scalars.numel(), 1])
        self.is_joined = False
        agreed = self._flags.give(flags, None)
        return self._delta == 0 or (agreed is not None and agreed[0][0] > 0), sums[0]

    def average(self, parameters: Sequence[Tensor], optimizer_state: Sequence[Tensor] = ()) -> None:
        """Replace parameters and optimizer state (see `averaged_state`) by their means over ranks, in place.

        Raises:
            ValueError: on all ranks, if they pass different numbers of values.
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
        """Smoothed energies of this rank, JSON-able."""
        return {"energies": self._energy.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state, with equal replicas; as flags are agreed, a rank may also start without one."""
        self._energy.load_state_dict(state["energies"])
        self.is_joined = True

    def _relative_change(self, energy: float) -> float:
        """Relative change of the smoothed energy by this step; 0 in the first step."""
        before = self._energy.mean
        self._energy.add(energy)
        now = self._energy.mean
        if math.isnan(before) and math.isfinite(now):
            return 0.0
        if before == 0:
            return math.inf if now else 0.0
        return abs((now - before) / before)

    def _check_size(self, num_values: int) -> None:
        """Refuse different numbers of values, by an agreed decision, so that no rank waits for the others."""
        (total,) = self._agree(torch.tensor([float(num_values)], dtype=torch.float64))
        differs = float(total != num_values * self._agree.num_ranks)
        # a second sum: a rank whose number fits the mean must also learn that others' do not
        (complaints,) = self._agree(torch.tensor([differs], dtype=torch.float64))
        if complaints:
            raise ValueError(
                f"ranks would average unequally many values, {num_values} here of {total:.0f} on all: each "
                "parameter needs a gradient in every step, if only of zeros; and leave out shards of tables"
            )
