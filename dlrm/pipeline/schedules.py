"""The schedules of `train.pipeline`: in which order the parts of a training step run."""

import logging
from collections import deque
from collections.abc import Callable, Sequence
from statistics import mean, median
from time import perf_counter
from typing import Final, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.distributed.types import ShardedModule

from data.batch import Batch
from dlrm.models.contract import Objective, objective_of
from dlrm.pipeline.collection import LateRows, PipelinedCollection, Prefetched, called_with_batch
from dlrm.pipeline.halves import half_sizes, parts_of
from dlrm.sharding.splitting.sharded import ShardedHead

TURNS: Final = 5
"""Turns of each schedule that `auto` times, of `UNTIMED_STEPS` and `TIMED_STEPS` steps."""
UNTIMED_STEPS: Final = 3
TIMED_STEPS: Final = 10

logger = logging.getLogger(__name__)

Upcoming = Callable[[int], Sequence[Batch]]
"""Gives the next batches that will be trained, at most so many, without taking them."""


class Passed(NamedTuple):
    """What the forward and backward pass of a batch gave."""

    loss: Tensor
    """Mean over this rank's samples times the weight of its batch, a scalar: its mean over ranks is that over
    all samples."""
    logits: Tensor | None
    """Fp32 `[B]`; None if the model has none."""


class Schedule(Protocol):
    """Runs the forward and backward passes of training; all ranks call it with as many batches."""

    def step(self, batch: Batch, upcoming: Upcoming) -> Passed:
        """Train on a batch: tables are updated, dense parameters have the gradients of this rank.

        `upcoming` may be called for batches to prefetch for; they must be the next ones to be given.
        """
        ...


class Plain:
    """`none`: one part of a step after the other."""

    def __init__(self, model: nn.Module) -> None:
        self._model, self._objective = model, objective_of(model)

    def step(self, batch: Batch, upcoming: Upcoming) -> Passed:
        """See `Schedule.step`."""
        return forward_backward(self._model, self._objective, batch)


def forward(model: nn.Module, objective: Objective, batch: Batch) -> Passed:
    """Run the forward pass of a batch."""
    outputs = model(batch.dense, batch.sparse)
    loss = objective.loss(outputs, batch.labels)
    if batch.weight != 1:
        loss = loss * batch.weight
    return Passed(loss=loss, logits=objective.logits(outputs))


def forward_backward(model: nn.Module, objective: Objective, batch: Batch) -> Passed:
    """Run both passes of a batch."""
    passed = forward(model, objective, batch)
    passed.loss.backward()  # type: ignore[no-untyped-call]  # also updates the tables
    return passed


class PipelinedSchedule:
    """A schedule that starts to exchange the ids of batches before their turn.

    The first batch is trained like `Plain`; it shows which collections the model calls with the batch itself,
    and only for these something can be done ahead.

    Args:
        model: a `DistributedModelParallel`.
        batches_ahead: whose ids are sent ahead, at most.
        late_rows: as for `PipelinedCollection`.
    """

    def __init__(self, model: nn.Module, batches_ahead: int, late_rows: LateRows = "corrected") -> None:
        self.model, self.objective = model, objective_of(model)
        self.collections: list[PipelinedCollection] = []
        """Those that can work ahead, known from the first batch."""
        self._is_first = True
        self.prefetched: list[list[Prefetched]] = []
        """Of the batches that were begun, the next one first: what each collection has done."""
        self._batches: list[Batch] = []
        self._batches_ahead, self._late_rows = batches_ahead, late_rows
        self._stream: torch.cuda.Stream | None = None
        """That ids travel on; None on the CPU, where they travel in gloo's threads."""

    def step(self, batch: Batch, upcoming: Upcoming) -> Passed:
        """See `Schedule.step`."""
        if self._is_first:
            self._is_first = False
            return self._first(batch)
        if not (self._batches and self._batches[0] is batch):
            self._forget()
            self._start(batch)
        self._batches.pop(0)
        prefetched = self.prefetched.pop(0)
        with torch.cuda.stream(self._stream):  # which then waits until the batches are on the GPU
            later = upcoming(self._batches_ahead)
        for each in later[len(self._batches) :]:
            self._start(each, self._stream)
        return self.passes(batch, prefetched)

    def passes(self, batch: Batch, prefetched: Sequence[Prefetched]) -> Passed:
        """Run both passes of a batch; `prefetched` are what the collections have done for it."""
        raise NotImplementedError

    def call_with(self, batch: Batch, prefetched: Sequence[Prefetched]) -> Passed:
        """Run the forward pass of a batch; the collections return what they have done ahead."""
        for collection, own in zip(self.collections, prefetched, strict=True):
            collection.give(own)
        passed = self.forward(batch)
        for collection in self.collections:
            collection.give(None)
        return passed

    def advance_ids(self) -> None:
        """Send the ids of which only the numbers were sent, of the batches that were begun."""
        for each in self.prefetched:
            for own in each:
                own.advance(waits=1)

    @property
    def trains_others(self) -> bool:
        """Whether the last forward pass called a collection with something else than the batch."""
        return any(collection.trains_others for collection in self.collections)

    def forward(self, batch: Batch) -> Passed:
        """Run the forward pass of a batch."""
        return forward(self.model, self.objective, batch)

    def _first(self, batch: Batch) -> Passed:
        passed: list[Passed] = []

        def call() -> None:
            passed.append(self.forward(batch))

        modules = called_with_batch(self.model, call, batch.sparse)
        self.collections = [PipelinedCollection(module, self._late_rows) for module in modules]
        if batch.labels.is_cuda:
            self._stream = torch.cuda.Stream(batch.labels.device)  # type: ignore[no-untyped-call]
        passed[0].loss.backward()  # type: ignore[no-untyped-call]
        return passed[0]

    def _start(self, batch: Batch, stream: torch.cuda.Stream | None = None) -> None:
        self._batches.append(batch)
        self.prefetched.append([collection.start(batch.sparse, stream) for collection in self.collections])

    def _forget(self) -> None:
        self._batches.clear()
        self.prefetched.clear()


class PrefetchIds(PipelinedSchedule):
    """`ids`: the next batch's ids travel during the computation; the results are those of `Plain`.

    Args:
        model: a `DistributedModelParallel`.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model, batches_ahead=1)

    def passes(self, batch: Batch, prefetched: Sequence[Prefetched]) -> Passed:
        """See `PipelinedSchedule.passes`."""
        passed = self.call_with(batch, prefetched)
        self.advance_ids()
        passed.loss.backward()  # type: ignore[no-untyped-call]  # also updates the tables
        return passed


class Prefetch(PipelinedSchedule):
    """`prefetch`: the next batch's embeddings, and the ids of the one after, travel during the computation.

    The results are those of `Plain` to the last bit if rows are `corrected`.

    Args:
        model: a `DistributedModelParallel`.
        late_rows: as for `PipelinedCollection`.
    """

    def __init__(self, model: nn.Module, late_rows: LateRows = "corrected") -> None:
        super().__init__(model, batches_ahead=2, late_rows=late_rows)

    def passes(self, batch: Batch, prefetched: Sequence[Prefetched]) -> Passed:
        """See `PipelinedSchedule.passes`."""
        following = self.prefetched[0] if self.prefetched else ()
        for collection, own in zip(self.collections, prefetched, strict=True):
            if own.sent:
                collection.check_rows()
            else:
                collection.look_up(own)
            collection.note_rows()
        for collection, own, before in zip(self.collections, following, prefetched, strict=False):
            collection.look_up(own, before)
        passed = self.call_with(batch, prefetched)
        for collection, own in zip(self.collections, following, strict=False):
            collection.check_rows()
            if collection.trains_others:  # rows that corrections do not know of: to be looked up again
                own.forget_lookups()
        self.advance_ids()
        for own in following:
            for correction in own.corrections.values():
                correction.send_places()
        passed.loss.backward()  # type: ignore[no-untyped-call]  # also updates the tables
        for collection, own in zip(self.collections, following, strict=False):
            collection.note_rows()
            for correction in own.corrections.values():
                correction.send_rows()
        return passed


class Waves(PipelinedSchedule):
    """`waves`: two halves of a batch take turns, so that one is exchanged while the other computes.

    The ids of both are exchanged together, a batch ahead. The rows are looked up once and updated once, and
    dense gradients are summed. So the results are those of `Plain` to rounding, unless the loss compares the
    samples of a batch: then each half is compared with itself.

    Raises:
        ValueError: the model looks up rows by other modules than pooled collections, which cannot be halved.
    """

    def __init__(self, model: nn.Module) -> None:
        refuse_other_exchanges(model)
        super().__init__(model, batches_ahead=1)
        self._num_collections = sum(
            isinstance(each, ShardedEmbeddingBagCollection) for each in model.modules()
        )

    def passes(self, batch: Batch, prefetched: Sequence[Prefetched]) -> Passed:
        """See `PipelinedSchedule.passes`.

        Raises:
            ValueError: the model calls a collection with something else than the batch.
        """
        num_samples = batch.labels.numel()
        halves = parts_of(batch, half_sizes(num_samples))
        given = [half.sparse for half in halves]
        parts = [
            collection.look_up_parts(own, given)
            for collection, own in zip(self.collections, prefetched, strict=True)
        ]
        passed = []
        for half, of_half in zip(halves, zip(*parts, strict=True) if parts else ((), ()), strict=True):
            passed.append(self.call_with(half, of_half))
            self.advance_ids()
            if self.trains_others or len(parts) < self._num_collections:
                raise ValueError(
                    "train.pipeline=waves updates tables once for both halves of a batch, and the model "
                    "calls some more than once, or with other ids than its batch's: choose prefetch"
                )
        shares = [half.labels.numel() / num_samples for half in halves]
        loss = torch.stack([each.loss * share for each, share in zip(passed, shares, strict=True)]).sum()
        loss.backward()  # type: ignore[no-untyped-call]  # the second half first; updates the tables at the end
        logits = [each.logits for each in passed if each.logits is not None]
        return Passed(loss=loss, logits=torch.cat(logits) if logits else None)


def refuse_other_exchanges(model: nn.Module) -> None:
    """Refuse models that exchange something besides pooled embeddings.

    Raises:
        ValueError: says what, and what to change.
    """
    for name, module in model.named_modules():
        if isinstance(module, ShardedModule) and not isinstance(module, ShardedEmbeddingBagCollection):
            raise ValueError(
                f"train.pipeline=waves exchanges pooled embeddings in halves, and "
                f"{name.removeprefix('_dmp_wrapped_module.')} exchanges something else: choose prefetch"
                + (", or sharding.strategy=torchrec" if isinstance(module, ShardedHead) else "")
            )


class Fastest:
    """`auto`: times `Plain`, `PrefetchIds` and `Prefetch` in turns at first, and keeps the fastest.

    All give the same bits, so that the choice, which depends on the machine, shows in nothing but time.
    """

    def __init__(self, model: nn.Module) -> None:
        self._candidates: dict[str, Schedule] = {
            "none": Plain(model),
            "ids": PrefetchIds(model),
            "prefetch": Prefetch(model),
        }
        self._took_s: dict[str, list[float]] = {name: [] for name in self._candidates}
        self._turns = deque(name for _ in range(TURNS) for name in self._candidates)
        self._steps, self._began_s = 0, 0.0
        self.chosen: str | None = None
        """Name of the fastest schedule; None: not known yet."""

    def step(self, batch: Batch, upcoming: Upcoming) -> Passed:
        """See `Schedule.step`."""
        if self.chosen is None:
            self._time()
        return self._candidates[self.chosen or self._turns[0]].step(batch, upcoming)

    def _time(self) -> None:
        """Time whole steps, from the beginning of one to that of the next, but not the first of a turn."""
        now_s = perf_counter()
        if self._steps == UNTIMED_STEPS:
            self._began_s = now_s
        if self._steps == UNTIMED_STEPS + TIMED_STEPS:
            self._took_s[self._turns.popleft()].append((now_s - self._began_s) / TIMED_STEPS)
            self._steps = 0
        self._steps += 1
        if not self._turns:
            self._choose()

    def _choose(self) -> None:
        of_ranks: list[list[float]] = [[]] * dist.get_world_size()
        dist.all_gather_object(of_ranks, [median(took_s) for took_s in self._took_s.values()])
        found = dict(zip(self._took_s, map(mean, zip(*of_ranks, strict=True)), strict=True))
        self.chosen = min(found, key=lambda name: found[name])  # on all ranks alike
        if dist.get_rank() == 0:
            took = ", ".join(f"{each} {1000 * step_s:.1f}" for each, step_s in found.items())
            logger.info("train.pipeline=auto: %s from now on (ms a step: %s)", self.chosen, took)
