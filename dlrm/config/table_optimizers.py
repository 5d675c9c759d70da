"""Registry of the optimizers that update embedding tables; adding one means adding an entry here.

An entry holds what the trainer knows of an optimizer: FBGEMM's fused operator, the PyTorch optimizer with the
same update, the state of a row, and the updates that replace FBGEMM's on the CPU. Classes are named by their
import path because configurations are checked without torch, whose import takes seconds.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from torch import Tensor

RowUpdate = Callable[[Any, "Tensor", "Tensor"], None]
"""Updates rows of an FBGEMM host module, given row numbers int64 `[n]` and gradients fp32 `[n, columns]`."""
TableUpdate = Callable[[Any, "Tensor", "Tensor"], None]
"""Updates all rows of an FBGEMM host module, given its rows and their gradients, both `[R, columns]`."""
StateShape = Callable[[int, int], tuple[int, ...]]
"""From a table's rows and columns to the shape of one of its state tensors."""


@dataclass(frozen=True, kw_only=True)
class TableOptimizer:
    """What the trainer knows of one optimizer of embedding tables."""

    fbgemm: str
    """Name of FBGEMM's fused optimizer, a member of `EmbOptimType`."""
    torch_class: str
    """Import path of the PyTorch optimizer with the same update, for replicated tables."""
    state: Mapping[str, StateShape] = field(default_factory=dict)
    """Shapes of a table's state tensors, by name."""
    options: Mapping[str, float] = field(default_factory=dict)
    """Options besides the learning rate, with PyTorch's defaults; named like fields of `TablesConfig`."""
    is_for_rows: bool = True
    """Whether `tables.optimizer` may name this optimizer; others only update the weights of operators."""
    suits_dynamic: bool = False
    """Whether a new row's state is 0 and unread rows stay as they are, as dynamic tables need."""
    operator_devices: tuple[str, ...] = ()
    """Devices on which the weights of split operators can have this optimizer."""
    update_rows: RowUpdate | None = None
    """Update by the host lookup; None: FBGEMM's own lookup and update are used on the CPU."""
    update_table: TableUpdate | None = None
    """Update of an operator's weights on the CPU."""

    @property
    def fbgemm_type(self) -> Any:
        """FBGEMM's fused optimizer, an `EmbOptimType`."""
        return resolve_name("fbgemm_gpu.split_embedding_configs:EmbOptimType")[self.fbgemm]

    def make(self, *arguments: Any, **options: Any) -> Any:
        """Make the PyTorch optimizer."""
        return resolve_name(self.torch_class)(*arguments, **options)


def _view(flat: "Tensor", width: int) -> "Tensor":
    return flat.detach().view(-1, width)


def _add_rows(table: "Tensor", rows: "Tensor", values: "Tensor") -> None:
    # scatter_add_ with an expanded index is the one row update of PyTorch that runs on all threads
    table.scatter_add_(0, rows.unsqueeze(1).expand_as(values), values)


def _sgd_rows(tbe: Any, rows: "Tensor", grads: "Tensor") -> None:
    _add_rows(_view(tbe.weights_host, grads.shape[1]), rows, grads.mul_(-tbe.get_learning_rate()))


def _adagrad_rows(tbe: Any, rows: "Tensor", grads: "Tensor") -> None:
    width = grads.shape[1]
    state = _view(tbe.momentum1_host, width)
    _add_rows(state, rows, grads.square())
    root = state.index_select(0, rows).sqrt_().add_(tbe.optimizer_args.eps)
    _add_rows(_view(tbe.weights_host, width), rows, grads.mul_(-tbe.get_learning_rate()).div_(root))


def _rowwise_adagrad_rows(tbe: Any, rows: "Tensor", grads: "Tensor") -> None:
    state = tbe.momentum1_host.detach()
    accumulated = state.index_select(0, rows).add_(grads.square().mean(1))
    state.index_copy_(0, rows, accumulated)
    scale = accumulated.sqrt_().add_(tbe.optimizer_args.eps).reciprocal_().mul_(-tbe.get_learning_rate())
    _add_rows(_view(tbe.weights_host, grads.shape[1]), rows, grads.mul_(scale.unsqueeze(1)))


def _sgd_table(tbe: Any, rows: "Tensor", grads: "Tensor") -> None:
    rows.add_(grads, alpha=-tbe.get_learning_rate())


def _adagrad_table(tbe: Any, rows: "Tensor", grads: "Tensor") -> None:
    state = _view(tbe.momentum1_host, rows.shape[1])
    state.addcmul_(grads, grads)
    rows.add_(grads / state.sqrt().add_(tbe.optimizer_args.eps), alpha=-tbe.get_learning_rate())


def _per_value(rows: int, columns: int) -> tuple[int, ...]:
    return rows, columns


def _per_row(rows: int, columns: int) -> tuple[int, ...]:
    return (rows,)


TABLE_OPTIMIZERS: Final[Mapping[str, TableOptimizer]] = {
    "sgd": TableOptimizer(
        fbgemm="EXACT_SGD",
        torch_class="torch.optim:SGD",
        suits_dynamic=True,
        operator_devices=("cpu", "cuda"),
        update_rows=_sgd_rows,
        update_table=_sgd_table,
    ),
    "adagrad": TableOptimizer(
        fbgemm="EXACT_ADAGRAD",
        torch_class="torch.optim:Adagrad",
        state={"sum": _per_value},
        options={"eps": 1e-10},
        suits_dynamic=True,
        operator_devices=("cpu", "cuda"),
        update_rows=_adagrad_rows,
        update_table=_adagrad_table,
    ),
    "rowwise_adagrad": TableOptimizer(
        fbgemm="EXACT_ROWWISE_ADAGRAD",
        torch_class="torchrec.optim.rowwise_adagrad:RowWiseAdagrad",
        state={"sum": _per_row},
        options={"eps": 1e-10},
        suits_dynamic=True,
        update_rows=_rowwise_adagrad_rows,
    ),
    # FBGEMM has no Adam on the CPU, so that tables, which live on either device, cannot have it
    "adam": TableOptimizer(
        fbgemm="ADAM",
        torch_class="torch.optim:Adam",
        state={"exp_avg": _per_value, "exp_avg_sq": _per_value},
        options={"eps": 1e-8},
        is_for_rows=False,
        operator_devices=("cuda",),
    ),
}
ROW_OPTIMIZERS: Final = tuple(name for name, each in TABLE_OPTIMIZERS.items() if each.is_for_rows)
"""Values of `tables.optimizer`."""
