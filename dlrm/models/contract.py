"""What a model is given and what the trainer asks of it; `dlrm/models/README.md` explains it to users.

A model is an `nn.Module` made by `Class(options, inputs)` whose `forward(dense, sparse)` gives outputs of any
form. If they are fp32 logits `[B]`, nothing else is needed. Otherwise the class has methods `loss(outputs,
labels)` and `logits(outputs)`; it may always have `metrics(outputs, labels)`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torchrec.distributed.model_parallel import DistributedModelParallel

from data.dataset import Feature


@dataclass(frozen=True, kw_only=True)
class ModelInputs:
    """The data and the arithmetic that a model is made for."""

    features: Sequence[Feature]
    """Sparse features in the order of the data, with the rows that their tables need."""
    dense: Sequence[str]
    """Names of the dense features, in the order of the columns of `dense` `[B, len(dense)]`; may be empty."""
    dtype: torch.dtype
    """Of the arithmetic: float32, or bfloat16 in mixed precision; parameters are fp32."""
    embedding_dim: int
    """`model.embedding_dim`."""


class Objective:
    """Loss, logits and metrics of a model's outputs: the methods of its class, or those of click models."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def loss(self, outputs: Any, labels: Tensor) -> Tensor:
        """Mean loss, a scalar: the model's own, or the binary cross entropy of logits and labels `[B]`."""
        own = getattr(self._model, "loss", None)
        loss: Tensor = (own or binary_cross_entropy_with_logits)(outputs, labels)
        return loss

    def logits(self, outputs: Any) -> Tensor | None:
        """Fp32 logits `[B]`, or None if a sample of this model has none."""
        own = getattr(self._model, "logits", None)
        logits: Tensor | None = own(outputs) if own else outputs
        if isinstance(logits, Tensor) and logits.is_floating_point():  # all else is for `check` to refuse
            return logits.float()
        return logits

    def metrics(self, outputs: Any, labels: Tensor) -> Mapping[str, Tensor]:
        """The model's own metrics, a value `[B]` per sample; a sample whose value is NaN has none."""
        own = getattr(self._model, "metrics", None)
        metrics: Mapping[str, Tensor] = own(outputs, labels) if own else {}
        return metrics


def objective_of(model: nn.Module) -> Objective:
    """The objective of a model, also after `DistributedModelParallel` has wrapped it."""
    return Objective(model.module if isinstance(model, DistributedModelParallel) else model)
