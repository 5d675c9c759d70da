"""The exchange of a step: sums all ranks' dense gradients, in as few bytes as its parts allow.

    preflight(...)                                ranks verify that all are about to do the same, or all raise
    vector    = residual.add(gradient)            the gradient plus the residual of earlier steps
    selection = controller.choose(vector, ...)    how much of that is sent now
    total     = collective.reduce(vector, ...)    the sum over ranks; the rest stays as the residual

A lossless collective without residuals is a single sum in place, without a preflight: a rank that has no
gradient sends zeros, and an error flag in the same sum (`dlrm.comm.consistency`).
"""

import zlib
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from dlrm.comm.autotune.tuner import ExchangeTuner
from dlrm.comm.collectives.collective import Collective, Select, select_share
from dlrm.comm.compression.compressors import Compressor
from dlrm.comm.consistency import NUM_FLAGS, ErrorFlags, Intent, check_same, run_preflight
from dlrm.comm.controllers.controller import Controller, ValueSelection
from dlrm.comm.feedback import LostResiduals, Residual, find_lost
from dlrm.comm.stats import ExchangeFigures, Tally

ENERGY_STEPS: Final = 100
"""Steps between measurements of all ranks' residuals, by which later losses are weighed."""


class Exchange:
    """Sums gradients of `d` values over ranks; all ranks make the same calls in the same order.

    Args:
        num_values: `d`.
        collective: sums what is selected.
        compressor: selects, where the collective is sparse.
        controller: decides how much is sent.
        dense: collective for steps in which all values are sent.
        tuner: chooses the collective before each exchange; None: it stays.
        keeps_residual: whether values that were not sent are added to the next gradient.
    """

    def __init__(
        self,
        num_values: int,
        collective: Collective,
        compressor: Compressor,
        controller: Controller,
        *,
        dense: Collective,
        device: torch.device,
        group: dist.ProcessGroup | None = None,
        tuner: ExchangeTuner | None = None,
        keeps_residual: bool = True,
    ) -> None:
        self.num_values = num_values
        self.collective = self._first = collective
        self._compressor, self._controller = compressor, controller
        self._dense = dense
        self._device, self._group, self._tuner = device, group, tuner
        self._num_ranks = dist.get_world_size(group)
        rank = dist.get_rank(group)
        self._error_flags = ErrorFlags(rank, device.type == "cuda")
        self.residual = Residual(num_values, device, compressor, rank, self._num_ranks, keeps=keeps_residual)
        """This rank's residual, a state of its own."""
        self.steps_done = 0
        """Number of exchanges, those before the loaded state included."""
        self.losses: tuple[LostResiduals, ...] = ()
        """Residuals that were lost in failures, oldest first; the same on all ranks."""
        self._owners = 0  # ranks that had residuals in the loaded state
        self._energies: list[float] = []
        self._tally = Tally(device)

    def make_buffer(self, num_scalars: int = 0) -> Tensor:
        """Allocate zeros fp32 `[d + num_scalars + NUM_FLAGS]` for `combine`."""
        return torch.zeros(self.num_values + num_scalars + NUM_FLAGS, device=self._device)

    def combine(
        self,
        flat: Tensor,
        *,
        num_scalars: int = 0,
        mean: bool = False,
        problem: Exception | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Sum or average over ranks what they send of their gradients, and exact scalars that follow these.

        Values that are not sent are added to the next gradient. Call `observe` after each step: `auto`, and
        controllers that try shares, learn from nothing else.

        Args:
            flat: from `make_buffer`: the gradient, then scalars; overwritten.
            num_scalars: the same on all ranks.
            mean: divide by the number of ranks. The gradient is divided before a part of it is sent, so that
                residuals mean the same for any number of ranks.
            problem: why this rank has no gradient; it is raised after the other ranks were informed.

        Returns:
            Sum or mean of the gradient `[d]` and of the scalars, the same bits on all ranks; views of `flat`,
            or of memory that the next call reuses.

        Raises:
            DisagreementError: ranks would have done different things. Nothing counts as sent, and residuals
                stay as they were. On a GPU, after a lossless sum, ranks learn of another rank's problem in
                the next call, or in `take_figures`.
            ValueError: the gradient does not fit this exchange; other ranks raise a `DisagreementError`.
        """
        self._error_flags.read_late()  # the last exchange's flags, on a GPU
        problem = problem or self._problem_of(flat[: flat.numel() - num_scalars - NUM_FLAGS])
        if problem is not None:  # zeros let this rank take part up to where all ranks learn of the problem
            flat = self.make_buffer(num_scalars)
        gradient = flat[: self.num_values]
        if self._tuner is not None:
            self.collective = self._tuner.choose(gradient) or self.collective
        self._tally.start()
        if _leaves_no_residual(self.collective) and not self.residual.is_pending:
            self._sum_in_place(flat, mean, problem)
            total, scalars = gradient, flat[self.num_values : -NUM_FLAGS]
        else:
            scalars = self._verify(flat[self.num_values : -NUM_FLAGS], problem)
            if mean:
                gradient /= self._num_ranks
                scalars = scalars / self._num_ranks
            total = self._send(gradient)
        self.steps_done += 1
        self._tally.stop()
        return total, scalars

    def observe(self, seconds: float) -> None:
        """Let controllers and the tuner learn from a step; all ranks call it.

        `seconds` are those of the whole step on this rank, computation included, evaluation and saving
        excluded.
        """
        if _is_controlled(self.collective):
            self._controller.observe(seconds)
        self._tally.step(seconds)
        if self._tuner is not None:  # it alone needs the seconds in each step
            self._tuner.observe(seconds, self._tally.take_seconds(late=self.is_settled))

    @property
    def chosen(self) -> str | None:
        """Name of the collective that `auto` has chosen; None: not yet, or the exchange is not `auto`."""
        chosen = None if self._tuner is None else self._tuner.chosen
        return None if chosen is None else chosen.name

    @property
    def is_settled(self) -> bool:
        """Whether `auto` has finished its trials, in which the times of steps count; true for others."""
        return self._tuner is None or self._tuner.is_settled

    def take_figures(self) -> ExchangeFigures | None:
        """Return the figures since the last call; None if there was no exchange.

        Waits for the device, and raises as `combine`.
        """
        self._error_flags.read_late()
        energy = sum(self._energies) if self._energies else None
        return self._tally.take(self.collective.name, energy)

    def settle(self) -> LostResiduals | None:
        """Verify that all ranks continue from the same state, and count missing residuals as lost.

        All ranks call it once, before the first exchange, whether a state was loaded or not. Returns what was
        lost now; None: nothing.

        Raises:
            DisagreementError: on all ranks: they would continue from different states.
        """
        done = f"has done {self.steps_done:,} exchanges of {self.num_values:,} values"
        plan = "" if self._tuner is None else f", tuned to {self._tuner.state_dict()}"
        described = f"{done} and continues by {self._describe_sending()}{plan}"
        gathered: list[Any] = [None] * self._num_ranks
        dist.all_gather_object(gathered, (described, self.residual.inherited), group=self._group)
        check_same(
            [state for state, _ in gathered],
            "Give all ranks the same options, and states saved at the same step",
        )
        held = [inherited for _, inherited in gathered]
        self.residual.inherited = []
        self.residual.is_pending = any(map(bool, held))
        lost = find_lost(self._owners, self._energies, held, self.steps_done)
        if self._owners != self._num_ranks:
            self._energies = []  # they belong to another set of ranks
        if lost is not None:
            self.losses = (*self.losses, lost)
        return lost

    def state_dict(self) -> dict[str, Any]:
        """State that is the same on all ranks; `residual` has this rank's own."""
        return {
            "steps_done": self.steps_done,
            "owners": self._num_ranks if self.residual.is_pending else 0,
            "energies": list(self._energies),
            "losses": [asdict(each) for each in self.losses],
            "parts": {name: part.state_dict() for name, part in self._parts().items()},
            **({} if self._tuner is None else {"planner": self._tuner.state_dict()}),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state; parts of another kind than the saved ones start over."""
        self.steps_done = state["steps_done"]
        self._owners, self._energies = state["owners"], list(state["energies"])
        self.losses = tuple(LostResiduals.from_dict(each) for each in state["losses"])
        self.collective = self._first  # an earlier choice of `auto` does not outlast another state
        if self._tuner is not None:
            self._tuner.load_state_dict(state.get("planner", {}))
            self.collective = self._tuner.chosen or self._first
        for name, part in self._parts().items():
            if name in state["parts"]:
                part.load_state_dict(state["parts"][name])

    def _parts(self) -> dict[str, Any]:
        """Parts with a state that all ranks share, by the name of their class."""
        parts: dict[str, Any] = {type(self._controller).__name__: self._controller}
        if hasattr(self.collective, "state_dict"):
            parts[type(self.collective).__name__] = self.collective
        return parts

    def _sum_in_place(self, flat: Tensor, mean: bool, problem: Exception | None) -> None:
        flags = flat[-NUM_FLAGS:]
        self._error_flags.write(flags, problem)
        self.collective.sum_in_place(flat)
        self._error_flags.read(flags, problem, self.steps_done + 1)
        if mean:
            flat /= self._num_ranks
        self._record(self.collective, self.num_values)

    def _verify(self, scalars: Tensor, problem: Exception | None) -> Tensor:
        """Continue only if all ranks can and will do the same, and sum their scalars.

        It comes before the gradient is added to the residual, which thus stays as it was if this raises, and
        before the controller, which may exchange numbers itself.
        """
        is_measured = self.residual.is_pending and self.steps_done % ENERGY_STEPS == 1
        energy = self.residual.energy if is_measured else 0.0
        described = f"{self.residual.is_pending}, {self._describe_sending()}"
        intent = Intent(self.steps_done + 1, self.num_values, zlib.crc32(described.encode()))
        energies, scalars = run_preflight(intent, problem, energy, scalars, self._group)
        if is_measured:
            self._energies = energies
        return scalars

    def _send(self, gradient: Tensor) -> Tensor:
        """Sum over ranks what each of them selects of gradient and residual; the rest is the new residual."""
        collective, has_residual = self.collective, self.residual.is_pending
        vector = self.residual.add(gradient) if has_residual else gradient
        selection = ValueSelection(self.num_values)
        if _is_controlled(collective):
            selection = self._controller.choose(vector, self._compressor)
        if collective.is_sparse and selection.num_kept >= self.num_values:
            collective = self._dense  # all values are sent, so that indices would be a waste
        num_kept = selection.num_kept if collective.is_sparse else self.num_values
        if not has_residual and _leaves_no_residual(collective):
            collective.sum_in_place(gradient)
            total = gradient
        else:
            if not has_residual:
                vector = self.residual.add(gradient)
            shares: list[float] = []
            total = collective.reduce(vector, self._select(vector, selection, shares))
            if shares and not self._compressor.is_exact:
                num_kept = round(shares[0] * self.num_values)
        self.residual.is_pending = self.residual.keeps and not _leaves_no_residual(collective)
        self._record(collective, num_kept)
        return total

    def _select(self, vector: Tensor, selection: ValueSelection, shares: list[float]) -> Select:
        """Make a `Select` that reuses the controller's indices, if any, and appends the selected share."""
        by_share = select_share(self._compressor, selection.num_kept, self.num_values)

        def select(part: Tensor) -> Tensor:
            # the controller's indices are into the whole vector, not into a shard of it
            is_whole = part.data_ptr() == vector.data_ptr() and part.numel() == vector.numel()
            indices = selection.indices if is_whole and selection.indices is not None else by_share(part)
            shares.append(indices.numel() / max(part.numel(), 1))
            return indices

        return select

    def _describe_sending(self) -> str:
        """All state that decides which messages are sent, besides gradients: equal where ranks agree."""
        kinds = [type(each).__name__ for each in (self._compressor, self._controller)]
        state = self.collective.state_dict() if hasattr(self.collective, "state_dict") else None
        keeps, position = self.residual.keeps, self._controller.position
        return repr((self.collective.name, state, kinds, keeps, position))

    def _problem_of(self, gradient: Tensor) -> ValueError | None:
        if gradient.shape == (self.num_values,) and gradient.dtype == torch.float32:
            return None
        return ValueError(
            f"the gradient is {gradient.dtype} of {' x '.join(map(str, gradient.shape))} values, and this "
            f"exchange is for fp32 of {self.num_values:,} in one vector: make it for the parameters that are "
            "trained"
        )

    def _record(self, collective: Collective, num_kept: int) -> None:
        sent_bytes = collective.sent_bytes(self.num_values, num_kept)
        self._tally.exchange(num_kept, self.num_values, sent_bytes)


def _leaves_no_residual(collective: Collective) -> bool:
    return collective.is_lossless or collective.num_ranks == 1


def _is_controlled(collective: Collective) -> bool:
    return collective.is_sparse and not _leaves_no_residual(collective)
