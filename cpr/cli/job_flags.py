"""Flags that describe a job and its failures: the same for `cpr plan` and `cpr simulate`."""

# ruff: noqa: PLC0415

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from cpr.humanize import parse_duration

if TYPE_CHECKING:
    from cpr.estimator.history import RunHistory
    from cpr.estimator.planning.inputs import EstimatorInputs

TIMES = (
    ("--total", "T_total", "useful training time of the job, such as 56h"),
    ("--fail", "T_fail", "mean time between failures of the job"),
    ("--save", "O_save", "to save everything, from beginning to end"),
    (
        "--blocked",
        "blocked_save",
        "of that, what training loses by waiting and by slower steps (default: all of it)",
    ),
    ("--load", "O_load", "to load after a failure"),
    ("--reschedule", "O_res", "to have a replacement at work after a failure"),
)


def add_job_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    times = parser.add_argument_group("the job", "Times have units: 90s, 5.6m, 28h, 2d.")
    for flag, name, what in TIMES:
        times.add_argument(flag, dest=name, type=_argument(parse_duration), metavar="TIME", help=what)
    times.add_argument(
        "--nodes", dest="N_emb", type=int, metavar="N", help="nodes that hold embeddings (failure domains)"
    )
    times.add_argument(
        "--pls",
        type=float,
        default=0.1,
        metavar="PLS",
        help="portion of lost samples to put up with (default: %(default)s)",
    )
    measured = parser.add_argument_group("or measured", "Flags above win over it.")
    measured.add_argument(
        "--run",
        dest="runs",
        action="append",
        default=[],
        metavar="DIR",
        help="checkpoint directory of a run, a path or a URI; repeatable, the newest last",
    )
    measured.add_argument(
        "--failures",
        type=Path,
        metavar="CSV",
        help="log of failures with the columns began, ended (ISO 8601) and failed (yes or no), "
        "or lasted (such as 13.5h) and failed",
    )


def inputs_of(options: argparse.Namespace) -> "EstimatorInputs":
    """What the flags say.

    Raises:
        ValueError: something is missing or impossible; says what to give.
        CheckpointError: a run's directory cannot be read.
    """
    from cpr.estimator.failures.log import read_log
    from cpr.estimator.planning.inputs import FLAGS, gather

    try:
        log = read_log(options.failures) if options.failures else None
    except OSError as error:
        raise ValueError(
            f"--failures {options.failures} cannot be read ({error.strerror}): give a CSV file"
        ) from error
    given = {name: getattr(options, name) for name in FLAGS}
    return gather(given, [_history(uri) for uri in options.runs], log)


def _history(uri: str) -> "RunHistory":
    from cpr.checkpoint.storage.base import open_storage
    from cpr.estimator.history import read_history

    storage = open_storage(uri)
    history = read_history(storage)
    if history is None:
        raise ValueError(
            f"{storage.uri} has no history (history-<epoch>.json), where cpr.PartialRecovery writes what "
            "saves and failures cost a run. Name the directory of its checkpoints, train with it "
            "(dlrm.train: under torchrun --max-restarts, with checkpoint.every_steps) until it has saved, or "
            "give the job's times: --total, --fail, --save and --nodes"
        )
    return history


def _argument(parse: Callable[[str], float]) -> Callable[[str], float]:
    def of_command_line(text: str) -> float:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return of_command_line
