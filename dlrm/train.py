"""Train a recommendation model: `torchrun --nproc-per-node 2 -m dlrm.train --recipe tiny`.

A single process needs no torchrun: `python -m dlrm.train --recipe tiny --set train.max_steps=100`.
A run with `--set checkpoint.every_steps=500` can be continued with `--resume RUN_FOLDER`, also on another
number of ranks; `--warm-start RUN_FOLDER --set data.uri=...` starts a new run from its model on other data.
With `torchrun --max-restarts 3` a run continues by itself after a worker dies.
"""

import argparse
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from cpr import forkserver
from cpr.versions import IncompatiblePackagesError, check_versions
from dlrm.config.recipe import load_config, load_resumed, load_warm_started, recipe_names
from dlrm.config.reference import describe, sections
from dlrm.config.schema import STRATEGIES, Config
from dlrm.launch.arguments import Parser
from dlrm.launch.malloc import ask_for_huge_pages
from dlrm.launch.process import exit_code_of, leave, quiet_libraries
from dlrm.launch.stop_signal import StopSignal


class _Help(argparse.Action):
    """`--help` for the command, `--help SECTION` or `--help SECTION.KEY` for the configuration."""

    def __call__(self, parser: argparse.ArgumentParser, *arguments: Any) -> NoReturn:
        name = arguments[1]
        print(describe(name) if name else parser.format_help().rstrip())
        parser.exit()


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line.

    Raises:
        ValueError: the command line is wrong.
    """
    listed = "\n".join(
        f"  {name:<11} {purpose.partition('. ')[0].rstrip('.')}" for name, purpose in sections().items()
    )
    parser = Parser(
        prog="dlrm.train",
        description=__doc__.partition("\n")[0],
        epilog=f"configuration sections, all in dlrm/CONFIG.md; --help SECTION lists the keys:\n{listed}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        add_help=False,
    )
    parser.add_argument(
        "-h",
        "--help",
        action=_Help,
        nargs="?",
        metavar="SECTION[.KEY]",
        help="show this help, or describe a section or key of the configuration, and exit",
    )
    start = parser.add_mutually_exclusive_group(required=True)
    start.add_argument("--recipe", help=f"{', '.join(recipe_names())}, or a .toml file")
    start.add_argument(
        "--resume", metavar="RUN_FOLDER", type=Path, help="continue a run from its newest save"
    )
    start.add_argument(
        "--warm-start",
        metavar="RUN_FOLDER",
        type=Path,
        help="start a new run, configured like this one, from its model, optimizers and schedule "
        "(RUN_FOLDER/best: from its best state); name the data with --set data.uri=... data.train_days=[...]",
    )
    parser.add_argument(
        "--allow",
        metavar="KIND:NAME",
        nargs="+",
        action="extend",
        default=[],
        help="how the model of --resume or --warm-start may differ from the save: grow:TABLE (more rows), "
        "add:TABLE, remove:TABLE, reset:TENSOR (a dense tensor that starts anew: of another shape, or in a "
        "warm start of any); NAME may be a pattern",
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
    if parsed.allow and parsed.recipe:
        parser.error("--allow says how a save may differ, and --recipe starts without one")
    if parsed.sharding:
        parsed.overrides.insert(0, f"sharding.strategy={parsed.sharding}")
    return parsed


def read(arguments: argparse.Namespace) -> tuple[str, Config]:
    """Read the recipe's name and the configuration, and check the installed packages.

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
    """Import everything before the fork server takes its copy; `work` reports a wrong command line."""
    quiet_libraries()
    try:
        read(parse())
    except (ValueError, IncompatiblePackagesError):
        return
    # not a model of the user: threads that its module starts when it is imported would end with the fork
    import dlrm.training.run  # noqa: F401, PLC0415  # torch and torchrec, once their versions are checked


def work() -> int:
    """Train and return the exit code."""

    def job(stop: StopSignal) -> None:
        arguments = parse()
        recipe, config = read(arguments)
        from dlrm.training.run import run  # noqa: PLC0415

        run(config, recipe, stop, arguments.resume, arguments.allow)

    quiet_libraries()
    return exit_code_of("dlrm.train", job)


def main() -> int:
    """Run the command and return its exit code."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # so that Ctrl-C during imports prints no traceback
    ask_for_huge_pages()
    return forkserver.run(prepare, work)


if __name__ == "__main__":
    leave(main())
