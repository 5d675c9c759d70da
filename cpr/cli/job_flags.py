"""Flags shared by `cpr plan` and `cpr simulate`: the job, its failures, and the form of the output."""

# ruff: noqa: PLC0415 - the imports are slow, and only these commands need them

import argparse
import math
from pathlib import Path
from typing import TYPE_CHECKING, Final

from cpr.cli.command import open_directory
from cpr.humanize import parse_duration

if TYPE_CHECKING:
    from cpr.estimator.history import RunHistory
    from cpr.estimator.planning.estimator_inputs import EstimatorInputs
    from cpr.estimator.planning.formulas import Job
    from cpr.estimator.planning.mirror import MirrorModel

TIMES: Final = (
    ("--total", "T_total", "useful training time of the job, such as 56h"),
    ("--fail", "T_fail", "mean time between failures of the job"),
    ("--save", "O_save", "of a full save, from start to end"),
    (
        "--blocked",
        "blocked_save",
        "of that, what training loses by waiting and by slower steps (default: all of it)",
    ),
    ("--load", "O_load", "to load after a failure"),
    ("--reschedule", "O_res", "to have a replacement at work after a failure"),
)
MIRROR: Final = (
    ("--rows", "rows", int, "N", "rows of a node's tables; with the next two, mirrors are considered"),
    ("--row-bytes", "row_bytes", int, "N", "bytes of a row, with its optimizer state"),
    ("--changed-rows", "changed_rows", float, "N", "rows of a node that a step changes: distinct lookups"),
    ("--workers-per-node", "workers", int, "N", "workers of a node (default: 1)"),
    ("--link", "link_gbps", float, "GBPS", "network between two nodes, in Gb/s (default: 25)"),
    ("--mirror-every", "every_steps", int, "STEPS", "steps from moment to moment (default: 1)"),
    ("--mirror-share", "share", float, "SHARE", "share of the rows that is mirrored (default: 1)"),
)
"""Flags of mirrors, which are not times."""
PICTURES: Final = (".png", ".svg", ".pdf")


def add_job_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of a job and its failures."""
    times = parser.add_argument_group("the job", "Times have units: 90s, 5.6m, 28h, 2d.")
    for flag, name, what in TIMES:
        times.add_argument(flag, dest=name, type=duration, metavar="TIME", help=what)
    times.add_argument(
        "--nodes", dest="N_emb", type=int, metavar="N", help="nodes that hold embeddings (failure domains)"
    )
    times.add_argument(
        "--pls",
        type=float,
        default=0.1,
        metavar="PLS",
        help="acceptable portion of lost samples (default: %(default)s)",
    )
    measured = parser.add_argument_group("or measured", "Flags above take precedence.")
    measured.add_argument(
        "--run",
        dest="runs",
        action="append",
        default=[],
        metavar="DIR",
        help="folder of a run, or its checkpoint directory, a path or a URI; repeatable, the newest last",
    )
    measured.add_argument(
        "--failures",
        type=Path,
        metavar="CSV",
        help="log of failures with the columns began, ended (ISO 8601) and failed (yes or no), "
        "or lasted (such as 13.5h) and failed",
    )

    _add_group_arguments(parser)
    _add_mirror_arguments(parser)


def _add_group_arguments(parser: argparse.ArgumentParser) -> None:
    groups = parser.add_argument_group("failures of several nodes")
    groups.add_argument(
        "--group-share", type=float, metavar="SHARE", help="of failures, that take a group of nodes at once"
    )
    groups.add_argument("--group-nodes", type=int, metavar="N", help="nodes of a group, such as a rack")


def _add_mirror_arguments(parser: argparse.ArgumentParser) -> None:
    mirrors = parser.add_argument_group(
        "mirrors", "Copies of each node's rows in the memory of the next node, in a ring."
    )
    for flag, name, kind, metavar, what in MIRROR:
        mirrors.add_argument(flag, dest=name, type=kind, metavar=metavar, help=what)
    mirrors.add_argument(
        "--step",
        dest="step_s",
        type=duration,
        metavar="TIME",
        help="of a training step without mirrors (default: measured by --run)",
    )
    mirrors.add_argument(
        "--mirror-slows",
        dest="slows_s",
        type=duration,
        metavar="TIME",
        help="what a step loses to the mirror (default: its processor time, one core for each worker)",
    )
    mirrors.add_argument(
        "--mirror-apart",
        action="store_true",
        help="neighbours in the ring are in different groups, as nodes are numbered across racks",
    )


def add_output_arguments(parser: argparse.ArgumentParser, what: str) -> None:
    """Add `--json` and `--plot`, which draws `what`."""
    parser.add_argument("--json", action="store_true", help="all figures as JSON")
    parser.add_argument(
        "--plot",
        type=Path,
        metavar="FILE",
        help=f"draw {what}: a {', '.join(PICTURES[:-1])} or {PICTURES[-1]}",
    )


def check_picture(path: Path | None) -> None:
    """Check the file of a picture before its contents are computed.

    Raises:
        ValueError: the ending is not a picture's, or the folder does not exist.
    """
    if path is None:
        return
    if path.suffix.lower() not in PICTURES:
        raise ValueError(f"--plot {path}: the ending says the format; choose one of {', '.join(PICTURES)}")
    if not path.parent.is_dir():
        raise ValueError(f"--plot {path}: there is no folder {path.parent}; make it first")


def inputs_of(options: argparse.Namespace) -> "EstimatorInputs":
    """The inputs of the estimator from the flags.

    Raises:
        ValueError: a value is missing or impossible; the message names the flag.
        CheckpointError: a run's directory cannot be read.
    """
    from cpr.estimator.failures.log import read_log
    from cpr.estimator.planning.estimator_inputs import FLAGS, gather

    try:
        log = read_log(options.failures) if options.failures else None
    except OSError as error:
        raise ValueError(
            f"--failures {options.failures} cannot be read ({error.strerror}): give a CSV file"
        ) from error
    given = {name: getattr(options, name) for name in FLAGS}
    return gather(given, [_history(uri) for uri in options.runs], log)


def groups_of(options: argparse.Namespace, job: "Job") -> tuple[float, int]:
    """Share of failures that take several nodes, and their number; by default as measured in runs."""
    if (options.group_share is None) != (options.group_nodes is None):
        raise ValueError("--group-share and --group-nodes belong together: give both or neither")
    if options.group_share is not None:
        return options.group_share, options.group_nodes
    if job.nodes_lost <= 1:
        return 0.0, 1
    size = math.ceil(job.nodes_lost)
    return (job.nodes_lost - 1) / (size - 1), size


def mirror_of(
    options: argparse.Namespace, inputs: "EstimatorInputs", group_nodes: int
) -> "MirrorModel | None":
    """The mirror that the flags describe; None if they describe none.

    Raises:
        ValueError: a value is missing or impossible.
    """
    from cpr.estimator.planning.mirror import MirrorModel

    names = [*(name for _, name, *_ in MIRROR), "step_s", "slows_s"]
    given = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    if not given and not options.mirror_apart:
        return None
    if inputs.step_s is not None:
        given.setdefault("step_s", inputs.step_s)
    needed = {
        "rows": "--rows",
        "row_bytes": "--row-bytes",
        "changed_rows": "--changed-rows",
        "step_s": "--step",
    }
    if missing := [flag for name, flag in needed.items() if name not in given]:
        raise ValueError(
            f"a mirror cannot be planned without {', '.join(missing)}: give it, or no flag of mirrors"
        )
    if options.mirror_apart and group_nodes == 1:
        raise ValueError(
            "--mirror-apart says nothing where nodes fail alone: give --group-share and --group-nodes"
        )
    return MirrorModel(**given, distance=group_nodes if options.mirror_apart else 1)


def _history(uri: str) -> "RunHistory":
    from cpr.estimator.history import read_history

    storage = open_directory(uri)
    history = read_history(storage)
    if history is None:
        raise ValueError(
            f"{storage.uri} has no history (history-<epoch>.json), where cpr.PartialRecovery writes what "
            "saves and failures cost a run. Name its folder or checkpoint directory, train with it "
            "(dlrm.train: under torchrun --max-restarts, with checkpoint.every_steps) until it has saved, or "
            "give the job's times: --total, --fail, --save and --nodes"
        )
    return history


def duration(text: str) -> float:
    """Parse the value of a flag that is a duration into seconds."""
    try:
        return parse_duration(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error  # keeps the message, as argparse would not
