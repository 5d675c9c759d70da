"""`OptimizerState`: an optimizer as a registered state of a run."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torchrec.optim.keyed import KeyedOptimizer

from cpr.shards.optimizers import KeptState, create_state, forget_state
from cpr.shards.shard import TableShard


class OptimizerState:
    """An optimizer as a registered state; creates or drops per-parameter state to match what is loaded.

    TorchRec's keyed optimizers load in place, so they must have state for exactly the parameters for which
    state was saved.

    Args:
        optimizer: of PyTorch or TorchRec, without fused parts.
        shards: table shards whose optimizer state is saved with their rows: of an optimizer that updates
            nothing else, only the options of its parameter groups (such as learning rates) are saved.
    """

    def __init__(self, optimizer: Optimizer, shards: Sequence[TableShard] = ()) -> None:
        self._optimizer = optimizer
        memory = {shard.weights.untyped_storage().data_ptr() for shard in shards}
        parameters = [each for group in optimizer.param_groups for each in group["params"]]
        self.has_only_tables = bool(shards) and all(
            isinstance(each, Tensor) and each.untyped_storage().data_ptr() in memory for each in parameters
        )
        """Whether the optimizer updates only tables."""

    def state_dict(self) -> Any:
        """The optimizer's state dict."""
        state = self._optimizer.state_dict()
        return {**state, "state": {}} if self.has_only_tables else state

    def load_state_dict(self, state: Any) -> None:
        """Restore the optimizer."""
        self.load_except(state, ())

    def load_except(self, state: Any, fresh: Sequence[Tensor]) -> None:
        """Restore the optimizer, except for the state of parameters in the memory of `fresh` tensors."""
        if self.has_only_tables:
            saved_groups = state.get("param_groups", ())
            for group, saved in zip(self._optimizer.param_groups, saved_groups, strict=False):
                group.update({name: value for name, value in saved.items() if name != "params"})
            return
        memory = {each.untyped_storage().data_ptr() for each in fresh}
        kept = KeptState(self._optimizer, memory)
        loaded = {key: each for key, each in state["state"].items() if key not in kept.keys}
        state = {**state, "state": loaded}
        wanted = None
        if isinstance(self._optimizer, KeyedOptimizer):
            parameters = self._optimizer.params
            wanted = [parameters[key] for key in state["state"] if key in parameters]
            forget_state(self._optimizer, wanted)
        if state["state"]:
            create_state(self._optimizer, wanted)
        self._optimizer.load_state_dict(state)
        kept.put_back()
