"""A small copy of the run's model on which `sharding.strategy=auto` times the strategies.

The copy has the run's layers, batch size, optimizers and arithmetic, so that its steps take as long as the
run's. Its tables are smaller, its ids are random, and all of it is freed after the choice.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import cycle
from typing import Final

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from data.batch import Batch
from data.dataset import Feature
from dlrm.dense_sync import AllReduceSync
from dlrm.models.contract import objective_of
from dlrm.optim.build import Optimizers
from dlrm.sharding.parameters import dense_parameters
from dlrm.sharding.splitting.planning.strategies import Strategy
from dlrm.sharding.splitting.planning.torchrec_plan import ModelLayout
from dlrm.training.data import Inputs
from dlrm.training.model import apply_plan, features_of, unsharded

MOST_ROWS: Final = 50_000
"""Rows of a table at most: more than caches hold, and quickly made."""
NUM_BATCHES: Final = 4
"""Number of different batches, used in turn."""
SKEW: Final = 6.0
"""Exponent of the uniform number that gives an id: the first 1 % of rows then get about half of all
lookups."""


class ProxyModel:
    """Makes training steps like the run's under given strategies."""

    def __init__(self, inputs: Inputs) -> None:
        self._inputs = inputs

    def __call__(self, strategies: Mapping[str, Strategy]) -> Callable[[], None]:
        """Build a training step under `strategies` (by path of the head).

        A collective, like each call of the step.
        """
        inputs, config = self._inputs, self._inputs.config
        features = [replace(each, rows=min(each.rows, MOST_ROWS)) for each in features_of(inputs)]
        before = unsharded(inputs, features)
        layout = ModelLayout.of(before.plan, before.sharder, config, inputs.device, inputs.ids)
        model = apply_plan(before, layout.planned(before.model, strategies), inputs, initialize=False)
        optimizers = Optimizers(model, config.dense, config.tables, config.schedule)
        replicas, objective = AllReduceSync(dense_parameters(model), 1), objective_of(model)
        batches = cycle([self._batch(features) for _ in range(NUM_BATCHES)])

        def step() -> None:
            batch = next(batches)
            optimizers.begin_step(0)
            loss = objective.loss(model(batch.dense, batch.sparse), batch.labels)
            loss.backward()  # type: ignore[no-untyped-call]
            replicas.average(loss.detach().view(1))
            optimizers.step()
            if inputs.device.type == "cuda":
                torch.cuda.synchronize(inputs.device)

        return step

    def _batch(self, features: list[Feature]) -> Batch:
        size = self._inputs.loader.config.batch_size
        drawn = [self._ids(feature, size) for feature in features]
        values = torch.cat([ids for ids, _ in drawn])
        sparse = KeyedJaggedTensor(
            keys=[feature.name for feature in features],
            values=values,
            lengths=torch.cat([lengths for _, lengths in drawn]),
            weights=torch.ones(len(values)) if any(feature.weights for feature in features) else None,
        )
        dense = torch.rand(size, len(self._inputs.manifest.dense))
        labels = torch.randint(2, (size,)).float()
        return Batch(dense, sparse, labels, num_valid=size).to(self._inputs.device)

    def _ids(self, feature: Feature, size: int) -> tuple[Tensor, Tensor]:
        """Random ids of a feature and the number of ids in each of `size` samples."""
        mean = self._inputs.ids.get(feature.name, 1.0)
        lengths = (torch.rand(size) + mean).long()  # a random rounding of the mean
        uniform = torch.rand(int(lengths.sum()), dtype=torch.float64)
        return (uniform**SKEW * feature.rows).long(), lengths
