"""Memory that a rank has for its tables."""

import os
from pathlib import Path
from typing import Final

import torch
import torch.distributed as dist

FP32_BYTES: Final = 4


def memory_for_tables(device: torch.device, reserved_share: float) -> int:
    """Bytes for tables on the rank that has least, with `sharding.reserved_share` left free; a collective."""
    memory = memory_bytes(device)
    least = torch.tensor(memory.get("hbm_cap", memory["ddr_cap"]), device=device)
    dist.all_reduce(least, op=dist.ReduceOp.MIN)
    return int(int(least) * (1 - reserved_share))


def memory_bytes(device: torch.device) -> dict[str, int]:
    """Memory of this rank by TorchRec's names: its share of the host's, and its GPU's if it has one."""
    memory = {"ddr_cap": host_memory_bytes() // local_world_size()}
    if device.type == "cuda":
        memory["hbm_cap"] = torch.cuda.get_device_properties(device).total_memory
    return memory


def local_world_size() -> int:
    """Number of ranks on this rank's node."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))


def host_memory_bytes() -> int:
    """Memory of this machine, or of this process's control group if that is less."""
    cgroup = Path("/sys/fs/cgroup/memory.max")
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if cgroup.exists() and (limit := cgroup.read_text().strip()).isdigit():
        return min(total, int(limit))
    return total
