"""Definition of a `cpr` command, the exit codes, and the progress bar."""

import argparse
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from cpr.checkpoint.storage.base import Storage

FINE, BAD, FAILED, INTERRUPTED = 0, 1, 2, 130
NEGATIVE: Final = re.compile(r"-\.?\d.*")
"""A negative value such as -5GB or -1h, which argparse would take for an option."""


@dataclass(frozen=True, kw_only=True)
class Command:
    """One of `cpr`'s commands."""

    name: str
    help: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]
    """Returns the exit code."""


def open_directory(place: str) -> "Storage":
    """Open a checkpoint directory.

    Args:
        place: the directory, a path or a URI, or the folder of the run of `dlrm.train` that saves there.

    Raises:
        ValueError: there is no such folder.
        CheckpointError: the store cannot be reached.
    """
    from cpr.checkpoint.storage.base import is_local, open_storage  # noqa: PLC0415  # slow
    from cpr.report.records import checkpoint_of  # noqa: PLC0415

    if is_local(place) and not Path(place.removeprefix("file://")).is_dir():
        raise ValueError(f"{place} is no folder: name a checkpoint directory, or a run's folder")
    return open_storage(checkpoint_of(place))


def byte_bar(what: str) -> Any:
    """A tqdm bar in bytes, whose `reset` sets the total; silent if stderr is not a terminal."""
    from tqdm import tqdm  # noqa: PLC0415  # slow

    return tqdm(desc=what, unit="B", unit_scale=True, leave=False, disable=None)
