"""Being told that table rows are about to change: what copies rows beside training has to know in time.

Fused optimizers update rows in the backward pass, each FBGEMM module its own when the gradient of its output
is there. So every forward pass leaves a hook at that gradient, which PyTorch runs before the update. Some
optimizers, and those who add columns to rows (`cpr.shards.columns`), change rows in the forward pass already.
Other tables change when their ordinary optimizer steps.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final, Self

from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_training import DenseTableBatchedEmbeddingBagsCodegen
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from cpr.shards.columns import row_columns
from cpr.shards.groups import table_groups
from cpr.shards.matching import is_updated_by
from cpr.shards.optimizers import unwrapped

UPDATED_IN_FORWARD: Final = (EmbOptimType.ENSEMBLE_ROWWISE_ADAGRAD, EmbOptimType.EMAINPLACE_ROWWISE_ADAGRAD)
"""FBGEMM's optimizers that average rows over time, which they do in the forward pass of training."""


class UpdateHooks:
    """What `before_updates` has hooked into a model.

    Args:
        callback: see there.
    """

    def __init__(self, callback: Callable[[], object]) -> None:
        self._callback: Callable[[], object] | None = callback
        self._handles: list[RemovableHandle] = []

    def remove(self) -> None:
        """Call no more, not even in the backward pass of what went forward before."""
        self._callback = None
        while self._handles:
            self._handles.pop().remove()

    def __enter__(self) -> Self:
        """The hooks, removed at the end of the block."""
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def hook_module(self, tbe: Any) -> None:
        """Hook into an FBGEMM module with a fused optimizer."""
        self._handles.append(tbe.register_forward_hook(self._after_forward))
        if tbe.optimizer in UPDATED_IN_FORWARD or row_columns(tbe):
            # first, before the hooks of those who change columns of rows
            self._handles.append(tbe.register_forward_pre_hook(self._before_forward, prepend=True))

    def hook_optimizer(self, optimizer: Optimizer) -> None:
        """Hook into an ordinary optimizer."""
        for inner in unwrapped(optimizer):
            self._handles.append(inner.register_step_pre_hook(self._call))

    def _call(self, *_: object) -> None:
        if self._callback is not None:
            self._callback()

    def _after_forward(self, tbe: nn.Module, inputs: Any, output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(self._call)  # type: ignore[no-untyped-call]

    def _before_forward(self, tbe: nn.Module, inputs: Any) -> None:
        if tbe.training:
            self._call()


def before_updates(
    model: nn.Module, optimizers: Sequence[Optimizer], callback: Callable[[], object]
) -> UpdateHooks:
    """Have `callback` called before training changes any table row of this rank.

    It is called in each step, once or more often: before the rows of each FBGEMM module change, and before
    each ordinary optimizer that updates tables steps. It runs in the thread that is about to change them,
    which waits for it; what it raises ends the step before the change. A pass without a backward pass, as in
    evaluation, does not call it. Whoever writes to tables without an optimizer tells nobody.

    Args:
        model: a `DistributedModelParallel`, or any module with sharded collections in it. The `forward` of
            its FBGEMM modules may be replaced, before or later.
        optimizers: ordinary optimizers that update tables; others among them do no harm.
        callback: quick, for it runs in every step.

    Raises:
        ValueError: the model holds tables in a way that is not supported; the message says which.
    """
    hooks = UpdateHooks(callback)
    unfused: list[Tensor] = []
    for group in table_groups(model):
        if isinstance(group.emb_module, DenseTableBatchedEmbeddingBagsCodegen):
            unfused += [table.weights for table in group.tables]
        else:
            hooks.hook_module(group.emb_module)
    for optimizer in optimizers:
        if any(is_updated_by(optimizer, weights) for weights in unfused):
            hooks.hook_optimizer(optimizer)
    return hooks
