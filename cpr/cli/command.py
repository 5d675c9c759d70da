"""Definition of a `cpr` command, the exit codes, and the progress bar."""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

FINE, BAD, FAILED, INTERRUPTED = 0, 1, 2, 130


@dataclass(frozen=True, kw_only=True)
class Command:
    """One of `cpr`'s commands."""

    name: str
    help: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]
    """Returns the exit code."""


def byte_bar(what: str) -> Any:
    """A tqdm bar in bytes, whose `reset` sets the total; silent if stderr is not a terminal."""
    from tqdm import tqdm  # noqa: PLC0415  # slow

    return tqdm(desc=what, unit="B", unit_scale=True, leave=False, disable=None)
