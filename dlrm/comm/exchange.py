"""One exchange a step: dense gradients of all ranks in, their sum out, in as few bytes as its parts allow.

    roll_call(...)                           all are about to do the same; else all raise, and nothing is sent
    vector = memory.add(gradient)            what this rank owes: its gradient, and what it did not send
    choice = controller.choose(vector, ...)  how much of that travels now
    total  = collective.reduce(vector, ...)  the sum over ranks of what travelled; the rest stays in memory

Where all of it travels as it is, and nothing is owed, it is one sum in place and nothing else: a rank that
has no gradient sends zeros, and says so in the same sum (`dlrm.comm.consistency.error_flags`).
"""

import zlib
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, Final, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from dlrm.comm.collectives import Collective
from dlrm.comm.compression.compressors import Compressor
from dlrm.comm.consistency.error_flags import NUM_PLACES, ErrorFlags
from dlrm.comm.consistency.preflight import Intent, Preflight, check_standings
from dlrm.comm.controllers import Controller
from dlrm.comm.feedback.error_feedback import Memory
from dlrm.comm.feedback.residual import LostResiduals, Residual, losses_of
from dlrm.comm.feedback.sending import Sending, is_controlled, is_lossless
from dlrm.comm.stats.figures import ExchangeFigures, Tally
from dlrm.comm.stats.timer import DeviceTimer

ENERGY_STEPS: Final = 100
"""How often all ranks learn how much each of them owes, so that it is known when that is lost."""


class Planner(Protocol):
    """Says which collective to use, alike on all ranks; they call it together.

    It decides by how long steps take: without `observe` after each of them, nothing is ever decided.
    """

    chosen: Collective | None
    """The collective that was decided for; None: not yet."""

    @property
    def is_settled(self) -> bool:
        """Whether it has decided, and tries nothing any more."""

    def choose(self, gradient: Tensor) -> Collective | None:
        """The collective for this gradient and those that follow; None: the same as before.

        Args:
            gradient: fp32 `[d]`, which is due to be exchanged; stays as it is.
        """

    def observe(self, step_s: float, exchange_s: float) -> None:
        """A step is over; it took so long on this rank, and the exchange in it so long."""

    def state_dict(self) -> dict[str, Any]:
        """What was decided, and what for."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with what was decided, if that was for ranks like these, and begin anew otherwise."""


class Exchange:
    """Sums gradients over ranks. All ranks make the same calls in the same order.

    Args:
        num_values: of the gradient, `d`.
        collective: for what is chosen.
        compressor: chooses, where the collective is sparse.
        memory: of `d` values, on `device`.
        controller: says how much travels.
        dense: for steps in which all of it travels; None: `collective`, which must be dense then.
        device: of the gradients.
        group: of the ranks; None: all.
        planner: asked before each exchange; None: the collective stays.
    """

    def __init__(
        self,
        num_values: int,
        collective: Collective,
        compressor: Compressor,
        memory: Memory,
        controller: Controller,
        *,
        dense: Collective | None = None,
        device: torch.device,
        group: dist.ProcessGroup | None = None,
        planner: Planner | None = None,
    ) -> None:
        if dense is None and collective.is_sparse:
            raise ValueError(f"{collective.name} is sparse: name a dense collective as well, for all values")
        self.num_values = num_values
        self.collective = self._first = collective
        self._controller = controller
        self._sending = Sending(num_values, compressor, memory, controller, dense or collective)
        self._device, self._group, self._planner = device, group, planner
        self._num_ranks = dist.get_world_size(group)
        rank = dist.get_rank(group)
        self._call, self._objections = Preflight(device, group), ErrorFlags(rank, device.type == "cuda")
        self._room: Tensor | None = None
        self.residual = Residual(memory, compressor, rank, self._num_ranks)
        """What this rank owes, as a state of its own."""
        self.steps_done = 0
        """Exchanges, those before the loaded state included."""
        self.losses: tuple[LostResiduals, ...] = ()
        """What was owed by ranks that took it along, oldest first; the same on all ranks."""
        self._owners = 0  # ranks that the loaded state was of
        self._energies: list[float] = []
        self._stopwatch = DeviceTimer(device)
        self._tally = Tally()

    @property
    def is_planned(self) -> bool:
        """Whether the length of steps decides how gradients travel: time them as the device ends them."""
        return self._planner is not None

    def make_room(self, num_scalars: int = 0) -> Tensor:
        """Zeros fp32 `[d + num_scalars + n]` for `combine`; the last n places are for its own use."""
        return torch.zeros(self.num_values + num_scalars + NUM_PLACES, device=self._device)

    def sum(self, gradient: Tensor) -> Tensor:
        """The sum over ranks of what they send; what they do not send, they add to their next gradient.

        Call `observe` after each step: `auto`, and controllers that try out ratios, learn from nothing else.

        Args:
            gradient: fp32 `[d]`; left as it is.

        Returns:
            fp32 `[d]`, the same bits on all ranks; its memory is used again by the next call.

        Raises:
            DisagreementError: ranks would have done different things. Nothing counts as sent, and what each
                rank owes is what it was. On a GPU, where all values travel as they are, the others hear of a
                rank with a problem in their `observe`, or next `sum`.
            ValueError: the gradient is not one that this exchange is for; other ranks raise the former.
        """
        if self._room is None:
            self._room = self.make_room()
        problem = self._problem_of(gradient)
        if problem is None:
            self._room[: self.num_values].copy_(gradient)
        return self.combine(self._room, problem=problem)[0]

    def combine(
        self,
        flat: Tensor,
        *,
        num_scalars: int = 0,
        mean: bool = False,
        problem: Exception | None = None,
    ) -> tuple[Tensor, Tensor]:
        """As `sum`, or the mean over ranks; scalars behind the gradient travel along, dense and exact.

        For a mean, a gradient is divided before a part of it is sent: what is owed then means the same for
        any number of ranks.

        Args:
            flat: as `make_room` has made it: the gradient, then scalars. It is overwritten.
            num_scalars: the same on all ranks. If there are any, the caller reads them in the same step, and
                so hears of a rank with a problem at once, also on a GPU.
            mean: divide by the number of ranks.
            problem: why this rank has no gradient; it is raised, and the others do not wait for it in vain.

        Returns:
            The gradient's sum or mean `[d]`, and those of the scalars; views of `flat`, or of memory that the
            next call uses again.

        Raises:
            DisagreementError, ValueError: as `sum`.
        """
        self._objections.read_late()
        problem = problem or self._problem_of(flat[: flat.numel() - num_scalars - NUM_PLACES])
        if problem is not None:  # zeros go with the others to where all hear of it
            flat = self.make_room(num_scalars)
        gradient = flat[: self.num_values]
        if self._planner is not None:
            self.collective = self._planner.choose(gradient) or self.collective
        self._stopwatch.start()
        if is_lossless(self.collective) and not self.residual.is_owed:
            self._sum_in_place(flat, num_scalars, mean, problem)
            total, scalars = gradient, flat[self.num_values : -NUM_PLACES]
        else:
            scalars = self._call_roll(flat[self.num_values : -NUM_PLACES], problem)
            if mean:
                gradient /= self._num_ranks
                scalars = scalars / self._num_ranks
            total = self._send(gradient)
        self.steps_done += 1
        self._stopwatch.stop()
        return total, scalars

    def observe(self, seconds: float) -> None:
        """A step is over; controllers and planners learn from it. All ranks call it.

        Args:
            seconds: of the whole step on this rank, computing included; evaluation and saving left out.

        Raises:
            DisagreementError: as `sum`.
        """
        if is_controlled(self.collective):
            self._controller.observe(seconds)
        self._tally.step(seconds)
        exchange_s = self._take_seconds()
        self._objections.read_late()
        if self._planner is not None:
            self._planner.observe(seconds, exchange_s)

    @property
    def chosen(self) -> str | None:
        """Of `auto`: the name of the collective that it has decided for; None: of none, or of none yet."""
        decided = None if self._planner is None else self._planner.chosen
        return None if decided is None else decided.name

    @property
    def is_settled(self) -> bool:
        """Of `auto`: whether it has decided, and tries nothing any more; others have nothing to try."""
        return self._planner is None or self._planner.is_settled

    def take_figures(self) -> ExchangeFigures | None:
        """What exchanges took since this was last asked; None if there was none. Waits for the device."""
        self._take_seconds()
        energy = sum(self._energies) if self._energies else None
        return self._tally.take(self.collective.name, energy)

    def settle(self) -> LostResiduals | None:
        """After states were loaded, or none were: what was owed and came back to nobody counts as lost.

        All ranks call it, once, before the first exchange.

        Returns:
            What was lost now; None: nothing.

        Raises:
            DisagreementError: on all ranks: they would go on from different states.
        """
        told: list[Any] = [None] * self._num_ranks
        dist.all_gather_object(told, (self._standing(), self.residual.taken_over), group=self._group)
        check_standings([standing for standing, _ in told])
        held = [taken_over for _, taken_over in told]
        self.residual.taken_over = []
        self.residual.is_owed = any(map(bool, held))
        lost = losses_of(self._owners, self._energies, held, self.steps_done)
        if self._owners != self._num_ranks:
            self._energies = []  # they are of other ranks than those that owe from now on
        if lost is not None:
            self.losses = (*self.losses, lost)
        return lost

    def state_dict(self) -> dict[str, Any]:
        """What is the same on all ranks; `residual` is not."""
        return {
            "steps_done": self.steps_done,
            "owners": self._num_ranks if self.residual.is_owed else 0,
            "energies": list(self._energies),
            "losses": [asdict(each) for each in self.losses],
            "parts": {name: part.state_dict() for name, part in self._parts().items()},
            **({} if self._planner is None else {"planner": self._planner.state_dict()}),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there; parts of another kind than those that were saved begin anew."""
        self.steps_done = state["steps_done"]
        self._owners, self._energies = state["owners"], list(state["energies"])
        self.losses = tuple(LostResiduals.from_dict(each) for each in state["losses"])
        self.collective = self._first
        if self._planner is not None:
            self._planner.load_state_dict(state.get("planner", {}))
            self.collective = self._planner.chosen or self._first
        for name, part in self._parts().items():
            if name in state["parts"]:
                part.load_state_dict(state["parts"][name])

    def _standing(self) -> str:
        """All that decides what this rank will do next, for people."""
        done = f"has done {self.steps_done:,} exchanges of {self.num_values:,} values"
        plan = "" if self._planner is None else f", planned {self._planner.state_dict()}"
        return f"{done} and goes on by {self._sending.way(self.collective)}{plan}"

    def _parts(self) -> dict[str, Any]:
        """Those with a state that all ranks share, by kind."""
        parts: dict[str, Any] = {type(self._controller).__name__: self._controller}
        if hasattr(self.collective, "state_dict"):
            parts[type(self.collective).__name__] = self.collective
        return parts

    def _sum_in_place(self, flat: Tensor, num_scalars: int, mean: bool, problem: Exception | None) -> None:
        """All of it travels as it is."""
        places = flat[-NUM_PLACES:]
        self._objections.write(places, problem)
        self.collective.sum_in_place(flat)
        self._objections.read(places, problem, self.steps_done + 1, at_once=num_scalars > 0)
        if mean:
            flat /= self._num_ranks
        self._note(self.collective, self.num_values)

    def _call_roll(self, scalars: Tensor, problem: Exception | None) -> Tensor:
        """Go on only if all ranks can, and will do the same; the sums of their scalars.

        It comes before the gradient is added to what is owed, which stays as it was if this raises; and
        before the controller is asked, who may have something to ask the other ranks.
        """
        is_measured = self.residual.is_owed and self.steps_done % ENERGY_STEPS == 1
        energy = self.residual.energy if is_measured else 0.0
        way = zlib.crc32(f"{self.residual.is_owed}, {self._sending.way(self.collective)}".encode())
        intent = Intent(exchange=self.steps_done + 1, num_values=self.num_values, way=way)
        energies, scalars = self._call(intent, problem, energy, scalars)
        if is_measured:
            self._energies = energies
        return scalars

    def _send(self, gradient: Tensor) -> Tensor:
        """The sum over ranks of what they choose to send of this and of what they owe."""
        sent = self._sending.sum(gradient, self.collective, self.residual.is_owed)
        self.residual.is_owed = self.residual.is_kept and not is_lossless(sent.collective)
        self._note(sent.collective, sent.num_kept)
        return sent.total

    def _problem_of(self, gradient: Tensor) -> ValueError | None:
        if gradient.shape == (self.num_values,) and gradient.dtype == torch.float32:
            return None
        return ValueError(
            f"the gradient is {gradient.dtype} of {' x '.join(map(str, gradient.shape))} values, and this "
            f"exchange is for fp32 of {self.num_values:,} in one vector: make it for the parameters that are "
            "trained"
        )

    def _take_seconds(self) -> float:
        """Of the exchanges since this was last asked."""
        seconds = self._stopwatch.take()
        self._tally.waited(seconds)
        return seconds

    def _note(self, collective: Collective, num_kept: int) -> None:
        sent_bytes = collective.sent_bytes(self.num_values, num_kept)
        self._tally.exchange(num_kept, self.num_values, sent_bytes)
