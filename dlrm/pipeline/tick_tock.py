"""Wavelet's schedule: two replicas of the dense parameters, one half batch after the other."""

from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torchrec.distributed.model_parallel import get_unwrapped_module

from data.batch import Batch
from dlrm.pipeline.halves import half_sizes, parts_of
from dlrm.pipeline.schedules import Passed, Prefetch, Upcoming, refuse_other_exchanges
from dlrm.sharding.parameters import dense_parameters

SECOND: Final = "second_replica"
"""Module of the second replica in a model."""


def add_second_replica(model: nn.Module) -> None:
    """Add a second replica of an unsharded model's dense parameters, with the same values."""
    copies = [nn.Parameter(each.detach().clone()) for each in dense_parameters(model)]
    model.add_module(SECOND, nn.ParameterList(copies))


class Replicas(NamedTuple):
    """Both replicas of a model's dense parameters, in the same order."""

    first: dict[str, nn.Parameter]
    """By their names in the model without `DistributedModelParallel`."""
    second: list[nn.Parameter]

    @classmethod
    def of(cls, model: nn.Module) -> "Replicas":
        """Those of a model to which `add_second_replica` added one."""
        inner = get_unwrapped_module(model)
        second = list(inner.get_submodule(SECOND).parameters())
        others = {id(each) for each in dense_parameters(model)} - {id(each) for each in second}
        first = {name: each for name, each in inner.named_parameters() if id(each) in others}
        return cls(first, second)


class TickTock(Prefetch):
    """`waves` with `tick_tock`: each half batch is a wave, with a replica of the dense parameters of its own.

    The next wave's embeddings are looked up and sent while a wave computes. The tables are updated by each
    wave with the gradient of its part of the batch's mean; the next wave reads them without its update.
    `TickTockSync` exchanges the dense gradients.

    Args:
        model: a `DistributedModelParallel` of a model with a second replica.

    Raises:
        ValueError: the model exchanges something that cannot be halved.
    """

    def __init__(self, model: nn.Module) -> None:
        refuse_other_exchanges(model)
        super().__init__(model, late_rows="stale")
        replicas = Replicas.of(model)
        self._inner = get_unwrapped_module(model)
        self._second: dict[str, Tensor] = dict(zip(replicas.first, replicas.second, strict=True))
        self._is_second, self._share = False, 1.0
        self._cut: deque[tuple[Batch, list[Batch]]] = deque()
        """Batches that were cut, and their waves."""

    def step(self, batch: Batch, upcoming: Upcoming) -> Passed:
        """See `Schedule.step`."""
        waves, passed = self._waves_of(batch), []
        num_samples = batch.labels.numel()
        following = [wave for each in upcoming(1) for wave in self._waves_of(each)]
        for number, wave in enumerate(waves):
            self._is_second = number == 1
            self._share = wave.labels.numel() / num_samples
            later = [*waves[number + 1 :], *following]
            passed.append(super().step(wave, partial(_first, later)))
        while self._cut.popleft()[0] is not batch:
            pass  # of batches that were announced and then not trained
        logits = [each.logits for each in passed if each.logits is not None]
        loss = torch.stack([each.loss.detach() for each in passed]).sum()
        return Passed(loss=loss, logits=torch.cat(logits) if logits else None)

    def forward(self, batch: Batch) -> Passed:
        """Run the forward pass of a wave with its replica; the loss is its part of the batch's mean."""
        parameters = self._second if self._is_second else {}
        outputs = functional_call(self._inner, parameters, (batch.dense, batch.sparse))
        loss = self.objective.loss(outputs, batch.labels)
        return Passed(loss=loss * (self._share * batch.weight), logits=self.objective.logits(outputs))

    def _waves_of(self, batch: Batch) -> list[Batch]:
        """The waves of a batch; the same objects each time, as batches are told apart by identity."""
        for each, waves in self._cut:
            if each is batch:
                return waves
        waves = parts_of(batch, half_sizes(batch.labels.numel()))
        self._cut.append((batch, waves))
        return waves


def _first(waves: Sequence[Batch], count: int) -> Sequence[Batch]:
    return waves[:count]
