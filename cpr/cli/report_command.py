"""`cpr report`: makes the page of a run from what the run has recorded until now."""

# ruff: noqa: PLC0415 - the imports are slow, and only this command needs them

import argparse
from pathlib import Path
from typing import Final

from cpr.cli.command import FINE, Command


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "place",
        metavar="RUN",
        help="folder of a run of dlrm.train, or checkpoint directory of a script with cpr.PartialRecovery",
    )
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="write the page there (default: report.html in RUN)"
    )


def _run(options: argparse.Namespace) -> int:
    from cpr.checkpoint.storage.base import open_storage
    from cpr.errors import CheckpointError
    from cpr.report.page import PAGE_NAME, write_page
    from cpr.report.records import read_run

    records = read_run(options.place)
    out: Path | None = options.out
    storage = open_storage(options.place if out is None else str(out.parent))
    name = PAGE_NAME if out is None else out.name
    try:
        write_page(records, storage, name)
    except CheckpointError as error:
        raise ValueError(f"{error}. `--out FILE` writes the page to another place") from error
    print(f"{storage.uri}/{name}")
    return FINE


REPORT: Final = Command(
    name="report",
    help="Make the page of a run, also while it trains: learning curve, speed, saves, failures, advice.",
    add_arguments=_add_arguments,
    run=_run,
)
