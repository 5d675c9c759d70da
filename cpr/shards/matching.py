"""Optimizer state of tables with an ordinary optimizer, found by shared memory.

TorchRec leaves the update of data-parallel tables to the user. Their parameter may be the table itself,
FBGEMM's flat parameter with many tables, or a tall view over neighbours of one width: in all cases its memory
contains the table's.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

import torch
from torch import Tensor
from torch.optim import Optimizer

COUNTER_NAMES: Final = {"step": "iter"}
"""FBGEMM's names by PyTorch's, so that the count of steps is kept if a table becomes fused or unfused."""


class LookedUp(Mapping[str, Tensor]):
    """A mapping that is computed at each read, as optimizers replace their tensors in a load."""

    def __init__(self, look: Callable[[], Mapping[str, Tensor]]) -> None:
        self._look = look

    def __getitem__(self, name: str) -> Tensor:
        return self._look()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._look())

    def __len__(self) -> int:
        return len(self._look())


def match_state(
    fqn: str, weights: Tensor, optimizers: Sequence[Optimizer]
) -> tuple[Mapping[str, Tensor], Mapping[str, Tensor]]:
    """State by row, and counters, of a table's optimizer; both empty without one.

    State has PyTorch's names, counters have FBGEMM's, as for fused tables.

    Args:
        fqn: name of the table, for messages.
        weights: the table's live rows, contiguous.
        optimizers: to search.

    Raises:
        ValueError: several optimizers update the table, or its state fits neither rows nor scalars.
    """
    found = [
        (optimizer, parameter) for optimizer in optimizers for parameter in _parameters_of(optimizer, weights)
    ]
    if not found:
        return {}, {}
    if len(found) > 1:
        raise ValueError(f"{fqn} is updated by {len(found)} parameters of the optimizers; leave one")
    ((optimizer, parameter),) = found

    def look(scalars: bool) -> dict[str, Tensor]:
        # numbers that are not tensors cannot be restored in place: the optimizer's own state keeps them
        tensors = {
            name: state.detach()
            for name, state in optimizer.state.get(parameter, {}).items()
            if isinstance(state, Tensor)
        }
        if scalars:
            return {
                COUNTER_NAMES.get(name, name): state.view(())
                for name, state in tensors.items()
                if _is_scalar(state, parameter)
            }
        return {
            name: _rows(f"{fqn}: {name}", state, parameter, weights)
            for name, state in tensors.items()
            if not _is_scalar(state, parameter)
        }

    look(scalars=False)  # raises errors now instead of during a save
    return LookedUp(lambda: look(scalars=False)), LookedUp(lambda: look(scalars=True))


def is_updated_by(optimizer: Optimizer, weights: Tensor) -> bool:
    """Whether a parameter of an ordinary optimizer contains the memory of a table's `weights`."""
    return bool(_parameters_of(optimizer, weights))


def _parameters_of(optimizer: Optimizer, weights: Tensor) -> list[Tensor]:
    return [
        parameter
        for group in optimizer.param_groups
        for parameter in group["params"]
        if _contains(parameter, weights)
    ]


def _contains(parameter: Tensor, weights: Tensor) -> bool:
    if parameter.device != weights.device or parameter.dtype != weights.dtype:
        return False
    # same storage and a range within it: views share storage whatever their shapes
    if parameter.untyped_storage().data_ptr() != weights.untyped_storage().data_ptr():
        return False
    first = _place(parameter, weights)
    return first >= 0 and 0 < weights.numel() <= parameter.numel() - first


def _place(parameter: Tensor, weights: Tensor) -> int:
    """Index of the table's first element in `parameter`."""
    return int(weights.storage_offset() - parameter.storage_offset())


def _is_scalar(state: Tensor, parameter: Tensor) -> bool:
    return state.numel() == 1 and state.dim() <= 1 and state.shape != parameter.shape


def _rows(what: str, state: Tensor, parameter: Tensor, weights: Tensor) -> Tensor:
    """The part of a parameter's state for the table's rows."""
    rows, cols = weights.shape
    first = _place(parameter, weights)
    if state.shape == parameter.shape and state.is_contiguous():
        return state.view(-1)[first : first + rows * cols].view(rows, cols)
    is_by_row = parameter.dim() == 2 and parameter.shape[1] == cols and first % cols == 0
    if is_by_row and state.is_contiguous() and state.shape in _row_shapes(parameter.shape[0]):
        return state.view(-1)[first // cols : first // cols + rows]
    raise ValueError(
        f"{what} of shape {list(state.shape)} fits neither the rows nor the elements of its parameter, "
        f"{list(parameter.shape)}; use an optimizer that keeps its state by row or by element"
    )


def _row_shapes(num_rows: int) -> tuple[torch.Size, torch.Size]:
    return torch.Size([num_rows]), torch.Size([num_rows, 1])
