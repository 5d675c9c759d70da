"""Splits the time of a training step into kinds of work, from a profile by PyTorch.

The own time of every operator counts once, for the first kind below that the operator or one of its callers
belongs to. A copy inside an exchange therefore counts as exchange, and one outside as a copy.
"""

from collections.abc import Iterable, Iterator
from statistics import median
from typing import Final

from torch.autograd.profiler_util import FunctionEvent

from dlrm.models import dlrm
from dlrm.sharding import host_lookup

_PRODUCTS: Final = dlrm._Products.__name__  # by which the profiler names them, forward and backward
_LOOKUP: Final = host_lookup._Lookup.__name__
RULES: Final[dict[str, tuple[str, ...]]] = {
    "exchange": ("All2All", "AllToAll", "all2all", "Awaitable", "_dist]", "c10d::", "reducer::", "dist_init"),
    "embedding update": (f"{_LOOKUP}Backward", "SplitLookupFunction", "split_embedding_backward"),
    "embedding read": (_LOOKUP, "[lookup]", "split_embedding_codegen"),
    "interaction": (_PRODUCTS, "aten::bmm", "BmmBackward", "aten::index", "IndexBackward"),
    "optimizer": ("Optimizer.", "aten::_foreach_", "aten::_fused_"),
    "casts and copies": ("aten::_to_copy", "aten::copy_", "aten::cat", "aten::clone", "ToCopyBackward"),
    "matrix products": ("aten::mm", "aten::addmm", "mkldnn::_linear_pointwise", "mkldnn_linear"),
}
"""Parts of the names of operators and scopes by kind; the first kind that matches counts."""
PRODUCTS: Final = ("matrix products", "interaction")
"""Kinds that are products of matrices."""
REST: Final = "the rest"
"""ReLU, bias, loss, metrics, and Python between the operators."""
KINDS: Final = (*RULES, REST)
STEP: Final = "ProfilerStep"


def kind_of(names: Iterable[str]) -> str:
    """Return the kind of an operator from its name and the names of its callers."""
    names = list(names)
    for kind, parts in RULES.items():
        if any(part in name for part in parts for name in names):
            return kind
    return REST


def breakdown_ms(events: Iterable[FunctionEvent]) -> dict[str, float]:
    """Milliseconds per step by kind, each the median over the steps of a profile.

    Args:
        events: of a profile with a `schedule`, which puts an event around each step. The time between
            operators belongs to that event. Events of other threads are left out.
    """
    steps: dict[int, dict[str, float]] = {}
    for event in events:
        lineage = list(_lineage(event))
        if lineage[-1].name.startswith(STEP):
            step = steps.setdefault(id(lineage[-1]), dict.fromkeys(KINDS, 0.0))
            step[kind_of(each.name for each in lineage)] += event.self_cpu_time_total / 1e3  # from us
    return {kind: median(step[kind] for step in steps.values()) for kind in KINDS}


def _lineage(event: FunctionEvent) -> Iterator[FunctionEvent]:
    """Yield the event and its callers, the outermost last."""
    caller: FunctionEvent | None = event
    while caller is not None:
        yield caller
        caller = caller.cpu_parent
