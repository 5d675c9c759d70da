"""The `cpr` command: checkpoint directories, shared memory of dead runs, restarts, and save intervals.

Exit codes: 0 success, 1 something in the directory is bad, 2 the command failed.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Final

from cpr.cli.checkpoints import DESCRIBE, EXPORT, IMPORT, VERIFY
from cpr.cli.command import FAILED, INTERRUPTED, NEGATIVE, Command
from cpr.cli.doctor_command import DOCTOR
from cpr.cli.plan_command import PLAN
from cpr.cli.report_command import REPORT
from cpr.cli.shared_memory import CLEAN, RESCUE
from cpr.cli.simulate_command import SIMULATE
from cpr.errors import CheckpointError, ResidentMemoryError
from cpr.launch import agent_launcher

RUN: Final = Command(
    name="run",
    help="Run torchrun, and start it again when it is killed: cpr run -- torchrun ...",
    add_arguments=agent_launcher.add_arguments,
    run=agent_launcher.run_command,
)
COMMANDS: Final = (DOCTOR, DESCRIBE, VERIFY, EXPORT, IMPORT, RUN, CLEAN, RESCUE, PLAN, SIMULATE, REPORT)
"""In the order of `cpr --help`. Commands import slow modules only when they run."""


def entry(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code; by default with the command line of this process."""
    options = build_parser().parse_args(arguments)
    try:
        code = int(options.run(options))
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # as of `| head`; nothing more may be written to the pipe, not even at the exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except (CheckpointError, ResidentMemoryError, ValueError, OSError) as error:
        print(f"cpr: {error}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        print("cpr: interrupted", file=sys.stderr)
        return INTERRUPTED


def build_parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    parser = argparse.ArgumentParser(
        prog="cpr", description="Fault tolerance for sharded recommendation models."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in COMMANDS:
        sub = commands.add_parser(command.name, help=command.help, description=command.help)
        command.add_arguments(sub)
        sub._negative_number_matcher = NEGATIVE
        sub.set_defaults(run=command.run)
    return parser
