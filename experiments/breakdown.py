"""Where a training step's time goes, from PyTorch's profiler.

Every operator's own time counts once, for the first kind below that the operator or one of its callers
belongs to. So a copy inside an exchange is exchange, and one that stands alone is a copy.
"""

from collections.abc import Iterable
from typing import Final, Protocol, Self

RULES: Final[dict[str, tuple[str, ...]]] = {
    "exchange": ("All2All", "AllToAll", "all2all", "Awaitable", "_dist]", "c10d::", "reducer::", "dist_init"),
    "embedding update": ("_LookupBackward", "SplitLookupFunction", "split_embedding_backward"),
    "embedding read": ("_Lookup", "[lookup]", "split_embedding_codegen"),
    "interaction": ("_DotInteraction", "aten::bmm", "BmmBackward", "aten::index", "IndexBackward"),
    "optimizer": ("Optimizer.", "aten::_foreach_", "aten::_fused_"),
    "casts and copies": ("aten::_to_copy", "aten::copy_", "aten::cat", "aten::clone", "ToCopyBackward"),
    "matrix products": ("aten::mm", "aten::addmm", "mkldnn::_linear_pointwise", "mkldnn_linear"),
}
"""Kinds in the order in which they are tried, each with parts of the names of operators and scopes."""
REST: Final = "the rest"
"""ReLU, bias, loss, metrics, and Python between the operators."""
KINDS: Final = (*RULES, REST)


class Event(Protocol):
    """What is read of a `torch.autograd.profiler_util.FunctionEvent`."""

    name: str
    cpu_parent: Self | None
    self_cpu_time_total: float
    """Microseconds."""


def kind_of(event: Event) -> str:
    """The kind that an operator's own time counts for."""
    names, caller = [event.name], event.cpu_parent
    while caller is not None:
        names.append(caller.name)
        caller = caller.cpu_parent
    for kind, parts in RULES.items():
        if any(part in name for part in parts for name in names):
            return kind
    return REST


def breakdown_ms(events: Iterable[Event], steps: int) -> dict[str, float]:
    """Milliseconds a step for each kind.

    Args:
        events: of a profile with a `schedule`, so that the time between operators belongs to the
            profiler's own event around each step.
        steps: steps in the profile.
    """
    total = dict.fromkeys(KINDS, 0.0)
    for event in events:
        total[kind_of(event)] += event.self_cpu_time_total / 1e3 / steps
    return total
