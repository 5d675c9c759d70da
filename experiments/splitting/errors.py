"""Measures the error of a step that exchanges partial results in bf16 or fp16, for `experiments.splitting`.

The same split model makes the same step on the same batch from the same initial values, with partial results
and their gradients in fp32 and rounded. The errors of the logits and of the gradients of all replicated dense
parameters (averaged over ranks in fp32) are the norm of the difference over the norm in fp32.
"""

import gc
from dataclasses import dataclass
from itertools import cycle
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from dlrm.launch.device import Ranks
from dlrm.sharding.parameters import dense_parameters
from experiments.harness.training import NUM_SCALARS, Training
from experiments.splitting.workload import Workload

WIRE_DTYPES: Final = ("bf16", "fp16")
"""Values of `sharding.wire_dtype` other than fp32."""


@dataclass(frozen=True, eq=False)
class Step:
    """Results of a step on this rank."""

    logits: Tensor
    """Logits of this rank's samples."""
    gradients: Tensor
    """Gradients of all dense parameters, concatenated; the same on all ranks."""


def wire_errors(model: str, workload: Workload, ranks: Ranks) -> dict[str, Any]:
    """Relative errors of logits and of gradients, by wire dtype; the same on all ranks.

    Args:
        model: one of `experiments.splitting.workload.MODELS`.
        workload: batches and tables.
        ranks: this process and the others.
    """
    exact = _step(model, "fp32", workload, ranks)
    errors = {}
    for dtype in WIRE_DTYPES:
        rounded = _step(model, dtype, workload, ranks)
        errors[dtype] = {
            "logits": _relative(rounded.logits, exact.logits),
            "gradients": _relative(rounded.gradients, exact.gradients),
        }
    return errors


def _step(model: str, wire_dtype: str, workload: Workload, ranks: Ranks) -> Step:
    config = workload.config(model, "des", f"sharding.wire_dtype={wire_dtype}")
    training = Training(workload.inputs(config, ranks), cycle(workload.batches(ranks)))
    batch = next(training.batches)
    training.optimizers.begin_step(0)
    logits = training.model(batch.dense, batch.sparse)
    loss = binary_cross_entropy_with_logits(logits, batch.labels)
    loss.backward()  # type: ignore[no-untyped-call]
    training.synchronizer.average(torch.zeros(NUM_SCALARS))
    gradients = [each.grad for each in dense_parameters(training.model) if each.grad is not None]
    step = Step(logits.detach(), torch.cat([each.flatten() for each in gradients]))
    del training
    gc.collect()  # the model holds reference cycles
    return step


def _relative(found: Tensor, exact: Tensor) -> float:
    """Norm of the difference over the norm of the exact values of all ranks."""
    squares = torch.stack([(found - exact).double().square().sum(), exact.double().square().sum()])
    dist.all_reduce(squares)
    difference, whole = squares.sqrt().tolist()
    return float(difference / whole)
