"""Export a trained model for torch alone: `python -m dlrm.export --run RUN_FOLDER --out model.pt2`.

The program takes dense values and ids, and gives logits. Its tables are whole, as fp32 rows or as smaller
int8 rows; its metadata says what its inputs are and how raw rows become them.
"""

import argparse
import signal
from collections.abc import Sequence
from pathlib import Path

from cpr.versions import check_versions
from dlrm.launch.arguments import Parser, add_run
from dlrm.launch.process import exit_code_of, leave, quiet_libraries
from dlrm.launch.stop_signal import StopSignal


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line.

    Raises:
        ValueError: the command line is wrong.
    """
    parser = Parser(prog="dlrm.export", description=__doc__.partition("\n")[0], allow_abbrev=False)
    add_run(parser)
    parser.add_argument("--out", type=Path, required=True, help="file to write")
    parser.add_argument(
        "--rows", choices=("fp32", "int8"), default="fp32", help="of the tables (default fp32)"
    )
    parser.add_argument("--format", choices=("pt2", "onnx"), default="pt2", help="of the file (default pt2)")
    return parser.parse_args(arguments)


def main() -> int:
    """Run the command and return its exit code."""

    def job(stop: StopSignal) -> None:
        options = parse()
        check_versions("cpu")
        from dlrm.inference.program.exporting import ExportJob, export  # noqa: PLC0415  # torch takes seconds

        export(ExportJob(**vars(options)))

    quiet_libraries()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    return exit_code_of("dlrm.export", job)


if __name__ == "__main__":
    leave(main())
