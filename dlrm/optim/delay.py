"""Mitigation of late gradients for SGD with momentum: spike compensation and linear weight prediction.

Kosson et al., "Pipelined Backpropagation at Scale" (arXiv 2003.11666). A gradient `g` arrives `D` updates
late in SGD with `v <- m v + g`, `w <- w - lr v`:

    spike compensation:   w <- w - lr (a v + b g),    a = m**D,    b = 1 + m + ... + m**(D - 1)
    weight prediction:    forward and backward pass at the weights that are expected D updates later,
        from velocity:    w - lr D v
        from weights:     w + D (w - w_before),    w_before being the weights of one update earlier

Spike compensation applies at once what the gradient would have contributed in the updates that it missed. At
`D = 1` it is Nesterov's momentum. Both predictions are the same, unless the spike is compensated too.
"""

from collections.abc import Iterable
from typing import Any, Final

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from dlrm.config.schema import CompensationName

BEFORE: Final = "weights_before"
"""Key of the optimizer's state: a parameter's weights before its last update."""


def spike_factors(momentum: float, delay_steps: int) -> tuple[float, float]:
    """Compute the factors `a` and `b` of velocity and gradient in spike compensation."""
    return momentum**delay_steps, sum(momentum**missed for missed in range(delay_steps))


class Compensation:
    """Lets an optimizer compensate for gradients that arrive `delay_steps` updates late.

    It hooks into the optimizer's `step`; call `predict` before each forward pass. State is kept with the
    optimizer's own, and `step` leaves parameters without a gradient as they are.

    Args:
        optimizer: has momentum, and neither dampening nor Nesterov's momentum.
        kind: what to do.
        delay_steps: `D`; 0: gradients are not late, and nothing changes.

    Raises:
        ValueError: an option of the optimizer has no meaning with late gradients; says what to change.
    """

    def __init__(self, optimizer: SGD, kind: CompensationName, delay_steps: int) -> None:
        self._optimizer, self._delay_steps = optimizer, delay_steps
        parts = kind.split("+")
        self._has_spike = "spike" in parts
        self.from_weights = "weights" in parts
        """Whether weights are predicted from those before the last update, which are kept for it."""
        self._predicts = self.from_weights or "velocity" in parts
        if kind != "none":
            for group in optimizer.param_groups:
                _check_options(group, self._has_spike)
        self._real: dict[Tensor, Tensor] = {}
        self._predicted: list[Tensor] = []
        optimizer.register_step_pre_hook(self._before_step)
        optimizer.register_step_post_hook(self._after_step)

    @torch.no_grad()
    def predict(self) -> None:
        """Replace the weights by predicted ones until the next `step`, which restores them first.

        Parameters that were never updated stay as they are.
        """
        self.restore()
        key = BEFORE if self.from_weights else "momentum_buffer"
        for group in self._optimizer.param_groups if self._predicts and self._delay_steps else ():
            known = [each for each in group["params"] if self._state_of(each).get(key) is not None]
            if not known:
                continue
            self._predicted += known
            real = [self._copy_of(each) for each in known]
            kept = [self._state_of(each)[key] for each in known]
            if self.from_weights:
                torch._foreach_add_(known, torch._foreach_sub(real, kept), alpha=self._delay_steps)
            else:
                torch._foreach_add_(known, kept, alpha=-group["lr"] * self._delay_steps)

    @torch.no_grad()
    def restore(self) -> None:
        """Put the real weights back, bit for bit, if predicted ones are in place."""
        if self._predicted:
            torch._foreach_copy_(self._predicted, [self._real[each] for each in self._predicted])
            self._predicted = []

    def _copy_of(self, parameter: Tensor) -> Tensor:
        if parameter not in self._real:
            self._real[parameter] = torch.empty_like(parameter)
        return self._real[parameter].copy_(parameter)

    def _state_of(self, parameter: Tensor) -> dict[str, Any]:
        state: dict[str, Any] = self._optimizer.state.get(parameter, {})  # `[]` would create one
        return state

    @torch.no_grad()
    def _before_step(self, *_: object) -> None:
        self.restore()
        if self.from_weights and self._delay_steps:
            for group in self._optimizer.param_groups:
                for each in _with_gradient(group["params"]):
                    state = self._optimizer.state[each]
                    if BEFORE not in state:
                        state[BEFORE] = torch.empty_like(each)
                    state[BEFORE].copy_(each)

    @torch.no_grad()
    def _after_step(self, *_: object) -> None:
        """Add to the update `-lr v` what spike compensation differs by."""
        for group in self._optimizer.param_groups if self._has_spike and self._delay_steps else ():
            moved = _with_gradient(group["params"])
            if not moved:
                continue
            of_velocity, of_gradient = spike_factors(group["momentum"], self._delay_steps)
            velocities = [self._optimizer.state[each]["momentum_buffer"] for each in moved]
            torch._foreach_add_(moved, velocities, alpha=group["lr"] * (1 - of_velocity))
            gradients = [each.grad for each in moved if each.grad is not None]
            torch._foreach_add_(moved, gradients, alpha=-group["lr"] * of_gradient)


def forget_weights_before(optimizer: Optimizer) -> None:
    """Remove the weights before the last update, which another kind of compensation does not keep current."""
    for state in optimizer.state.values():
        state.pop(BEFORE, None)


def _with_gradient(parameters: Iterable[Tensor]) -> list[Tensor]:
    return [each for each in parameters if each.grad is not None]


def _check_options(options: dict[str, Any], has_spike: bool) -> None:
    """Refuse options of a group under which the formulas do not hold."""
    if not options["momentum"]:
        raise ValueError(
            "compensation for late gradients is derived from momentum, and the optimizer has none: give SGD "
            "momentum (in a recipe dense.momentum=0.9), or compensate nothing"
        )
    if options["dampening"]:
        raise ValueError(
            "compensation for late gradients is for v <- m v + g, and dampening scales g but for the first "
            "one: leave SGD's dampening at 0 and lower its learning rate"
        )
    if options["nesterov"]:
        raise ValueError(
            "Nesterov's momentum is spike compensation for a delay of one step: leave out nesterov and "
            "choose compensation spike"
        )
    if options["maximize"]:
        raise ValueError("compensation for late gradients is for descent: negate the loss, not the optimizer")
    if options["weight_decay"] and has_spike:
        raise ValueError(
            "weight decay is computed from present weights, and spike compensation would treat it as late: "
            "set SGD's weight_decay to 0 and add the decay to the loss, or predict weights only"
        )
