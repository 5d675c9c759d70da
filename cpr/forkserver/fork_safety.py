"""Checks whether a process can be forked, and whether its loaded code is still that on disk.

A fork contains only the thread that forks: locks and work of other threads are lost in it, and a CUDA context
does not work there. A fork also has the code of the time of its imports: if a file was edited since, a worker
that started by itself would have the new code, and so must a fork.
"""

import ctypes
import os
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

STARTED_NS: Final = time.time_ns()
"""Time at which this module was imported, before everything that is prepared."""

HARMLESS_THREADS: Final = frozenset({"jemalloc_bg_thd"})
"""By name. Arrow's allocator locks itself for a fork and does without its thread in it."""

CUDA_ERROR_NOT_INITIALIZED: Final = 3


def why_not_to_fork() -> str | None:
    """What a fork of this process would lose or break; None if nothing.

    Call it in the parent right after a fork: libraries such as OpenBLAS end their threads for one.
    """
    threads = []
    for thread in Path("/proc/self/task").iterdir():
        if thread.name != str(os.getpid()):
            with suppress(OSError):  # it has just ended
                threads.append((thread / "comm").read_text().strip())
    if others := sorted(set(threads) - HARMLESS_THREADS):
        return f"other threads run in it ({', '.join(others)})"
    if _cuda_is_initialized():
        return "CUDA is initialized in it"
    return None


def _cuda_is_initialized() -> bool:
    """Whether the driver's `cuInit` was called, asked without initializing CUDA."""
    loaded = (line.split(maxsplit=5) for line in Path("/proc/self/maps").read_text().splitlines())
    driver = next((line[5] for line in loaded if len(line) == 6 and "/libcuda.so" in line[5]), None)
    if driver is None:
        return False
    num_devices = ctypes.c_int()
    return bool(ctypes.CDLL(driver).cuDeviceGetCount(ctypes.byref(num_devices)) != CUDA_ERROR_NOT_INITIALIZED)


class LoadedCode:
    """Snapshot of the files of all loaded modules."""

    def __init__(self) -> None:
        files: set[str | None] = {getattr(module, "__file__", None) for module in [*sys.modules.values()]}
        self._stamps = {file: _stamp(file) for file in files if file}

    def changed(self) -> str | None:
        """A file that differs from the loaded one; None if there is none.

        Files written after the process began count as changed, as they may have been read before.
        """
        for file, stamp in self._stamps.items():
            if _stamp(file) != stamp or (stamp is not None and stamp[0] >= STARTED_NS):
                return file
        return None


def _stamp(file: str) -> tuple[int, int, int] | None:
    """Time of the last change in ns, size in bytes, and inode; None if there is no such file."""
    try:
        status = os.stat(file)  # noqa: PTH116  # a Path would be slow for thousands of files
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino
