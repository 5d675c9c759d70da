"""The command line of the trainer's programs, whose mistakes are reported in one line by `exit_code_of`."""

import argparse
from pathlib import Path
from typing import NoReturn


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are `ValueError`s."""

    def error(self, message: str) -> NoReturn:
        """Raise, because argparse would print usage and message on every rank."""
        raise ValueError(f"{message}; see --help")


def add_run(parser: argparse.ArgumentParser) -> None:
    """Add the options that name a trained run and one of its saves: `run` and `save`."""
    parser.add_argument(
        "--run",
        "--run-folder",  # torchrun on Python 3.11 refuses `--run`, as if it were short for its own options
        dest="run",
        metavar="RUN_FOLDER",
        type=Path,
        required=True,
        help="folder of the run; behind torchrun write --run-folder, or -- before all options",
    )
    parser.add_argument(
        "--save",
        choices=("newest", "best"),
        default="newest",
        help="the newest save (default), or the best by train.keep_best",
    )
