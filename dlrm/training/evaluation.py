"""Evaluation on the test days: every sample once, over all ranks."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from data.batch import Batch
from data.loader import DataLoader
from dlrm.metrics import ClickMetrics, MetricValues, SampleMeans
from dlrm.models.contract import objective_of


@torch.no_grad()
def evaluate(
    model: nn.Module,
    loader: DataLoader,
    device: torch.device,
    before_batch: Callable[[], None] | None = None,
    observe: Callable[[Batch, Tensor | None], None] | None = None,
) -> MetricValues:
    """Compute metrics of `model` on all batches of `loader`; a collective, equal on all ranks.

    Padded samples are left out, and have the label NaN in metrics of the model's own, which may look at
    several samples of a batch. `before_batch` is called before each batch, equally often on all ranks, and
    may raise to stop; `observe` gets each batch with its fp32 logits `[B]`, or None if the model gives none.
    """
    was_training = model.training
    model.eval()
    objective, clicks, own = objective_of(model), ClickMetrics(device), SampleMeans()
    for each in loader:
        if before_batch is not None:
            before_batch()
        batch, real = each.to(device, non_blocking=True), slice(each.num_valid)
        outputs = model(batch.dense, batch.sparse)
        logits = objective.logits(outputs)
        if logits is not None:
            clicks.update(logits[real], batch.labels[real])
        if observe is not None:
            observe(batch, logits)
        labels = batch.labels.clone()
        labels[each.num_valid :] = torch.nan
        metrics = objective.metrics(outputs, labels)
        own.update({name: values[real] for name, values in metrics.items()}, each.num_valid)
    model.train(was_training)
    values = clicks.compute()
    means, num_samples = own.compute()
    if num_samples > values.num_samples:
        values = replace(values, num_samples=num_samples, note="the model gives no logits")
    return replace(values, means=means)
