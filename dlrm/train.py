"""Train a recommendation model: `torchrun --nproc-per-node 2 -m dlrm.train --recipe tiny`.

One process does without torchrun: `python -m dlrm.train --recipe tiny --set train.max_steps=100`.
A run that saved (`--set checkpoint.every_steps=500`) goes on with `--resume RUN_FOLDER`, also on other ranks.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from dlrm.compatibility import check_versions
from dlrm.process import exit_code_of, leave, quiet_libraries
from dlrm.recipe import load_config, load_resumed, recipe_names
from dlrm.stop import StopSignal


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
    parser.add_argument(
        "--set",
        dest="overrides",
        metavar="SECTION.KEY=VALUE",
        nargs="+",
        action="extend",
        default=[],
        help="change single values of the recipe or run, e.g. --set train.epochs=2 model.top_mlp=[64,1]",
    )
    return parser.parse_args(arguments)


def run(arguments: argparse.Namespace, stop: StopSignal) -> None:
    """Read the configuration, build, train, and close in any case."""
    if arguments.resume:
        recipe, config = load_resumed(arguments.resume, arguments.overrides)
    else:
        recipe, config = arguments.recipe, load_config(arguments.recipe, arguments.overrides)
    check_versions("cuda" if config.train.device == "cuda" else "cpu")
    # torch and torchrec are imported from here on, when they are known to fit
    import torch.distributed as dist  # noqa: PLC0415

    from dlrm.build import build, start_process_group  # noqa: PLC0415
    from dlrm.inputs import Ranks, prepare  # noqa: PLC0415
    from dlrm.memory import keep_freed_memory  # noqa: PLC0415
    from dlrm.report import format_report  # noqa: PLC0415

    keep_freed_memory()
    ranks = Ranks.from_environment()
    inputs = prepare(config, recipe, ranks, arguments.resume)
    try:
        check_versions(inputs.device.type)  # "auto" is decided
        start_process_group(ranks, inputs.device)
        trainer = build(inputs, stop)
        try:
            trainer.train()
            report = trainer.telemetry.finish()
        finally:
            trainer.session.close()
            trainer.telemetry.close()
    finally:
        inputs.close()
    dist.destroy_process_group()
    if report is not None:
        print(f"\n{format_report(report)}", flush=True)


def main() -> int:
    """The command; its exit code."""
    quiet_libraries()
    return exit_code_of("dlrm.train", lambda stop: run(parse(), stop))


if __name__ == "__main__":
    leave(main())
