"""Files of shared memory as tensors.

All pages are allocated before the first is written: a full file system is an error here, and no SIGBUS later.
"""

import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeVar

import torch
from torch import Tensor

from cpr.errors import (
    DamagedMemoryError,
    MemoryVersionError,
    NotEnoughMemoryError,
    UnreadableMemoryError,
)
from cpr.humanize import size_text
from cpr.resident.folders import ROOT_VARIABLE, open_private, reading

PATIENCE_S: Final = 30.0
"""How long reading memory is repeated before the failure costs one of the run's restarts."""
FIRST_PAUSE_S: Final = 0.05
T = TypeVar("T")

logger = logging.getLogger(__name__)


def create_region(path: Path, num_bytes: int) -> Tensor:
    """Create a file, and map it as `[num_bytes]` uint8 of zeros.

    Raises:
        NotEnoughMemoryError: the file system is full; nothing is left of the file.
        FileExistsError: the file exists.
    """
    file = open_private(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    try:
        allocate(file, path, num_bytes)
        return _map(file, num_bytes)
    except BaseException:
        path.unlink()
        raise
    finally:
        os.close(file)


def map_region(path: Path, num_bytes: int | None = None) -> Tensor:
    """Map an existing file as `[num_bytes]` uint8 (None: any size), unread; tries again for a while.

    Raises:
        DamagedMemoryError: the file is missing, a link, not private, or has another size.
        UnreadableMemoryError: the file cannot be mapped now.
    """

    def map_now() -> Tensor:
        with reading(path):
            file = open_private(path, os.O_RDWR)
            try:
                found = os.fstat(file).st_size
                if num_bytes not in {None, found}:
                    raise DamagedMemoryError(f"{path} has {found} bytes instead of {num_bytes}")
                return _map(file, found)
            finally:
                os.close(file)

    return patiently(map_now)


def patiently(read: Callable[[], T]) -> T:
    """Call `read` again with growing pauses while memory cannot be read, and return its result.

    Raises:
        UnreadableMemoryError: it still cannot be read after `PATIENCE_S`, or is of another version.
    """
    deadline, pause_s = time.monotonic() + PATIENCE_S, FIRST_PAUSE_S
    while True:
        try:
            return read()
        except UnreadableMemoryError as error:
            if isinstance(error, MemoryVersionError) or time.monotonic() + pause_s > deadline:
                raise
            if pause_s == FIRST_PAUSE_S:
                logger.warning("%s. Reading is tried again for %.0f s", error.__cause__, PATIENCE_S)
        time.sleep(pause_s)
        pause_s *= 2


def grow_region(path: Path, num_bytes: int) -> Tensor:
    """Enlarge a file to at least this size, or create it, and map it; its content stays.

    Raises:
        NotEnoughMemoryError: the file system is full; the file is unchanged.
    """
    file = open_private(path, os.O_RDWR | os.O_CREAT)
    before = os.fstat(file).st_size
    try:
        allocate(file, path, num_bytes)
        return _map(file, os.fstat(file).st_size)
    except NotEnoughMemoryError:
        os.ftruncate(file, before)
        raise
    finally:
        os.close(file)


def allocate(file: int, path: Path, num_bytes: int) -> None:
    """Allocate all pages of an open file.

    Raises:
        NotEnoughMemoryError: the file system is full.
    """
    try:
        if num_bytes:
            os.posix_fallocate(file, 0, num_bytes)
    except OSError as error:
        raise not_enough(path.parent, num_bytes, str(error)) from error


def not_enough(place: Path, num_bytes: int, cause: str) -> NotEnoughMemoryError:
    """Make the error for a lack of shared memory, with what to change."""
    return NotEnoughMemoryError(
        f"{size_text(num_bytes)} of shared memory are needed in {place}: {cause}. What to do: enlarge it "
        f"(in docker: --shm-size), set {ROOT_VARIABLE} to another memory file system, or remove what dead "
        "runs left there with `cpr clean`"
    )


def _map(file: int, num_bytes: int) -> Tensor:
    if num_bytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    try:  # by descriptor: what was checked is what is mapped
        return torch.from_file(f"/proc/self/fd/{file}", shared=True, size=num_bytes, dtype=torch.uint8)
    except RuntimeError as error:  # out of memory or of open files
        raise OSError(str(error)) from error
