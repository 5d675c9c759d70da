"""What a command is, and what its exit code says."""

import argparse
from collections.abc import Callable
from dataclasses import dataclass

FINE, BAD, FAILED, INTERRUPTED = 0, 1, 2, 130


@dataclass(frozen=True, kw_only=True)
class Command:
    """One of `cpr`'s commands."""

    name: str
    help: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]
    """Gives the exit code."""
