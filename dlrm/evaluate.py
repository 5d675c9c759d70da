"""Evaluate a trained run: `python -m dlrm.evaluate --run RUN_FOLDER --by frequency --plot DIR`.

Under torchrun it runs on any number of ranks: `torchrun ... -m dlrm.evaluate --run-folder RUN_FOLDER`. It
prints the figures of the run's report for the newest or the best save, on the test days or any others.
"""

import argparse
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from cpr.versions import check_versions
from dlrm.config.recipe import load_resumed
from dlrm.launch.arguments import Parser, add_run
from dlrm.launch.files import replace_text
from dlrm.launch.process import exit_code_of, leave, quiet_libraries
from dlrm.launch.stop_signal import StopSignal

if TYPE_CHECKING:  # torch takes seconds
    from dlrm.inference.evaluating import Evaluation


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line.

    Raises:
        ValueError: the command line is wrong.
    """
    parser = Parser(prog="dlrm.evaluate", description=__doc__.partition("\n")[0], allow_abbrev=False)
    add_run(parser)
    parser.add_argument("--data", help="prepared data set with the run's columns (default: that of the run)")
    parser.add_argument(
        "--days", type=int, nargs="+", default=(), help="days to evaluate (default: the run's test days)"
    )
    parser.add_argument(
        "--by",
        nargs="+",
        default=(),
        metavar="FEATURE",
        help="metrics by value of a feature (the 20 most frequent, and all others); frequency: by how often "
        "the training days hold a sample's rarest id, frequency:FEATURE: its id of that feature",
    )
    parser.add_argument("--plot", type=Path, metavar="DIR", help="folder for the picture calibration.png")
    parser.add_argument("--json", type=Path, metavar="FILE", help="file for all results as JSON")
    return parser.parse_args(arguments)


def main() -> int:
    """Run the command and return its exit code."""

    def job(stop: StopSignal) -> None:
        options = parse()
        _, config = load_resumed(options.run)
        check_versions("cuda" if config.train.device == "cuda" else "cpu")
        for folder in (options.plot, options.json and options.json.parent):
            if folder is not None:
                _make(folder)
        from dlrm.inference.evaluating import EvaluationJob, evaluate_run, format_evaluation  # noqa: PLC0415

        result = evaluate_run(
            EvaluationJob(
                run=options.run,
                data_uri=options.data,
                days=options.days,
                save=options.save,
                by=tuple(dict.fromkeys(options.by)),
            )
        )
        if os.environ.get("RANK", "0") != "0":
            return
        print(f"\n{format_evaluation(result)}", flush=True)
        _write(result, options)

    quiet_libraries()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    return exit_code_of("dlrm.evaluate", job)


def _make(folder: Path) -> None:
    """Make a folder for results before the work begins."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"{folder} cannot be made ({error}); choose another place for the results"
        ) from error


def _write(result: "Evaluation", options: argparse.Namespace) -> None:
    """Write the results for machines, and the picture."""
    picture = options.plot and options.plot / "calibration.png"
    try:
        if options.json is not None:
            replace_text(options.json, result.to_json())
        if picture is not None:
            from dlrm.inference.drawing import draw_calibration  # noqa: PLC0415

            draw_calibration(picture, result.calibration, f"{result.run}, step {result.step}")
    except OSError as error:
        places = " and ".join(str(each) for each in (options.json, picture) if each is not None)
        raise OSError(f"{places} cannot be written: {error}; the results are printed above") from error


if __name__ == "__main__":
    leave(main())
