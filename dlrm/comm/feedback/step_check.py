"""Whether an optimizer suits gradients that arrive late: momentum under random-k, and scaled losses.

What an exchange has not sent waits in its error feedback, and arrives in a later step. Two things do not go
with that. Momentum under the compressor `random`: a value waits 1 / ratio steps on average, and its gradients
of all those steps arrive at once; momentum multiplies that by 1 / (1 - momentum), and training diverges at
learning rates that suit it otherwise (tests/dlrm/comm/feedback/test_step_check.py shows it). And a
`GradScaler`: what waits keeps the scale of its own step, is added to gradients of another, and an infinity
stays until it is sent.
"""

import logging
import traceback
from collections.abc import Collection
from typing import Any

from torch.amp import GradScaler
from torch.optim import Optimizer

from dlrm.comm.config import CommConfig
from dlrm.comm.feedback.residual import Residual

logger = logging.getLogger(__name__)


def warn_of_momentum(config: CommConfig, optimizer: Optimizer) -> None:
    """Log a warning if random-k would let this optimizer's momentum diverge.

    Args:
        config: of the exchange whose sums it is given.
        optimizer: with `momentum` among the options of its groups, as SGD, LARS and RMSprop have it. Adam and
            LAMB divide by the size of gradients, and did not diverge.
    """
    if config.compressor != "random" or not config.error_feedback:
        return
    momentum = max(group.get("momentum", 0.0) for group in optimizer.param_groups)
    if momentum:
        logger.warning(
            "comm.compressor=random with momentum %g may diverge: gradients of many steps arrive at once, "
            "and momentum multiplies them. Choose comm.compressor=mstopk, or an optimizer without momentum, "
            "or multiply the learning rate by %g (1 - momentum)",
            momentum,
            1 - momentum,
        )


class StepCheck:
    """Looks at the first optimizer that steps the parameters of an exchange while something is owed.

    A hook before the steps of all optimizers, see `torch.optim.optimizer.register_optimizer_step_pre_hook`.

    Args:
        config: of the exchange.
        parameters: whose gradients it sums, by `id`.
        residual: of the exchange.
        warns: whether this rank says what is to be said once.
    """

    def __init__(
        self, config: CommConfig, parameters: Collection[int], residual: Residual, *, warns: bool
    ) -> None:
        self._config, self._parameters, self._residual = config, parameters, residual
        self._warns = warns
        self._is_done = False

    def __call__(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """An optimizer is about to step.

        Raises:
            RuntimeError: a `GradScaler` lets it.
        """
        if self._is_done or not self._residual.is_owed or not self._is_ours(optimizer):
            return
        if _is_scaled():
            raise RuntimeError(
                "a GradScaler scales these gradients, and what the exchange has not sent yet keeps the scale "
                "of its own step: train in bf16 without a scaler, or set error_feedback=False, or take an "
                "exchange that sends all values in fp32 (exchange='ring')"
            )
        self._is_done = True
        if self._warns:
            warn_of_momentum(self._config, optimizer)

    def _is_ours(self, optimizer: Optimizer) -> bool:
        return any(
            id(each) in self._parameters for group in optimizer.param_groups for each in group["params"]
        )


def _is_scaled() -> bool:
    """Whether an enabled `GradScaler` is among those who called this.

    Neither gradients nor optimizers tell: `scaler.step` divides the gradients, or lets the optimizer do that,
    before or in the step itself.
    """
    callers = (frame.f_locals.get("self") for frame, _ in traceback.walk_stack(None))
    return any(isinstance(caller, GradScaler) and caller.is_enabled() for caller in callers)
