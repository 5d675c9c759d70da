"""One share of the gradient, always."""

from typing import Any

from torch import Tensor

from dlrm.comm.compression.compressors import Compressor
from dlrm.comm.controllers.choice import Choice, num_kept_of


class Fixed:
    """Keeps the same share of every vector.

    Args:
        ratio: share that is sent, above 0 and at most 1; 1: dense.
    """

    def __init__(self, ratio: float) -> None:
        if not 0 < ratio <= 1:
            raise ValueError(f"the share of a gradient to send is {ratio}; choose one above 0 and at most 1")
        self._ratio = ratio

    @property
    def position(self) -> object:
        """See `Controller`."""
        return self._ratio

    def choose(self, vector: Tensor, compressor: Compressor) -> Choice:
        """Its share of `vector`; whoever reduces it selects."""
        return Choice(num_kept_of(vector.numel(), self._ratio))

    def observe(self, seconds: float) -> None:
        """Nothing changes its mind."""

    def state_dict(self) -> dict[str, Any]:
        """Nothing."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing."""
