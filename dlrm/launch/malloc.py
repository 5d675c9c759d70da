"""Memory settings of the process: huge pages, and freed memory kept for reuse.

A training step allocates the same tensors again and again. By default glibc returns large freed blocks to the
kernel, which hands out fresh zeroed pages in the next step, one fault per 4 KB: up to a third of a CPU step
(`python -m experiments.throughput`). Table rows are read all over memory, where the TLB covers a few
megabytes of 4 KB pages but gigabytes of 2 MB pages.
"""

import ctypes
import os
from collections.abc import Mapping
from typing import Final

HUGE_PAGES: Final[Mapping[str, str]] = {"THP_MEM_ALLOC_ENABLE": "1"}
"""Lets PyTorch request transparent huge pages (`MADV_HUGEPAGE`) for CPU tensors of 2 MB or more."""

M_TRIM_THRESHOLD: Final = -1
M_MMAP_THRESHOLD: Final = -3
LARGEST_KEPT_BYTES: Final = (1 << 30, 32 << 20)
"""Blocks up to this size are kept; old C libraries refuse the first value, so the second is tried next."""


def ask_for_huge_pages() -> None:
    """Request huge pages for large CPU tensors, unless the environment says otherwise.

    Must run before PyTorch makes its first tensor, when it reads the setting. Resident tables lie in shared
    memory, which has a kernel setting of its own (`/sys/kernel/mm/transparent_hugepage/shmem_enabled`).
    """
    for name, value in HUGE_PAGES.items():
        os.environ.setdefault(name, value)


def keep_freed_memory() -> None:
    """Make glibc keep freed memory for the next allocation; other C libraries stay as they are."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None and any(mallopt(M_MMAP_THRESHOLD, size) for size in LARGEST_KEPT_BYTES):
        mallopt(M_TRIM_THRESHOLD, (1 << 31) - 1)
