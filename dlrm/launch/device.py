"""The rank of this process, its device, and values that rank 0 decides."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist

Value = TypeVar("Value")


@dataclass(frozen=True)
class Ranks:
    """Rank, local rank and world size of this process, from torchrun's environment; 0, 0 and 1 without it."""

    rank: int
    local_rank: int
    world_size: int

    @classmethod
    def from_environment(cls) -> "Ranks":
        """Read RANK, LOCAL_RANK and WORLD_SIZE."""
        return cls(
            rank=int(os.environ.get("RANK", "0")),
            local_rank=int(os.environ.get("LOCAL_RANK", "0")),
            world_size=int(os.environ.get("WORLD_SIZE", "1")),
        )


def resolve_device(name: str, ranks: Ranks) -> torch.device:
    """Choose the device of this rank; `auto` is cuda if available.

    Raises:
        ValueError: cuda is configured but missing, or there are more local ranks than GPUs.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ValueError("train.device is cuda, but torch finds no GPU here; set train.device=cpu")
    if ranks.local_rank >= torch.cuda.device_count():
        raise ValueError(
            f"local rank {ranks.local_rank} has no GPU of its own: there are {torch.cuda.device_count()}; "
            "start at most that many processes with --nproc-per-node"
        )
    return torch.device("cuda", ranks.local_rank)


def of_rank_0(function: Callable[[], Value]) -> Value:
    """Call a function on rank 0 alone; its result, or its `ValueError`, on all ranks. A collective."""
    held: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            held = [function()]
        except ValueError as error:
            held = [error]
    dist.broadcast_object_list(held)
    if isinstance(held[0], ValueError):
        raise held[0]
    value: Value = held[0]
    return value
