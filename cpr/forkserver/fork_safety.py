"""Whether a process may be forked now, and whether what it has loaded is still what lies on disk.

A fork takes only the thread that forks with it: what other threads hold or do is lost in it, and a CUDA
context does not work there. A fork also has the code of the day it was prepared: if somebody has edited a
file since, a worker that started by itself would have the new one, and so must this one.
"""

import ctypes
import os
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

STARTED_NS: Final = time.time_ns()
"""When this module was imported, which is before everything that is prepared."""

THREADS_THAT_DO_NOT_MATTER: Final = frozenset({"jemalloc_bg_thd"})
"""By name. Arrow's allocator locks itself for a fork and does without its thread in it."""

CUDA_ERROR_NOT_INITIALIZED: Final = 3


def why_not_to_fork() -> str | None:
    """What would be lost or broken in a fork of this process; None if nothing is.

    To be asked right after a fork, in the parent: libraries such as OpenBLAS end their threads for one by
    themselves.
    """
    threads = _other_threads()
    if threads:
        return f"other threads run in it ({', '.join(sorted(threads))})"
    if _cuda_is_initialized():
        return "CUDA is initialized in it"
    return None


def _other_threads() -> list[str]:
    names = []
    for thread in Path("/proc/self/task").iterdir():
        if thread.name != str(os.getpid()):
            with suppress(OSError):  # it has just ended
                names.append((thread / "comm").read_text().strip())
    return [name for name in names if name not in THREADS_THAT_DO_NOT_MATTER]


def _cuda_is_initialized() -> bool:
    """Whether somebody called the driver's `cuInit`; asking does not."""
    loaded = (line.split(maxsplit=5) for line in Path("/proc/self/maps").read_text().splitlines())
    driver = next((line[5] for line in loaded if len(line) == 6 and "/libcuda.so" in line[5]), None)
    if driver is None:
        return False
    num_devices = ctypes.c_int()
    return bool(ctypes.CDLL(driver).cuDeviceGetCount(ctypes.byref(num_devices)) != CUDA_ERROR_NOT_INITIALIZED)


class LoadedCode:
    """The files that the modules of this process come from, as they are when this is made."""

    def __init__(self) -> None:
        files: set[str | None] = {getattr(module, "__file__", None) for module in [*sys.modules.values()]}
        self._stamps = {file: _stamp(file) for file in files if file}

    def changed(self) -> str | None:
        """A file that is not what was loaded, or None.

        What was written after the process began counts as changed: it may have been read before.
        """
        for file, stamp in self._stamps.items():
            if _stamp(file) != stamp or (stamp is not None and stamp[0] >= STARTED_NS):
                return file
        return None


def _stamp(file: str) -> tuple[int, int, int] | None:
    """Its last change in ns, its size in bytes and its inode; None if there is no such file."""
    try:
        status = os.stat(file)  # noqa: PTH116  # thousands of them
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino
