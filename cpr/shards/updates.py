"""Notification before training changes table rows, for copies of rows in the background.

Fused optimizers update rows in the backward pass, in each FBGEMM module when the gradient of its output is
computed. So every forward pass adds a hook to that gradient, which PyTorch runs before the update. Some
optimizers, and owners of additional columns (`cpr.shards.row_columns`), change rows in the forward pass.
Other tables change when their ordinary optimizer steps.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final

from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_training import DenseTableBatchedEmbeddingBagsCodegen
from torch import Tensor, nn
from torch.optim import Optimizer

from cpr.shards.groups import Hooks, table_groups
from cpr.shards.matching import is_updated_by
from cpr.shards.optimizers import unwrapped
from cpr.shards.row_columns import row_columns

UPDATED_IN_FORWARD: Final = (EmbOptimType.ENSEMBLE_ROWWISE_ADAGRAD, EmbOptimType.EMAINPLACE_ROWWISE_ADAGRAD)
"""FBGEMM's optimizers that average rows over time, in the forward pass of training."""


def before_updates(
    model: nn.Module, optimizers: Sequence[Optimizer], callback: Callable[[], object]
) -> Hooks:
    """Call `callback` before training changes any table row of this rank.

    The callback runs in each step, at least once: before the rows of each FBGEMM module change, and before
    each step of an ordinary optimizer that updates tables. It runs in the thread that is about to change
    rows, which waits for it; exceptions end the step before the change. Forward passes without a backward
    pass, as in evaluation, do not call it, nor do writes to tables without an optimizer.

    Args:
        model: a `DistributedModelParallel`, or any module with sharded collections in it. The `forward` of
            its FBGEMM modules may be replaced, before or later.
        optimizers: ordinary optimizers that update tables; others are ignored.
        callback: must be fast, as it runs in every step.

    Returns:
        The hooks, to be removed; then running backward passes do not call it either.

    Raises:
        ValueError: the model holds tables in an unsupported way.
    """
    hooks, callbacks = Hooks(), [callback]
    hooks.callback(callbacks.clear)

    def call(*_: object) -> None:
        for each in callbacks:
            each()

    def after_forward(tbe: nn.Module, inputs: Any, output: Tensor) -> None:
        if output.requires_grad:
            # a new tensor each pass, so the hook needs no removal
            output.register_hook(call)  # type: ignore[no-untyped-call]

    def before_forward(tbe: nn.Module, inputs: Any) -> None:
        if tbe.training:
            call()

    unfused: list[Tensor] = []
    for group in table_groups(model):
        tbe = group.emb_module
        if isinstance(tbe, DenseTableBatchedEmbeddingBagsCodegen):
            unfused += [table.weights for table in group.tables]
            continue
        hooks.enter_context(tbe.register_forward_hook(after_forward))
        if tbe.optimizer in UPDATED_IN_FORWARD or row_columns(tbe):
            # runs before the hooks of owners of additional columns
            hooks.enter_context(tbe.register_forward_pre_hook(before_forward, prepend=True))
    for optimizer in optimizers:
        if any(is_updated_by(optimizer, weights) for weights in unfused):
            for inner in unwrapped(optimizer):
                hooks.enter_context(inner.register_step_pre_hook(call))
    return hooks
