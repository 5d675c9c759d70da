"""Optimizers as registered states."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torchrec.optim.keyed import KeyedOptimizer

from cpr.shards.optimizers import create_state, forget_state
from cpr.shards.shard import TableShard


class OptimizerState:
    """An optimizer as a registered state, for whose load it makes the state of its first step, or forgets it.

    TorchRec's keyed optimizers load in place, so they must have state for the parameters for which some was
    saved, and for no others.

    Args:
        optimizer: of PyTorch or TorchRec, without fused parts.
        shards: those whose state is saved with their rows: of an optimizer that updates nothing else, only
            learning rates and the like are kept. Which tables it updates depends on the sharding plan.
    """

    def __init__(self, optimizer: Optimizer, shards: Sequence[TableShard] = ()) -> None:
        self._optimizer = optimizer
        memory = {shard.weights.untyped_storage().data_ptr() for shard in shards}
        parameters = [each for group in optimizer.param_groups for each in group["params"]]
        self.has_only_tables = bool(shards) and all(
            isinstance(each, Tensor) and each.untyped_storage().data_ptr() in memory for each in parameters
        )
        """Whether it updates nothing else."""

    def state_dict(self) -> Any:
        """The optimizer's."""
        state = self._optimizer.state_dict()
        return {**state, "state": {}} if self.has_only_tables else state

    def load_state_dict(self, state: Any) -> None:
        """Go on from a state."""
        if self.has_only_tables:
            saved_groups = state.get("param_groups", ())
            for group, saved in zip(self._optimizer.param_groups, saved_groups, strict=False):
                group.update({name: value for name, value in saved.items() if name != "params"})
            return
        wanted = None
        if isinstance(self._optimizer, KeyedOptimizer):
            parameters = self._optimizer.params
            wanted = [parameters[key] for key in state["state"] if key in parameters]
            forget_state(self._optimizer, wanted)
        if state["state"]:
            create_state(self._optimizer, wanted)
        self._optimizer.load_state_dict(state)
