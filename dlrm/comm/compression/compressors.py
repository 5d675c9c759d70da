"""Compressors select which values of a gradient are sent, as indices into it.

Error feedback decides what happens to the other values (`dlrm.comm.feedback`). Compressors
select NaN and infinity first, so that a failure of one rank reaches all ranks.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from dlrm.comm.compression.topk import bound_below, largest, suggested_bound


class Compressor:
    """A way to select values of a vector."""

    is_exact = True
    """Whether always as many values are selected as asked for; if not, ranks must exchange their numbers."""

    def select(self, vector: Tensor, num_kept: int) -> Tensor:
        """Select values and return their indices: int64 `[n]`, each once.

        Args:
            vector: fp32 `[d]`, left unchanged.
            num_kept: values to select; n is the smaller of this and d, or less if not `is_exact`.

        Raises:
            ValueError: the vector is not an fp32 vector, or `num_kept` is negative.
        """
        if vector.dim() != 1 or vector.dtype is not torch.float32:
            raise ValueError(
                f"a compressor takes an fp32 vector, not {vector.dtype} of shape {list(vector.shape)}: "
                "flatten the gradients into one, in fp32"
            )
        if num_kept < 0:
            raise ValueError(f"{num_kept} values cannot be kept: ask for 0 or more")
        num_selected = min(num_kept, vector.numel())
        if num_selected == 0 or (self.is_exact and num_selected == vector.numel()):
            return torch.arange(num_selected, device=vector.device)
        return self._select(vector, num_selected)

    def _select(self, vector: Tensor, num_kept: int) -> Tensor:
        """`select` of at least one value, and of fewer than all if `is_exact`."""
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        """This rank's state, on which later selections depend besides the vectors."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""


class TopK(Compressor):
    """Selects the largest magnitudes by `torch.topk`, in no order."""

    def _select(self, vector: Tensor, num_kept: int) -> Tensor:
        return vector.abs().topk(num_kept, sorted=False).indices


class MSTopK(Compressor):
    """Selects exactly the largest magnitudes by a threshold; much faster than `TopK` on a CPU.

    MSTopK (Shi et al., arXiv 2010.10458) tries thresholds, each time counting over the whole vector. Here a
    sample suggests a threshold that few more than `num_kept` values reach; a single pass collects those, and
    the exact selection is made among them. A misleading sample costs a second pass, and no exactness
    (`dlrm.comm.compression.topk`). Indices ascend; of equal magnitudes the first are selected.
    """

    def _select(self, vector: Tensor, num_kept: int) -> Tensor:
        bound = suggested_bound(vector, num_kept)
        found = largest(vector, num_kept, bound)
        num_missing = num_kept - found.numel()
        if num_missing:
            rest = largest(vector, num_missing, bound_below(0), up_to=bound)
            found = torch.cat([found, rest]).sort().values
        return found


class Threshold(Compressor):
    """Selects magnitudes of at least `value`, in ascending order; their number differs by rank.

    Where more values than asked for reach the threshold, it selects the largest of them.

    Args:
        value: not negative; NaN and infinity reach any threshold.
    """

    is_exact = False

    def __init__(self, value: float) -> None:
        self._bound = bound_below(value)

    def _select(self, vector: Tensor, num_kept: int) -> Tensor:
        return largest(vector, num_kept, self._bound)


class RandomK(Compressor):
    """Selects random values, others in each call, in ascending order of the indices.

    One value is drawn from each of `num_kept` pieces of the vector of equal length (to one value), so that
    each value is equally likely. Values that are not finite replace some of those drawn.

    Args:
        seed: ranks with the same seed, and equally many calls, draw the same.
    """

    def __init__(self, seed: int) -> None:
        # on the CPU whatever the vector's device: ranks draw the same on unequal machines
        self._generator = torch.Generator().manual_seed(seed)

    def _select(self, vector: Tensor, num_kept: int) -> Tensor:
        edges = torch.arange(num_kept + 1).mul_(vector.numel()).div_(num_kept, rounding_mode="floor")
        drawn = torch.rand(num_kept, dtype=torch.float64, generator=self._generator)
        chosen = (edges[:-1] + (drawn * edges.diff()).long()).to(vector.device)
        if not bool(vector.sum().isfinite()):
            first = vector.isfinite().logical_not_().nonzero().view(-1)
            found = torch.cat([first, chosen[~torch.isin(chosen, first)]])
            chosen = found[:num_kept].sort().values
        return chosen

    def state_dict(self) -> dict[str, Any]:
        """The state of the random generator."""
        return {"generator": self._generator.get_state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `Compressor.load_state_dict`."""
        self._generator.set_state(state["generator"])
