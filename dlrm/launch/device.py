"""The rank of this process, its device, and values that rank 0 decides."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import torch
import torch.distributed as dist

Value = TypeVar("Value")

VISIBLE_DEVICES: Final = "CUDA_VISIBLE_DEVICES"


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
    """Choose the device of this rank, and make its GPU the current one; `auto` is cuda if available.

    Call it before anything is pinned or allocated: PyTorch does both on the current GPU, at first that of
    local rank 0. Where a launcher shows each process its own GPU alone, that one is taken.

    Raises:
        ValueError: cuda is configured but missing, or there are more local ranks than GPUs.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ValueError("train.device is cuda, but torch finds no GPU here; set train.device=cpu")
    num_visible = torch.cuda.device_count()
    has_own = num_visible == 1 and VISIBLE_DEVICES in os.environ  # as Slurm and wrappers of MPI set it
    if ranks.local_rank >= num_visible and not has_own:
        raise ValueError(
            f"local rank {ranks.local_rank} has no GPU of its own: there are {num_visible}; start at most "
            f"that many processes with --nproc-per-node, or give each one GPU by {VISIBLE_DEVICES}"
        )
    device = torch.device("cuda", 0 if has_own else ranks.local_rank)
    torch.cuda.set_device(device)
    # groups' collectives must not run in another order on each rank, which may deadlock
    os.environ.setdefault("NCCL_LAUNCH_ORDER_IMPLICIT", "1")
    return device


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
