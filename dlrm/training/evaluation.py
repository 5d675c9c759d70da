"""Evaluation on the test days: every sample once, over all ranks."""

from collections.abc import Callable

import torch
from torch import nn

from data.loader import DataLoader
from dlrm.metrics import ClickMetrics, MetricValues


@torch.no_grad()
def evaluate(
    model: nn.Module,
    loader: DataLoader,
    device: torch.device,
    before_batch: Callable[[], None] | None = None,
) -> MetricValues:
    """Compute metrics of `model` on all batches of `loader`; a collective, equal on all ranks.

    The model gives fp32 logits `[B]`. Padded samples are left out. `before_batch` is called before each
    batch, equally often on all ranks, and may raise to stop.
    """
    was_training = model.training
    model.eval()
    metrics = ClickMetrics(device)
    for each in loader:
        if before_batch is not None:
            before_batch()
        batch = each.to(device, non_blocking=True)
        logits = model(batch.dense, batch.sparse)
        metrics.update(logits[: batch.num_valid], batch.labels[: batch.num_valid])
    model.train(was_training)
    return metrics.compute()
