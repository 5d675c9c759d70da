"""Splits a PyTorch optimizer's step, so that some parameters are updated now and others later."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer


class PartialStep:
    """Steps an optimizer, whose state must be kept by parameter, for a few parameters at a time."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self.remember()

    def remember(self) -> None:
        """Use the current learning rates and other options for updates from now on."""
        self._options: list[dict[str, Any]] = [
            {name: _kept(value) for name, value in group.items() if name != "params"}
            for group in self._optimizer.param_groups
        ]

    def update(self, parameters: Sequence[nn.Parameter]) -> None:
        """Step only these parameters, by their gradients."""
        chosen, groups = set(map(id, parameters)), self._optimizer.param_groups
        self._optimizer.param_groups = [
            {**options, "params": own}
            for options, group in zip(self._options, groups, strict=True)
            if (own := [each for each in group["params"] if id(each) in chosen])
        ]
        try:
            self._optimizer.step()
        finally:
            self._optimizer.param_groups = groups


def _kept(value: Any) -> Any:
    # a learning rate may be a tensor, which a scheduler changes in place
    return value.clone() if isinstance(value, Tensor) else value
