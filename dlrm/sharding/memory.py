"""Memory of a rank for its tables."""

import os
from pathlib import Path
from typing import Final

import torch
import torch.distributed as dist

FP32_BYTES: Final = 4


RESERVED_SHARE: Final = 0.15
"""Of a rank's memory, for whatever is neither tables nor dense parameters; as TorchRec's planner has it."""


def memory_for_tables(device: torch.device) -> int:
    """Bytes that a rank may have in tables, of the rank that has least; all ranks call it together.

    Args:
        device: where the tables live.
    """
    memory = memory_bytes(device)
    least = torch.tensor(memory.get("hbm_cap", memory["ddr_cap"]), device=device)
    dist.all_reduce(least, op=dist.ReduceOp.MIN)
    return int(int(least) * (1 - RESERVED_SHARE))


def memory_bytes(device: torch.device) -> dict[str, int]:
    """Of this rank, by TorchRec's names: its part of the host's memory, and its GPU's, if it has one."""
    memory = {"ddr_cap": _host_memory_bytes() // local_world_size()}
    if device.type == "cuda":
        memory["hbm_cap"] = torch.cuda.get_device_properties(device).total_memory
    return memory


def local_world_size() -> int:
    """Ranks on this rank's node."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))


def _host_memory_bytes() -> int:
    cgroup = Path("/sys/fs/cgroup/memory.max")
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if cgroup.exists() and (limit := cgroup.read_text().strip()).isdigit():
        return min(total, int(limit))
    return total
