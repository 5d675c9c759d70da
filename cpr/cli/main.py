"""The `cpr` command: checkpoint directories, the memory that outlives workers, and how often to save.

Exit codes: 0 all is well, 1 something in the directory is bad, 2 the command could not be carried out.
"""

import argparse
import sys
from collections.abc import Sequence
from typing import Final

from cpr.cli.checkpoints import DESCRIBE, EXPORT, IMPORT, VERIFY
from cpr.cli.command import FAILED, INTERRUPTED
from cpr.cli.memory import CLEAN, RUN
from cpr.cli.plan import PLAN
from cpr.cli.rescue import RESCUE
from cpr.cli.simulate import SIMULATE
from cpr.errors import CheckpointError, ResidentMemoryError

COMMANDS: Final = (
    DESCRIBE,
    VERIFY,
    EXPORT,
    IMPORT,
    RUN,
    CLEAN,
    RESCUE,
    PLAN,
    SIMULATE,
)
"""In the order of `cpr --help`. Each imports what is slow to import when it is run."""


def entry(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code.

    Args:
        arguments: of the command line; None: those of this process.
    """
    options = build_parser().parse_args(arguments)
    try:
        return int(options.run(options))
    except (CheckpointError, ResidentMemoryError, ValueError, OSError) as error:
        print(f"cpr: {error}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        print("cpr: interrupted", file=sys.stderr)
        return INTERRUPTED


def build_parser() -> argparse.ArgumentParser:
    """All commands and their flags."""
    parser = argparse.ArgumentParser(
        prog="cpr", description="Fault tolerance for sharded recommendation models."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in COMMANDS:
        sub = commands.add_parser(command.name, help=command.help, description=command.help)
        command.add_arguments(sub)
        sub.set_defaults(run=command.run)
    return parser
