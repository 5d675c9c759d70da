"""Train a recommendation model: `torchrun --nproc-per-node 2 -m dlrm.train --recipe tiny`.

One process does without torchrun: `python -m dlrm.train --recipe tiny --set train.max_steps=100`.
A run that saved (`--set checkpoint.every_steps=500`) goes on with `--resume RUN_FOLDER`, also on other ranks;
`--warm-start RUN_FOLDER --set data.uri=...` begins a new run with its model, on other data.
With `torchrun --max-restarts 3` it goes on by itself when a worker dies.
"""

import argparse
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from cpr import forkserver as standby
from dlrm.config.recipe import load_config, load_resumed, load_warm_started, recipe_names
from dlrm.config.schema import STRATEGIES, Config
from dlrm.launch.malloc import ask_for_huge_pages
from dlrm.launch.process import exit_code_of, leave, quiet_libraries
from dlrm.launch.stop_signal import StopSignal
from dlrm.launch.versions import IncompatiblePackagesError, check_versions


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Say it as every other mistake: once, not once a rank."""
        raise ValueError(f"{message}; see --help")


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line.

    Raises:
        ValueError: it is wrong.
    """
    parser = _Parser(prog="dlrm.train", description=__doc__.partition("\n")[0], allow_abbrev=False)
    start = parser.add_mutually_exclusive_group(required=True)
    start.add_argument("--recipe", help=f"{', '.join(recipe_names())}, or a .toml file")
    start.add_argument(
        "--resume", metavar="RUN_FOLDER", type=Path, help="go on with a run from what it saved last"
    )
    start.add_argument(
        "--warm-start",
        metavar="RUN_FOLDER",
        type=Path,
        help="begin a new run, configured as this one, with its model, optimizers and schedule; name the "
        "data with --set data.uri=... data.train_days=[...]",
    )
    parser.add_argument(
        "--set",
        dest="overrides",
        metavar="SECTION.KEY=VALUE",
        nargs="+",
        action="extend",
        default=[],
        help="change single values of the recipe or run, e.g. --set train.epochs=2 model.top_mlp=[64,1]",
    )
    parser.add_argument(
        "--sharding", choices=STRATEGIES, help="short for --set sharding.strategy=..., which wins over it"
    )
    parsed = parser.parse_args(arguments)
    if parsed.sharding:
        parsed.overrides.insert(0, f"sharding.strategy={parsed.sharding}")
    return parsed


def read(arguments: argparse.Namespace) -> tuple[str, Config]:
    """The recipe's name and the configuration that the command line asks for; its packages fit together.

    Raises:
        ValueError, IncompatiblePackagesError: say what to do.
    """
    if arguments.resume:
        if any(override.strip().startswith("train.warm_start") for override in arguments.overrides):
            raise ValueError("train.warm_start is for new runs: give --warm-start instead of --resume")
        recipe, config = load_resumed(arguments.resume, arguments.overrides)
    elif arguments.warm_start:
        recipe, config = load_warm_started(arguments.warm_start, arguments.overrides)
    else:
        recipe, config = arguments.recipe, load_config(arguments.recipe, arguments.overrides)
    check_versions("cuda" if config.train.device == "cuda" else "cpu")
    return recipe, config


def prepare() -> None:
    """Import everything, unless the command line is wrong: `work` says that, and nobody waits for it."""
    quiet_libraries()
    try:
        read(parse())
    except (ValueError, IncompatiblePackagesError):
        return
    import dlrm.training.run  # noqa: F401, PLC0415  # torch and torchrec, when they are known to fit


def work() -> int:
    """Train; the exit code."""

    def job(stop: StopSignal) -> None:
        arguments = parse()
        recipe, config = read(arguments)
        from dlrm.training.run import run  # noqa: PLC0415

        run(config, recipe, stop, arguments.resume)

    quiet_libraries()
    return exit_code_of("dlrm.train", job)


def main() -> int:
    """The command; its exit code."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # while it imports, Ctrl-C ends it without a traceback
    ask_for_huge_pages()
    return standby.run(prepare, work)


if __name__ == "__main__":
    leave(main())
