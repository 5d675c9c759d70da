"""The base class of controllers, which decide how much of a gradient is sent, and `Fixed`."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from dlrm.comm.compression.compressors import Compressor


@dataclass(frozen=True)
class ValueSelection:
    """How much of a vector a rank sends in a step."""

    num_kept: int
    """Number of values, the same on all ranks; if all of them, a dense collective sends them."""
    indices: Tensor | None = None
    """int64 `[num_kept]` into the whole vector, where the controller has run the compressor already;
    collectives that select from shards ignore them."""


class Controller:
    """Decides from values that all ranks have agreed on, so that all ranks decide alike.

    All ranks call its methods in the same steps, since some calls of `choose` exchange a few numbers.
    """

    @property
    def position(self) -> object:
        """Plain values that all later decisions depend on, besides the vectors: the same on all ranks.

        Ranks compare them before `choose` exchanges anything.
        """
        raise NotImplementedError

    def choose(self, vector: Tensor, compressor: Compressor) -> ValueSelection:
        """Decide how much of this step's vector is sent.

        Args:
            vector: fp32 `[d]`, gradient and residual; left unchanged.
            compressor: selects from the vector.
        """
        raise NotImplementedError

    def observe(self, seconds: float) -> None:
        """Learn from the duration of the last chosen step; steps without a choice are ignored.

        Args:
            seconds: of the whole step on this rank, computation included, evaluation and saving excluded.
        """

    def state_dict(self) -> dict[str, Any]:
        """The measurements and decisions so far, JSON-able; the same on all ranks."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state; all ranks load the same state before the same step."""


class Fixed(Controller):
    """Sends the same share of every vector.

    Args:
        ratio: share that is sent, above 0 and at most 1 (dense).
    """

    def __init__(self, ratio: float) -> None:
        self._ratio = ratio

    @property
    def position(self) -> object:
        """See `Controller.position`."""
        return self._ratio

    def choose(self, vector: Tensor, compressor: Compressor) -> ValueSelection:
        """See `Controller.choose`; the collective selects."""
        return ValueSelection(num_kept_of(vector.numel(), self._ratio))


def num_kept_of(num_values: int, ratio: float) -> int:
    """Compute how many of `num_values` values a ratio keeps: at least one, where there is one.

    >>> num_kept_of(1000, 0.01), num_kept_of(30, 0.1), num_kept_of(5, 0.01), num_kept_of(0, 0.01)
    (10, 3, 1, 0)
    """
    return min(num_values, max(1, round(ratio * num_values)))
