"""Definition of a `cpr` command, and the exit codes."""

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
    """Returns the exit code."""
