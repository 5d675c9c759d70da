"""Compressors: which values of a gradient travel.

A compressor looks at a vector and names the indices to send, each once. What becomes of the others is for a
memory to decide (`dlrm.comm.feedback.error_feedback`). NaN and infinity come before everything else, so that
a gradient that broke on one rank is sent to all and seen by all.
"""

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from dlrm.comm.compression.topk import bound_below, largest, suggested_bound


class Compressor(Protocol):
    """One way to choose."""

    @property
    def is_exact(self) -> bool:
        """Whether it always chooses as many as asked for; if not, ranks must agree on lengths first."""

    def select(self, vector: Tensor, num_kept: int) -> Tensor:
        """Indices of the values to send: int64 `[n]`, each once.

        Args:
            vector: fp32 `[d]`, left as it is.
            num_kept: values to send; n is this or d, whichever is less, or fewer if not `is_exact`.

        Raises:
            ValueError: the vector is no fp32 vector, or `num_kept` is negative.
        """

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint of this rank must hold for the same choices to follow."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` returned."""


class _Stateless:
    """Chooses by the vector alone."""

    def state_dict(self) -> dict[str, Any]:
        """Nothing."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Nothing to take over."""


class TopK(_Stateless):
    """The largest magnitudes, by `torch.topk`; in no order."""

    is_exact = True

    def select(self, vector: Tensor, num_kept: int) -> Tensor:
        """See `Compressor.select`."""
        if num_kept >= _size(vector, num_kept):
            return _all(vector)
        return vector.abs().topk(num_kept, sorted=False).indices


class MSTopK(_Stateless):
    """The largest magnitudes, found by a threshold; the indices ascend. Much faster than `TopK` on a CPU.

    MSTopK (Shi et al., arXiv 2010.10458) tries thresholds, counting over the whole vector each time how many
    values reach one (public implementations do so 25 or 30 times), and fills up with values near the last.
    Here they are tried on a sample, which suggests a threshold that little more than `num_kept` values reach;
    a single pass collects those, and the exact choice is made among them. Where the sample misleads, more is
    collected or a second pass is made: slower, and still exactly the largest (`dlrm.comm.compression.topk`).
    Of equal magnitudes the first are taken, so that constant and nearly empty vectors are no special cases.
    """

    is_exact = True

    def select(self, vector: Tensor, num_kept: int) -> Tensor:
        """See `Compressor.select`."""
        if num_kept >= _size(vector, num_kept):
            return _all(vector)
        if num_kept == 0:
            return _all(vector[:0])
        bound = suggested_bound(vector, num_kept)
        found = largest(vector, num_kept, bound)
        num_missing = num_kept - found.numel()
        if num_missing:
            rest = largest(vector, num_missing, bound_below(0), up_to=bound)
            found = torch.cat([found, rest]).sort().values
        return found


class Threshold(_Stateless):
    """Magnitudes of at least `value`; where more than asked for reach it, the largest of them.

    In ascending order of the indices. How many there are differs by rank.

    Args:
        value: not negative; NaN and infinity reach any.

    Raises:
        ValueError: it is negative or NaN.
    """

    is_exact = False

    def __init__(self, value: float) -> None:
        if not value >= 0:
            raise ValueError(f"a threshold of {value} means nothing for magnitudes: give one of 0 or more")
        self._bound = bound_below(value)

    def select(self, vector: Tensor, num_kept: int) -> Tensor:
        """See `Compressor.select`."""
        if min(num_kept, _size(vector, num_kept)) == 0:
            return _all(vector[:0])
        return largest(vector, num_kept, self._bound)


class RandomK:
    """Values at random, whatever they are; other ones at each call, in ascending order of the indices.

    The vector is cut into `num_kept` pieces of equal length (to one value) and one value of each is drawn. So
    each value is as likely as any other, and none is drawn twice. Values that are not finite take the place
    of some that were drawn.

    Args:
        seed: ranks with one seed, and equally many calls, draw the same.
    """

    is_exact = True

    def __init__(self, seed: int) -> None:
        # on the CPU whatever the vector's device: ranks draw the same on unequal machines
        self._generator = torch.Generator().manual_seed(seed)

    def select(self, vector: Tensor, num_kept: int) -> Tensor:
        """See `Compressor.select`."""
        size = _size(vector, num_kept)
        if num_kept >= size:
            return _all(vector)
        edges = torch.arange(num_kept + 1).mul_(size).div_(max(num_kept, 1), rounding_mode="floor")
        drawn = torch.rand(num_kept, dtype=torch.float64, generator=self._generator)
        chosen = (edges[:-1] + (drawn * edges.diff()).long()).to(vector.device)
        if num_kept and not bool(vector.sum().isfinite()):
            chosen = _put_first(_not_finite(vector), chosen)
        return chosen

    def state_dict(self) -> dict[str, Any]:
        """`generator`: the state of the draws."""
        return {"generator": self._generator.get_state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `Compressor.load_state_dict`."""
        self._generator.set_state(state["generator"])


def _size(vector: Tensor, num_kept: int) -> int:
    """Of the vector, which is checked."""
    if vector.dim() != 1 or vector.dtype is not torch.float32:
        raise ValueError(
            f"a compressor takes an fp32 vector, not {vector.dtype} of shape {list(vector.shape)}: flatten "
            "the gradients into one, in fp32"
        )
    if num_kept < 0:
        raise ValueError(f"{num_kept} values cannot be kept: ask for 0 or more")
    return vector.numel()


def _not_finite(vector: Tensor) -> Tensor:
    """Indices of NaN and infinity, ascending."""
    return vector.isfinite().logical_not_().nonzero().view(-1)


def _put_first(first: Tensor, others: Tensor) -> Tensor:
    """As many indices as `others` has, each once: all of `first` that have a place, and then of `others`."""
    found = torch.cat([first, others[~torch.isin(others, first)]])
    return found[: others.numel()].sort().values


def _all(vector: Tensor) -> Tensor:
    return torch.arange(vector.numel(), device=vector.device)
