"""Files that `experiments.checkpointing` has written: their size, and out of the page cache with them."""

import os
from pathlib import Path


def files_in(folder: Path) -> list[Path]:
    """All files under `folder`."""
    return [path for path in folder.rglob("*") if path.is_file()]


def folder_bytes(folder: Path) -> int:
    """Of all files under `folder`."""
    return sum(path.stat().st_size for path in files_in(folder))


def forget_cached(folder: Path) -> None:
    """Drop the files under `folder`, which are synced, from the page cache."""
    for path in files_in(folder):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
