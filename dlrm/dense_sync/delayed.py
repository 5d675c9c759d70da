"""Averages dense gradients in the background of the next steps, which apply them late."""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dlrm.comm.collectives.levels import timeout_of
from dlrm.comm.consistency import check_alike
from dlrm.comm.feedback import LostResiduals, find_lost
from dlrm.comm.stats import ExchangeFigures, Tally
from dlrm.dense_sync.base import LATE_GRADIENTS, DenseSync, mean_over_ranks, ring_bytes


class _Pending:
    """A gradient that is averaged in the background: what this rank adds, and the mean, flat like `like`."""

    def __init__(self, like: Tensor) -> None:
        self.own, self._mean = like.clone(), like.clone()
        self._work: Any = None

    def start(self, group: dist.ProcessGroup) -> None:
        """Start to average over the ranks of the group, which call it together."""
        self._mean.copy_(self.own)
        self._work = dist.all_reduce(self._mean, group=group, async_op=True)

    def finish(self) -> Tensor:
        """Wait for the mean, on a GPU in its stream, and return it; may be called again."""
        if self._work is not None:
            self._work.wait()
            self._work = None
            self._mean.div_(dist.get_world_size())
        return self._mean


class LocalGradients:
    """This rank's parts of the mean gradients that are not applied yet: a state of its own.

    The parts and not their means, so that taking the state waits for no exchange.
    """

    def __init__(self, in_flight: deque[_Pending], num_values: int) -> None:
        self._in_flight, self._num_values = in_flight, num_values
        self.inherited: list[tuple[int, int]] = []
        """Number of ranks, and rank, of the parts that were loaded here and are not settled yet."""

    def state_dict(self) -> dict[str, Any]:
        """The parts, oldest first, as live tensors `[num_values]`."""
        return {
            "rank": dist.get_rank(),
            "num_ranks": dist.get_world_size(),
            "gradients": [flight.own for flight in self._in_flight],
        }

    def inherit(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Replace the parts by sums over several ranks; after the state of all ranks was loaded.

        Raises:
            ValueError: the parts are of another model.
        """
        self.inherited = []
        for flight in self._in_flight:
            flight.own.zero_()
        for state in states:
            gradients = state["gradients"]
            if len(gradients) != len(self._in_flight):  # those that `DelayedSync` has dropped
                continue
            for flight, gradient in zip(self._in_flight, gradients, strict=True):
                if gradient.numel() != self._num_values:
                    raise ValueError(
                        f"the saved gradient has {gradient.numel():,} values and that of the model "
                        f"{self._num_values:,}: another model was saved. Load a checkpoint of this one"
                    )
                flight.own.add_(gradient.to(flight.own.device))
            self.inherited.append((state["num_ranks"], state["rank"]))


class DelayedSync(DenseSync):
    """Starts the all-reduce of a step's gradients, and puts those of an earlier step into `.grad`.

    The first `delay_steps` steps get no gradients at all, so that parameters and optimizer state stay as they
    are. Evaluations see the parameters without the gradients that are still late. So does the end of
    training: these gradients are state, which is saved, and applied when the run is resumed. Had the end
    applied them, a run that is resumed to train on would differ from one that never stopped.

    Scalars are not late, so that NaN is found before it is applied or saved, and signals stop all ranks
    in the step in which they are seen.

    Args:
        parameters: dense parameters of one dtype, equal on all ranks.
        delay_steps: steps by which gradients are late; 0: the all-reduce of each step is waited for.

    Raises:
        ValueError: on all ranks, if they have different parameters or delays.
    """

    own_name = LATE_GRADIENTS

    def __init__(self, parameters: Sequence[nn.Parameter], delay_steps: int = 1) -> None:
        self._parameters, self._delay_steps = list(parameters), delay_steps
        first = self._parameters[0]
        # a group of its own: neither waits for exchanges of tables that are under way, nor these for it
        self._group: dist.ProcessGroup = dist.new_group(timeout=timeout_of(first.device))
        named = {f"dense parameter {number}": each for number, each in enumerate(self._parameters)}
        check_alike(named, self._group, delay_steps)
        self._num_values = sum(each.numel() for each in self._parameters)
        zeros = first.detach().new_zeros(self._num_values)
        # those in flight, and the one in `.grad`, which is not read any more when the next gradient is there
        self._idle = deque(_Pending(zeros) for _ in range(delay_steps + 1))
        self._in_flight = deque[_Pending]()
        self._local = LocalGradients(self._in_flight, self._num_values)
        self._owners = 0  # ranks that had parts in the loaded state
        self._losses: tuple[LostResiduals, ...] = ()
        self._steps_done = 0
        self._tally = Tally(first.device)

    @property
    def own(self) -> LocalGradients:
        """See `DenseSync.own`."""
        return self._local

    @property
    def losses(self) -> Sequence[LostResiduals]:
        """See `DenseSync.losses`."""
        return self._losses

    def average(self, scalars: Tensor) -> Tensor:
        """Replace each gradient by the mean of `delay_steps` ago, or by none; average this step's scalars."""
        self._tally.start()
        flight = self._idle.popleft()
        torch._foreach_copy_(
            self._shaped(flight.own),
            [torch.zeros_like(each) if each.grad is None else each.grad for each in self._parameters],
        )
        if len(self._in_flight) == self._delay_steps > 0:
            self._in_flight[0].finish()  # or the scalars would wait behind it
        scalars = mean_over_ranks(scalars, self._group)
        flight.start(self._group)
        self._in_flight.append(flight)
        gradients: Sequence[Tensor | None] = [None] * len(self._parameters)
        if len(self._in_flight) > self._delay_steps:
            due = self._in_flight.popleft()
            self._idle.append(due)
            gradients = self._shaped(due.finish())
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            parameter.grad = gradient
        self._tally.stop()
        return scalars

    def updated(self, seconds: float) -> None:
        """See `DenseSync.updated`."""
        self._tally.step(seconds)
        self._tally.exchange(self._num_values, self._num_values, ring_bytes(self._num_values))

    def join(self) -> None:
        """Wait for the gradients in flight, so that nothing is under way when training ends."""
        for flight in self._in_flight:
            flight.finish()

    def take_figures(self) -> ExchangeFigures | None:
        """See `DenseSync.take_figures`; the seconds are those that training has waited."""
        return self._tally.take("late all-reduce")

    def settle(self) -> LostResiduals | None:
        """Average the loaded gradients over the ranks that still have their parts; returns what is lost."""
        held: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(held, self._local.inherited, group=self._group)
        self._local.inherited = []
        lost = find_lost(self._owners, [], held, self._steps_done)
        self._losses += () if lost is None else (lost,)
        num_parts = sum(map(len, held))
        if self._owners and not num_parts:
            self._land_all()
        self._owners = 0
        for flight in self._in_flight:
            if num_parts != dist.get_world_size():
                flight.own.mul_(
                    dist.get_world_size() / num_parts
                )  # so that they are averaged like any others
            flight.start(self._group)
        return lost

    def state_dict(self) -> dict[str, Any]:
        """See `DenseSync.state_dict`."""
        late = {
            "num_gradients": len(self._in_flight),
            "owners": dist.get_world_size() if self._in_flight else 0,
            "losses": [asdict(each) for each in self._losses],
        }
        return {LATE_GRADIENTS: late}

    def load_state_dict(self, state: dict[str, Any], steps_done: int) -> None:
        """See `DenseSync.load_state_dict`; `own` is loaded after it."""
        self._land_all()
        self._steps_done, self._owners = steps_done, 0
        late = state.get(LATE_GRADIENTS, {"num_gradients": 0, "owners": 0, "losses": []})
        self._losses = tuple(LostResiduals.from_dict(each) for each in late["losses"])
        if late["num_gradients"] <= self._delay_steps:
            self._owners = late["owners"]
            self._in_flight.extend(self._idle.popleft() for _ in range(late["num_gradients"]))
            state = {name: each for name, each in state.items() if name != LATE_GRADIENTS}
        super().load_state_dict(state, steps_done)

    def _land_all(self) -> None:
        """Forget the gradients in flight."""
        self.join()
        self._idle.extend(self._in_flight)
        self._in_flight.clear()

    def _shaped(self, flat: Tensor) -> list[Tensor]:
        pieces = torch.split(flat, [each.numel() for each in self._parameters])
        return [piece.view_as(each) for piece, each in zip(pieces, self._parameters, strict=True)]
