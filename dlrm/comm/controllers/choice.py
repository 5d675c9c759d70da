"""What a controller decides in each step, and what it promises."""

from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from dlrm.comm.compression.compressors import Compressor


@dataclass(frozen=True)
class Choice:
    """How much of a vector a rank sends."""

    num_kept: int
    """Values of it; the same on all ranks. All of them: it travels dense."""
    indices: Tensor | None = None
    """int64 `[num_kept]` into the whole vector: what this rank's compressor selected, where the controller
    had to look at it anyway. Who selects in parts of the vector leaves them aside."""


class Controller(Protocol):
    """Decides from values that all ranks agreed on, so that all take the same branch.

    All ranks call its methods in the same steps: some calls of `choose` exchange a few numbers.
    """

    @property
    def position(self) -> object:
        """Plain values that all its next decisions depend on, besides the vectors: the same on all ranks.

        Ranks compare them before `choose` exchanges anything.
        """

    def choose(self, vector: Tensor, compressor: Compressor) -> Choice:
        """What is sent of this step's vector.

        Args:
            vector: fp32 `[d]`, gradient and residual; stays as it is.
            compressor: selects from it.
        """

    def observe(self, seconds: float) -> None:
        """The step of the last choice is over; steps in which none was made are passed over.

        Args:
            seconds: of the whole step on this rank, computing included; evaluation and saving left out. They
                may differ from rank to rank.
        """

    def state_dict(self) -> dict[str, Any]:
        """What it has learnt, ready for JSON; the same on all ranks."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there. All ranks load the same state before the same step, new ones and old ones."""


def num_kept_of(num_values: int, ratio: float) -> int:
    """How many of `num_values` values a ratio keeps: at least one, where there is one.

    >>> num_kept_of(1000, 0.01), num_kept_of(30, 0.1), num_kept_of(5, 0.01), num_kept_of(0, 0.01)
    (10, 3, 1, 0)
    """
    return min(num_values, max(1, round(ratio * num_values)))
