"""Memory of this process: large pages, and keep what was freed.

A training step allocates the same tensors again and again. By default glibc gives large blocks back to
the kernel when they are freed, and the kernel hands out fresh, zeroed pages at the next step, one fault
for each 4 KB: up to a third of a CPU step (`python -m experiments.throughput`). Rows of large tables are read
all over memory: of pages of 4 KB, the processor knows by heart where a few megabytes are; of 2 MB, gigabytes.
"""

import ctypes
import os
from collections.abc import Mapping
from typing import Final

HUGE_PAGES: Final[Mapping[str, str]] = {"THP_MEM_ALLOC_ENABLE": "1"}
"""Lets PyTorch ask the kernel for transparent huge pages (`MADV_HUGEPAGE`): CPU tensors of 2 MB or more."""

M_TRIM_THRESHOLD: Final = -1
M_MMAP_THRESHOLD: Final = -3
LARGEST_KEPT_BYTES: Final = (1 << 30, 32 << 20)
"""Blocks up to this size are kept: the first that the C library accepts; older ones refuse the first."""


def ask_for_huge_pages() -> None:
    """Let large CPU tensors lie in huge pages if the kernel has any, unless the environment says otherwise.

    To be called before PyTorch is imported: it looks once, when its first tensor is made. Tables that other
    processes may adopt lie in shared memory, for which the kernel has a setting of its own
    (`/sys/kernel/mm/transparent_hugepage/shmem_enabled`).
    """
    for name, value in HUGE_PAGES.items():
        os.environ.setdefault(name, value)


def keep_freed_memory() -> bool:
    """Let the C library keep freed memory for the next allocation.

    Returns:
        Whether it was understood; C libraries other than glibc go on as they do.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    understood = any(mallopt(M_MMAP_THRESHOLD, size) for size in LARGEST_KEPT_BYTES)
    return understood and bool(mallopt(M_TRIM_THRESHOLD, (1 << 31) - 1))
