"""Averages dense gradients in the background of the next steps, which apply them late."""

from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dlrm.comm.collectives.levels import timeout_of
from dlrm.comm.consistency import check_alike
from dlrm.comm.stats import ExchangeFigures, Tally
from dlrm.dense_sync.base import LATE_GRADIENTS, DenseSync, mean_over_ranks, ring_bytes


class _Mean:
    """The mean over ranks of a flat gradient, in place; the sum is started at once if there is a group."""

    def __init__(self, flat: Tensor, group: dist.ProcessGroup | None) -> None:
        self.flat = flat
        self._num_ranks = dist.get_world_size(group)
        self._work = None if group is None else dist.all_reduce(flat, group=group, async_op=True)

    def finish(self) -> Tensor:
        """Wait for the sum, on a GPU in its stream, and return the mean; may be called again."""
        if self._work is not None:
            self._work.wait()
            self._work = None
            self.flat.div_(self._num_ranks)
        return self.flat


class DelayedSync(DenseSync):
    """Starts the all-reduce of a step's gradients, and puts those of an earlier step into `.grad`.

    The first `delay_steps` steps get no gradients at all, so that parameters and optimizer state stay as they
    are. Evaluations see the parameters without the gradients that are still late. So does the end of
    training: these gradients are state, which is saved, and applied when the run is resumed. Had the end
    applied them, a run that is resumed to train on would differ from one that never stopped.

    Reading the state waits for the gradients in flight. Partial recovery reads it after each step, so that
    there the exchange overlaps with the update alone.

    Scalars are not late, so that NaN is found before it is applied or saved, and signals stop all ranks
    in the step in which they are seen.

    Args:
        parameters: dense parameters of one dtype, equal on all ranks.
        delay_steps: steps by which gradients are late; 0: the all-reduce of each step is waited for.

    Raises:
        ValueError: on all ranks, if they have different parameters or delays.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], delay_steps: int = 1) -> None:
        self._parameters, self._delay_steps = list(parameters), delay_steps
        first = self._parameters[0]
        # a group of its own: neither waits for exchanges of tables that are under way, nor these for it
        self._group = dist.new_group(timeout=timeout_of(first.device))
        named = {f"dense parameter {number}": each for number, each in enumerate(self._parameters)}
        check_alike(named, self._group, delay_steps)
        self._num_values = sum(each.numel() for each in self._parameters)
        # those in flight, and the one in `.grad`, which is not read any more when the next gradient is there
        self._idle = deque(first.detach().new_zeros(self._num_values) for _ in range(delay_steps + 1))
        self._in_flight = deque[_Mean]()
        self._tally = Tally(first.device)

    def average(self, scalars: Tensor) -> Tensor:
        """Replace each gradient by the mean of `delay_steps` ago, or by none; average this step's scalars."""
        self._tally.start()
        own = self._idle.popleft()
        torch._foreach_copy_(
            self._shaped(own),
            [torch.zeros_like(each) if each.grad is None else each.grad for each in self._parameters],
        )
        if len(self._in_flight) == self._delay_steps > 0:
            self._in_flight[0].finish()  # or the scalars would wait behind it
        scalars = mean_over_ranks(scalars, self._group)
        self._in_flight.append(_Mean(own, self._group))
        gradients: Sequence[Tensor | None] = [None] * len(self._parameters)
        if len(self._in_flight) > self._delay_steps:
            due = self._in_flight.popleft().finish()
            self._idle.append(due)
            gradients = self._shaped(due)
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
        for mean in self._in_flight:
            mean.finish()

    def take_figures(self) -> ExchangeFigures | None:
        """See `DenseSync.take_figures`; the seconds are those that training has waited."""
        return self._tally.take("late all-reduce")

    def state_dict(self) -> dict[str, Any]:
        """See `DenseSync.state_dict`: mean gradients that were not applied yet, each `[num_values]`."""
        return {LATE_GRADIENTS: [mean.finish() for mean in self._in_flight]}

    def load_state_dict(self, state: dict[str, Any], steps_done: int) -> None:
        """See `DenseSync.load_state_dict`."""
        self.join()
        self._idle.extend(mean.flat for mean in self._in_flight)
        self._in_flight.clear()
        late = state.get(LATE_GRADIENTS, [])
        if len(late) <= self._delay_steps and all(each.numel() == self._num_values for each in late):
            for gradient in late:
                flat = self._idle.popleft()
                self._in_flight.append(_Mean(flat.copy_(gradient), None))
            state = {name: each for name, each in state.items() if name != LATE_GRADIENTS}
        super().load_state_dict(state, steps_done)

    def _shaped(self, flat: Tensor) -> list[Tensor]:
        pieces = torch.split(flat, [each.numel() for each in self._parameters])
        return [piece.view_as(each) for piece, each in zip(pieces, self._parameters, strict=True)]
