"""What the commands that run jobs have in common: flags, exit codes, and `--verify`."""

import argparse
import re
import sys
from collections.abc import Callable
from typing import Final

from data.jobs.display import count_text
from data.jobs.folder import FOR_THE_USER, FULL_DISK
from data.jobs.location import Location
from data.jobs.verify import verify

_UNITS: Final = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def add_job_flags(parser: argparse.ArgumentParser, bad: str, max_bad_ratio: float) -> None:
    """Add the flags that all jobs take.

    Args:
        parser: of the command.
        bad: what may be bad, e.g. `rows`.
        max_bad_ratio: default of that flag.
    """
    parser._negative_number_matcher = re.compile(r"-\.?\d.*")  # -5G is a value, which is refused, and no flag
    add = parser.add_argument
    add(
        "--verify",
        type=Location.of,
        metavar="DIR",
        help="check every digest and row count of a finished data set",
    )
    processes = "worker processes (default: one a core, as memory allows)"
    add("--processes", type=int, dest="num_processes", metavar="PROCESSES", help=processes)
    cluster = "run on the Dask cluster of this scheduler (tcp://HOST:8786), not on this machine"
    add("--cluster", metavar="ADDRESS", help=cluster)
    memory = "memory of all processes together; with --cluster of each worker (default %(default)s)"
    add("--memory", default="2G", help=memory)
    share = f"share of bad {bad} beyond which the job fails (default %(default)s)"
    add("--max-bad-ratio", type=float, default=max_bad_ratio, help=share)


def run_command(name: str, command: Callable[[], int]) -> int:
    """Run a command, and explain its errors in one line.

    Returns:
        The exit code: the command's, 2 for errors of the user, 1 for others, 130 for one that was stopped.
    """
    try:
        return command()
    except ValueError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"{name}: {_explain(error)}", file=sys.stderr)
        return 2 if error.errno in FOR_THE_USER else 1
    except KeyboardInterrupt:
        print(f"{name}: stopped. Start the same command again to continue.", file=sys.stderr)
        return 130


def print_verified(out: Location) -> int:
    """Verify a data set, and print the problems and what to do; returns the exit code."""
    try:
        problems = verify(out)
    except ValueError as error:
        print(error)
        return 1
    if not problems:
        print(f"{out}: all digests and row counts are right")
        return 0
    print("\n".join(problems))
    print(
        f"{out}: {count_text(len(problems), 'problem')}. Delete the named files that are "
        "there, and start the command again that made the data set: it then makes all files again, with the "
        "same bytes"
    )
    return 1


def parse_bytes(text: str) -> int:
    """Bytes from text such as `2G`, `500M` or `1048576`; units are powers of 1024.

    Raises:
        ValueError: not a size.
    """
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([KMGT]?)i?B?", text.strip(), re.IGNORECASE)
    if not match:
        raise ValueError(f"{text!r} is not a size; write for example 2G or 500M")
    return int(float(match.group(1)) * _UNITS[match.group(2).upper()])


def _explain(error: OSError) -> str:
    if error.errno in FULL_DISK:
        return str(error)
    if error.errno in FOR_THE_USER:
        return f"permission denied ({error}). Change the permissions, or name other files or another --out"
    return f"{error}. Start the same command again to continue."
