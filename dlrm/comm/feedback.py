"""Error feedback: a rank's residual of values that were not sent is added to its next gradient.

An exchange asks for `vector = residual.add(gradient)`, sends a part of it and subtracts what it sent, in
place. That vector is the residual itself, so that nothing is copied or lost: over any number of steps, sent
values and the residual add up to the gradients, to rounding. Error feedback lets a few per cent of the
gradient train as well as all of it (GraVAC, arXiv 2305.12201; AR-Topk, arXiv 2312.02493).

Any rank that holds a residual adds it to its own gradient, and the sum over ranks is the same. With another
number of ranks, residuals of missing ranks go to others. A residual is lost if its worker died with its
memory, or was a step behind the survivors; the loss is reported as a share of the energy (sum of squares) of
all residuals, which is measured now and then while all ranks are there.
"""

import logging
import traceback
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.optim import Optimizer

from dlrm.comm.compression.compressors import Compressor
from dlrm.comm.config import CommConfig

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class LostResiduals:
    """Residuals that were lost with their ranks."""

    step: int
    """Exchanges done when training resumed without the residuals."""
    ranks: tuple[int, ...]
    """The ranks that held them, as numbered before the failure."""
    of_ranks: int
    """Number of ranks before the failure."""
    energy_share: float | None
    """Share of the energy of all residuals, when last measured; None: never measured."""

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Restore an instance from its saved fields."""
        return cls(**{**data, "ranks": tuple(data["ranks"])})

    def __str__(self) -> str:
        who = ", ".join(map(str, self.ranks))
        share = "an unknown share" if self.energy_share is None else f"{self.energy_share:.1%}"
        return (
            f"at step {self.step}, gradients that rank {who} of {self.of_ranks} had not sent yet: "
            f"{share} of the energy of all that was not sent"
        )


class Residual:
    """This rank's residual, and its compressor's state, which checkpoints hold with it.

    NaN and infinity stay in a residual until they are sent.

    Rank, number of ranks and compressor are those of the exchange. Without `keeps`, values that were not sent
    are forgotten.
    """

    def __init__(
        self,
        num_values: int,
        device: torch.device,
        compressor: Compressor,
        rank: int,
        num_ranks: int,
        *,
        keeps: bool = True,
    ) -> None:
        self.keeps = keeps
        self._values = torch.zeros(num_values if keeps else 0, device=device)
        self._compressor = compressor
        self._rank, self._num_ranks = rank, num_ranks
        self.inherited: list[tuple[int, int]] = []
        """Number of ranks, and rank, of the residuals that were loaded here and are not settled yet."""
        self.is_pending = False
        """Whether any rank has a residual: the same on all ranks."""

    def add(self, gradient: Tensor) -> Tensor:
        """Add a gradient, fp32 `[num_values]`, and return the vector to send from.

        The caller subtracts what it sends from that vector, in place; the next `add` overwrites it.
        """
        return self._values.add_(gradient) if self.keeps else gradient

    @property
    def needs_saving(self) -> bool:
        """Whether checkpoints must hold this state: residuals are kept, or the compressor has a state."""
        return self.keeps or bool(self._compressor.state_dict())

    @property
    def energy(self) -> float:
        """Sum of the squares of the residual; waits for the device."""
        # in fp64: the residual of a large model adds up more squares than fp32 can tell apart
        return float(torch.linalg.vector_norm(self._values, dtype=torch.float64)) ** 2

    def state_dict(self) -> dict[str, Any]:
        """The current residual, as a live tensor, and the compressor's state."""
        return {
            "rank": self._rank,
            "num_ranks": self._num_ranks,
            "memory": {"residual": self._values} if self.is_pending else {},
            "compressor": {type(self._compressor).__name__: self._compressor.state_dict()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state of one rank."""
        self.inherit([state])

    def inherit(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Replace the residual by the sum of several ranks' residuals.

        Args:
            states: of any ranks of the same model; empty: there is no residual.

        Raises:
            ValueError: a state is of another model, or of a run with error feedback where this has none.
        """
        self.inherited, self.is_pending = [], False
        self._values.zero_()
        for state in states:
            place = (state["num_ranks"], state["rank"])
            if state["memory"]:
                self._values += self._checked(state["memory"]["residual"]).to(self._values.device)
                self.inherited.append(place)
            mine = state["compressor"].get(type(self._compressor).__name__)
            # random draws continue only on the same rank of as many
            if place == (self._num_ranks, self._rank) and mine is not None:
                self._compressor.load_state_dict(mine)

    def _checked(self, saved: Tensor) -> Tensor:
        if not self.keeps:
            raise ValueError(
                "without error feedback the saved residual cannot be restored, and dropping it would lose "
                "gradients. Resume with error feedback (with comm.exchange=ring, where it is dense now: that "
                "sends the residuals), or start without the saved state"
            )
        if saved.shape != self._values.shape:
            raise ValueError(
                f"the saved residual has the shape {list(saved.shape)} and the gradient "
                f"{list(self._values.shape)}: another model was saved. Load a checkpoint of this one"
            )
        return saved


def find_lost(
    owners: int, energies: Sequence[float], held: Sequence[Sequence[tuple[int, int]]], step: int
) -> LostResiduals | None:
    """Find residuals that no rank holds any more, after `step` exchanges.

    Args:
        owners: number of ranks that had residuals; 0: none had.
        energies: of their residuals, by rank; empty, or of another number of ranks: unknown.
        held: `Residual.inherited` of each new rank.
        step: exchanges done.
    """
    found = {rank for of_one in held for num_ranks, rank in of_one if num_ranks == owners}
    lost = tuple(rank for rank in range(owners) if rank not in found)
    if not lost:
        return None
    whole = sum(energies) if len(energies) == owners else 0.0
    share = sum(energies[rank] for rank in lost) / whole if whole else None
    return LostResiduals(step=step, ranks=lost, of_ranks=owners, energy_share=share)


def warn_of_momentum(config: CommConfig, optimizer: Optimizer) -> None:
    """Log a warning if the optimizer's momentum may diverge under random-k.

    A value waits 1 / ratio steps on average, and the gradients of all these steps arrive at once; momentum
    multiplies them by 1 / (1 - momentum). Only optimizers with `momentum` among the options of their groups
    are affected (SGD, LARS, RMSprop). Adam and LAMB divide by the size of gradients, and did not diverge.
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

    Under a `GradScaler`, a residual keeps the scale of its own step and is added to gradients of another, and
    an infinity stays until it is sent. This is a hook for
    `torch.optim.optimizer.register_optimizer_step_pre_hook`. `parameters` are the ids of those exchanged, and
    `warns` is whether this rank logs warnings.
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
