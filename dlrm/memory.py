"""Memory of this process: keep what was freed.

A training step allocates the same tensors again and again. By default glibc gives large blocks back to
the kernel when they are freed, and the kernel hands out fresh, zeroed pages at the next step, one fault
for each 4 KB: up to a third of a CPU step (`python -m experiments.throughput`).
"""

import ctypes
from typing import Final

M_TRIM_THRESHOLD: Final = -1
M_MMAP_THRESHOLD: Final = -3
LARGEST_KEPT_BYTES: Final = (1 << 30, 32 << 20)
"""Blocks up to this size are kept: the first that the C library accepts; older ones refuse the first."""


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
