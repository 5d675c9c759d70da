"""Error feedback: what did not travel in this step is added to the next step's gradient.

An exchange asks its memory for `vector = memory.add(gradient)`, sends a part of it and takes exactly what it
sent out of `vector`, in place. With `ErrorFeedback` that vector is the residual itself, so nothing is copied
and nothing is forgotten: over any number of steps, what was sent and the residual add up to the gradients,
to rounding. Error feedback is what lets a few per cent of the gradient train as well as all of it
(GraVAC, arXiv 2305.12201; AR-Topk, arXiv 2312.02493; both use it in every step).
"""

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor


class Memory(Protocol):
    """What becomes of values that did not travel."""

    def add(self, gradient: Tensor) -> Tensor:
        """The vector to send from, fp32 `[num_values]`: the gradient and what is still owed.

        The caller takes what it sends out of it, in place. It stays this memory's: the next `add` changes it.

        Args:
            gradient: fp32 `[num_values]`, left as it is.

        Raises:
            ValueError: the gradient has another shape.
        """

    def state_dict(self) -> dict[str, Tensor]:
        """What a checkpoint of this rank must hold; the tensors are the live ones, not copies."""

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take over what `state_dict` returned, by copying.

        Raises:
            ValueError: it belongs to another kind of memory or another number of values.
        """

    @property
    def energy(self) -> float:
        """Sum of the squares of what is owed; waits for the device."""


class ErrorFeedback:
    """Keeps what did not travel: the residual.

    A NaN or an infinity that enters stays until it is sent.

    Args:
        num_values: of the gradient.
        device: where it lies.
    """

    def __init__(self, num_values: int, device: torch.device) -> None:
        self._residual = torch.zeros(num_values, device=device)

    def add(self, gradient: Tensor) -> Tensor:
        """See `Memory.add`: the residual, to which the gradient was added."""
        _check(gradient, self._residual)
        return self._residual.add_(gradient)

    def state_dict(self) -> dict[str, Tensor]:
        """`residual`: fp32 `[num_values]`."""
        return {"residual": self._residual}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """See `Memory.load_state_dict`."""
        if state.keys() != {"residual"}:
            raise ValueError(
                f"error feedback expects a saved residual and found {sorted(state) or 'nothing'}: the run "
                "was saved without it. Go on with the same compression, or start without the saved state"
            )
        residual = state["residual"]
        if residual.shape != self._residual.shape:
            raise ValueError(
                f"the saved residual has the shape {list(residual.shape)} and the gradient "
                f"{list(self._residual.shape)}: another model was saved. Restore the checkpoint of this one"
            )
        self._residual.copy_(residual)

    @property
    def energy(self) -> float:
        """See `Memory.energy`."""
        return _energy(self._residual)


class NoMemory:
    """Forgets what did not travel. Its `add` hands out a copy, since the caller changes what it is given.

    Args:
        num_values: of the gradient.
        device: where it lies.
    """

    def __init__(self, num_values: int, device: torch.device) -> None:
        self._scratch = torch.empty(num_values, device=device)

    def add(self, gradient: Tensor) -> Tensor:
        """See `Memory.add`: a copy of the gradient."""
        _check(gradient, self._scratch)
        return self._scratch.copy_(gradient)

    def state_dict(self) -> dict[str, Tensor]:
        """Nothing."""
        return {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """See `Memory.load_state_dict`."""
        if state:
            raise ValueError(
                f"without error feedback there is no place for the saved {sorted(state)}, and to drop it "
                "would lose gradients. Go on with error feedback (with comm.exchange=ring, where it is dense "
                "now: that sends what is owed), or start without the saved state"
            )

    @property
    def energy(self) -> float:
        """Nothing is owed."""
        return 0.0


def _check(gradient: Tensor, like: Tensor) -> None:
    if gradient.shape != like.shape:
        raise ValueError(
            f"the gradient has the shape {list(gradient.shape)}, but the memory was made for "
            f"{list(like.shape)}: flatten the gradients of all parameters into one vector"
        )


def _energy(vector: Tensor) -> float:
    # in fp64: the residual of a large model adds up more squares than fp32 can tell apart
    return float(torch.linalg.vector_norm(vector, dtype=torch.float64)) ** 2
