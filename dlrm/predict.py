"""Score a data set with a trained model: `torchrun ... -m dlrm.predict --run-folder RUN --out FILE`.

A single process needs no torchrun. The output is a Parquet file with one row per sample, in the order of the
data. Killed and started again with the same command, it continues, and writes the same bytes.
"""

import argparse
import signal
from collections.abc import Sequence
from pathlib import Path

from cpr.versions import check_versions
from dlrm.config.recipe import load_resumed
from dlrm.launch.arguments import Parser, add_run
from dlrm.launch.process import exit_code_of, leave, quiet_libraries
from dlrm.launch.stop_signal import StopSignal


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line.

    Raises:
        ValueError: the command line is wrong.
    """
    parser = Parser(prog="dlrm.predict", description=__doc__.partition("\n")[0], allow_abbrev=False)
    add_run(parser)
    parser.add_argument("--out", type=Path, required=True, help="Parquet file to write")
    parser.add_argument("--data", help="prepared data set with the run's columns (default: that of the run)")
    parser.add_argument("--days", type=int, nargs="+", default=(), help="days to score (default: all)")
    parser.add_argument("--keep", nargs="+", default=(), metavar="COLUMN", help="columns to copy, e.g. ids")
    return parser.parse_args(arguments)


def main() -> int:
    """Run the command and return its exit code."""

    def job(stop: StopSignal) -> None:
        options = parse()
        _, config = load_resumed(options.run)
        check_versions("cuda" if config.train.device == "cuda" else "cpu")
        from dlrm.inference.scoring import ScoreJob, score  # noqa: PLC0415  # torch takes seconds

        score(
            ScoreJob(
                run=options.run,
                out=options.out,
                data_uri=options.data,
                days=options.days,
                save=options.save,
                keep=options.keep,
            )
        )

    quiet_libraries()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    return exit_code_of("dlrm.predict", job)


if __name__ == "__main__":
    leave(main())
