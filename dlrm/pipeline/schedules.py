"""The schedules of `train.pipeline`: in which order the parts of a training step run."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch.distributed as dist
from torch import Tensor, nn

from data.batch import Batch
from dlrm.models.contract import Objective, objective_of
from dlrm.pipeline.ahead import Ahead, Flight, called_with_batch

Upcoming = Callable[[int], Sequence[Batch]]
"""Gives the next batches that will be trained, at most so many, without taking them."""


class Passed(NamedTuple):
    """What the forward and backward pass of a batch gave."""

    loss: Tensor
    """Mean over this rank's samples, a scalar."""
    logits: Tensor | None
    """Fp32 `[B]`; None if the model has none."""


class Schedule(Protocol):
    """Runs the forward and backward passes of training; all ranks call it with as many batches."""

    def step(self, batch: Batch, upcoming: Upcoming) -> Passed:
        """Train on a batch: tables are updated, dense parameters have the gradients of this rank.

        `upcoming` may be called for batches to work ahead on; they must be the next ones to be given.
        """
        ...


class Plain:
    """`none`: one part of a step after the other."""

    def __init__(self, model: nn.Module) -> None:
        self._model, self._objective = model, objective_of(model)

    def step(self, batch: Batch, upcoming: Upcoming) -> Passed:
        """See `Schedule.step`."""
        return forward_backward(self._model, self._objective, batch)


def forward_backward(
    model: nn.Module, objective: Objective, batch: Batch, between: Callable[[], object] = lambda: None
) -> Passed:
    """Run both passes of a batch, and call `between` them."""
    outputs = model(batch.dense, batch.sparse)
    loss = objective.loss(outputs, batch.labels)
    between()
    loss.backward()  # type: ignore[no-untyped-call]  # also updates the tables
    return Passed(loss=loss, logits=objective.logits(outputs))


class Prefetch:
    """`prefetch`: the next batch's embeddings, and the ids of the one after, travel during the computation.

    The results are those of `Plain` to the last bit. The first batch shows which collections the model calls
    with the batch itself; only these can work ahead.

    Args:
        model: a `DistributedModelParallel`.
        corrected: make embeddings exact that were looked up before the last update. Otherwise their rows are
            one update late.
    """

    def __init__(self, model: nn.Module, corrected: bool = True) -> None:
        self._model, self._objective, self._corrected = model, objective_of(model), corrected
        group = dist.group.WORLD
        assert group is not None
        self._group: dist.ProcessGroup = group
        self.ahead: list[Ahead] | None = None
        """The collections that work ahead; None: before the first batch."""
        self._flights: list[tuple[Batch, list[Flight]]] = []
        """Of the batches that are worked ahead on, the next one first."""

    def step(self, batch: Batch, upcoming: Upcoming) -> Passed:
        """See `Schedule.step`."""
        if self.ahead is None:
            return self._first(batch)
        current = self._take(batch)
        later = upcoming(2)
        for each in later[len(self._flights) :]:
            self._start(each)
        following = self._flights[0][1] if self._flights else []
        for ahead, flight, trained in zip(self.ahead, following, current, strict=False):
            ahead.look_up(flight, trained if self._corrected else None, self._group)
        for ahead, flight in zip(self.ahead, current, strict=True):
            ahead.give(flight)
        passed = forward_backward(self._model, self._objective, batch, self._between_passes)
        for ahead in self.ahead:
            ahead.give(None)
        for flight in following:
            for correction in flight.corrections.values():
                correction.send_rows()
        return passed

    def _first(self, batch: Batch) -> Passed:
        passed: list[Passed] = []

        def call() -> None:
            passed.append(forward_backward(self._model, self._objective, batch))

        modules = called_with_batch(self._model, call, batch.sparse)
        self.ahead = [Ahead(module, early=True) for module in modules]
        return passed[0]

    def _take(self, batch: Batch) -> list[Flight]:
        """What was done ahead for a batch, which is done now if it was not."""
        if not self._flights or self._flights[0][0] is not batch:
            self._flights.clear()
            self._start(batch)
            flights = self._flights[0][1]
            for ahead, flight in zip(self.ahead or [], flights, strict=True):
                ahead.look_up(flight, None, self._group)
        return self._flights.pop(0)[1]

    def _start(self, batch: Batch) -> None:
        self._flights.append((batch, [ahead.start(batch.sparse) for ahead in self.ahead or []]))

    def _between_passes(self) -> None:
        """Start what could only be prepared when the pass began."""
        for _, flights in self._flights:
            for flight in flights:
                flight.advance(waits=1)
                for correction in flight.corrections.values():
                    correction.send_places()


def make_schedule(name: str, model: nn.Module) -> Schedule:
    """Make the schedule that `train.pipeline` names."""
    makers: dict[str, Any] = {"none": Plain, "prefetch": Prefetch, "delayed": Plain}
    schedule: Schedule = makers[name](model)
    return schedule
