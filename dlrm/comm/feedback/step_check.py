"""Checks that an optimizer suits delayed gradients: no loss scaling, and no momentum under random-k.

Error feedback sends values in later steps. Under the compressor `random`, a value waits 1 / ratio steps on
average and the gradients of all these steps arrive at once; momentum multiplies them by 1 / (1 - momentum),
and training diverges at learning rates that are fine otherwise. Under a `GradScaler`, a residual keeps the
scale of its own step and is added to gradients of another, and an infinity stays until it is sent.
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
    """Log a warning if the optimizer's momentum may diverge under random-k.

    Only optimizers with `momentum` among the options of their groups are affected (SGD, LARS, RMSprop). Adam
    and LAMB divide by the size of gradients, and did not diverge.
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
    """Checks the first optimizer that steps the exchanged parameters while a residual is pending.

    It is a hook for `torch.optim.optimizer.register_optimizer_step_pre_hook`.

    Args:
        config: of the exchange.
        parameters: exchanged parameters, by `id`.
        residual: of the exchange.
        warns: whether this rank logs warnings.
    """

    def __init__(
        self, config: CommConfig, parameters: Collection[int], residual: Residual, *, warns: bool
    ) -> None:
        self._config, self._parameters, self._residual = config, parameters, residual
        self._warns = warns
        self._is_done = False

    def __call__(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Check an optimizer that is about to step.

        Raises:
            RuntimeError: an enabled `GradScaler` calls it.
        """
        groups = optimizer.param_groups
        is_exchanged = any(id(each) in self._parameters for group in groups for each in group["params"])
        if self._is_done or not self._residual.is_pending or not is_exchanged:
            return
        if _is_scaled():
            raise RuntimeError(
                "a GradScaler scales these gradients, and what the exchange has not sent yet keeps the scale "
                "of its own step: train in bf16 without a scaler, or set error_feedback=False, or choose an "
                "exchange that sends all values in fp32 (exchange='ring')"
            )
        self._is_done = True
        if self._warns:
            warn_of_momentum(self._config, optimizer)


def _is_scaled() -> bool:
    """Whether an enabled `GradScaler` is on the call stack."""
    # gradients do not tell: `scaler.step` unscales them, or lets the optimizer do so, before or in the step
    callers = (frame.f_locals.get("self") for frame, _ in traceback.walk_stack(None))
    return any(isinstance(caller, GradScaler) and caller.is_enabled() for caller in callers)
