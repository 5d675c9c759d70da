"""Counts the bytes that this rank sends, by wrapping PyTorch's collectives, to verify the planner's formulas.

An all-reduce counts as the ring that backends use for large tensors, `2 (N-1)/N` of its input; all others as
what goes to other ranks. A reduce-scatter is not counted: none is called. Only calls from Python are seen:
TorchRec's and this project's, but not the gradients of replicated tables that DistributedDataParallel sums
inside C++.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from inspect import signature
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from dlrm.sharding.splitting.exchange import GATHER, SCATTER


class Wire:
    """Bytes that this rank has sent to others."""

    def __init__(self) -> None:
        self.sent: defaultdict[tuple[str, torch.dtype], float] = defaultdict(float)
        """Bytes by collective and dtype."""

    @property
    def value_bytes(self) -> float:
        """Bytes of embeddings, partial results and gradients; codecs turn them into uint8."""
        return sum(sent for (_, dtype), sent in self.sent.items() if _of_values(dtype))

    @property
    def id_bytes(self) -> float:
        """Bytes of ids and of their counts."""
        return sum(sent for (_, dtype), sent in self.sent.items() if not _of_values(dtype))


def _of_values(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype == torch.uint8


@contextmanager
def counted() -> Iterator[Wire]:
    """Count everything that this process sends inside this block."""
    wire, originals = Wire(), {name: getattr(dist, name) for name in (*COUNTS, MESSAGES)}
    for name, original in originals.items():
        counting = partial(_messages, wire) if name == MESSAGES else partial(_call, wire, name)
        setattr(dist, name, partial(counting, original))
    try:
        yield wire
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)


def _call(wire: Wire, name: str, original: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    tensor, sent = sent_by(name, original, *arguments, **named)
    wire.sent[name, tensor.dtype] += sent
    return original(*arguments, **named)


def sent_by(name: str, original: Callable[..., Any], *arguments: Any, **named: Any) -> tuple[Tensor, float]:
    """The tensor that a call of a collective sends, and the bytes of it that go to other ranks.

    Args:
        name: of the collective, one of `COUNTS`.
        original: the function itself.
        arguments: of the call.
        named: of the call.
    """
    bound = signature(original).bind(*arguments, **named)
    bound.apply_defaults()
    group = bound.arguments["group"]
    rank, num_ranks = dist.get_rank(group), dist.get_world_size(group)
    tensor, sent = COUNTS[name](bound.arguments, rank, num_ranks)
    return tensor, sent if rank >= 0 else 0.0


def _messages(wire: Wire, original: Callable[..., Any], messages: list[dist.P2POp]) -> Any:
    for each in messages:
        if each.op is dist.isend:
            wire.sent["isend", each.tensor.dtype] += each.tensor.nbytes
    return original(messages)


def _all_to_all(arguments: dict[str, Any], rank: int, num_ranks: int) -> tuple[Tensor, float]:
    tensor, splits = arguments["input"], arguments["input_split_sizes"]
    rows = splits or [tensor.shape[0] // num_ranks] * num_ranks
    return tensor, (sum(rows) - rows[rank]) * tensor[:1].numel() * tensor.itemsize


def _all_gather(arguments: dict[str, Any], _: int, num_ranks: int) -> tuple[Tensor, float]:
    tensor = arguments["input_tensor"] if "input_tensor" in arguments else arguments["tensor"]
    return tensor, tensor.nbytes * (num_ranks - 1)


def _all_reduce(arguments: dict[str, Any], _: int, num_ranks: int) -> tuple[Tensor, float]:
    tensor = arguments["tensor"]
    return tensor, 2 * tensor.nbytes * (num_ranks - 1) / num_ranks


def _reduce_scatter(arguments: dict[str, Any], _: int, num_ranks: int) -> tuple[Tensor, float]:
    tensor = arguments["input"]
    return tensor, tensor.nbytes * (num_ranks - 1) / num_ranks


MESSAGES: Final = "batch_isend_irecv"
COUNTS: Final[dict[str, Callable[[dict[str, Any], int, int], tuple[Tensor, float]]]] = {
    "all_to_all_single": _all_to_all,
    "all_gather": _all_gather,
    "all_gather_into_tensor": _all_gather,
    GATHER: _all_gather,
    SCATTER: _reduce_scatter,
    "all_reduce": _all_reduce,
}
