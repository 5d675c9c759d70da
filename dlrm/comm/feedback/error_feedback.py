"""Error feedback: the residual of values that were not sent in a step is added to the next step's gradient.

An exchange asks for `vector = feedback.add(gradient)`, sends a part of it and subtracts what it sent, in
place. That vector is the residual itself, so that nothing is copied or lost: over any number of steps, sent
values and the residual add up to the gradients, to rounding. Error feedback lets a few per cent of the
gradient train as well as all of it (GraVAC, arXiv 2305.12201; AR-Topk, arXiv 2312.02493).
"""

from collections.abc import Mapping

import torch
from torch import Tensor


class ErrorFeedback:
    """The residual of a rank's gradients; NaN and infinity stay in it until they are sent.

    Args:
        num_values: of the gradient.
        keeps: false: forget values that were not sent.
    """

    def __init__(self, num_values: int, device: torch.device, *, keeps: bool = True) -> None:
        self.keeps = keeps
        self._residual = torch.zeros(num_values, device=device)

    def add(self, gradient: Tensor) -> Tensor:
        """Add a gradient, fp32 `[num_values]`, and return the vector to send from.

        The caller subtracts what it sends from that vector, in place; the next `add` overwrites it.

        Raises:
            ValueError: the gradient has another shape.
        """
        if gradient.shape != self._residual.shape:
            raise ValueError(
                f"the gradient has the shape {list(gradient.shape)}, but error feedback was made for "
                f"{list(self._residual.shape)}: flatten the gradients of all parameters into one vector"
            )
        return self._residual.add_(gradient) if self.keeps else self._residual.copy_(gradient)

    def state_dict(self) -> dict[str, Tensor]:
        """The live `residual`, fp32 `[num_values]`; empty if nothing is kept."""
        return {"residual": self._residual} if self.keeps else {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Copy a saved residual.

        Raises:
            ValueError: it was saved with another setting of `keeps`, or for another number of values.
        """
        if self.keeps and state.keys() != {"residual"}:
            raise ValueError(
                f"error feedback expects a saved residual and found {sorted(state) or 'nothing'}: the run "
                "was saved without it. Resume with the same compression, or start without the saved state"
            )
        if state and not self.keeps:
            raise ValueError(
                f"without error feedback the saved {sorted(state)} cannot be restored, and dropping it would "
                "lose gradients. Resume with error feedback (with comm.exchange=ring, where it is dense now: "
                "that sends the residuals), or start without the saved state"
            )
        for residual in state.values():
            if residual.shape != self._residual.shape:
                raise ValueError(
                    f"the saved residual has the shape {list(residual.shape)} and the gradient "
                    f"{list(self._residual.shape)}: another model was saved. Load a checkpoint of this one"
                )
            self._residual.copy_(residual)

    @property
    def energy(self) -> float:
        """Sum of the squares of the residual; waits for the device."""
        if not self.keeps:
            return 0.0
        # in fp64: the residual of a large model adds up more squares than fp32 can tell apart
        return float(torch.linalg.vector_norm(self._residual, dtype=torch.float64)) ** 2
