"""Learns from the first forward pass which module needs which parameters, and in what order.

A module that is called needs its own parameters. Parameters of a module that is not called, because a module
above reads them (as for layers fused into one operator), are needed by the nearest called module above.
"""

from collections.abc import Callable, Sequence

import torch
from torch import nn


class ParamOrder:
    """Calls a function before each module's forward pass, with the parameters that the module needs.

    Args:
        model: whose forward passes are watched.
        parameters: of the model, identified by their index.
        before: called with the indices, once these are learned.
    """

    def __init__(
        self,
        model: nn.Module,
        parameters: Sequence[nn.Parameter],
        before: Callable[[Sequence[int]], None],
    ) -> None:
        self._before = before
        # duplicates included: a module that is used in two places is needed by both
        self._modules = dict(model.named_modules(remove_duplicate=False))
        numbers = {id(parameter): index for index, parameter in enumerate(parameters)}
        self._owners = [
            (numbers[id(parameter)], path)
            for path, module in self._modules.items()
            for parameter in module.parameters(recurse=False)
            if id(parameter) in numbers
        ]
        self._called: dict[nn.Module, int] = {}
        self._needs: dict[nn.Module, list[int]] = {}
        self.turns = [0] * len(parameters)
        """When a forward pass needs each parameter: smaller is sooner."""
        self.unseen: Sequence[int] = ()
        """Indices of parameters that are not, or not always, below a called module."""
        above = {each for _, path in self._owners for each in _upwards(path)}
        self._hooks = {
            module: module.register_forward_pre_hook(self._note)
            for module in {self._modules[path] for path in above}
        }

    def learn(self) -> None:
        """Learn the order from the training passes so far; does nothing the second time."""
        if self._needs or self.unseen:
            return
        unseen, turns = set[int](), dict[int, int]()
        for index, path in self._owners:
            caller = next((m for m in map(self._modules.get, _upwards(path)) if m in self._called), None)
            if caller is None:
                unseen.add(index)
                continue
            self._needs.setdefault(caller, []).append(index)
            turns[index] = min(self._called[caller], turns.get(index, len(self._called)))
        self.unseen = sorted(unseen)
        self.turns = [turns.get(index, 0) for index in range(len(self.turns))]
        for module in set(self._hooks) - set(self._needs):
            self._hooks.pop(module).remove()

    def close(self) -> None:
        """Remove all hooks from the model."""
        for hook in self._hooks.values():
            hook.remove()
        self._hooks.clear()

    def _note(self, module: nn.Module, inputs: object) -> None:
        if module in self._needs:
            self._before(self._needs[module])
        elif not self._needs and torch.is_grad_enabled():  # an evaluation may call other modules
            self._called.setdefault(module, len(self._called))


def _upwards(path: str) -> list[str]:
    """List the paths of a module and of all modules above it; the model's own is empty."""
    parts = path.split(".") if path else []
    return [".".join(parts[:length]) for length in range(len(parts), -1, -1)]
