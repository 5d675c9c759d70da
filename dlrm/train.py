"""Train a recommendation model: `torchrun --nproc-per-node 2 -m dlrm.train --recipe tiny`.

One process does without torchrun: `python -m dlrm.train --recipe tiny --set train.max_steps=100`.
"""

import argparse
import logging
import os
import sys
import warnings
from collections.abc import Sequence

import torch.distributed as dist

from dlrm.compatibility import IncompatiblePackagesError, check_versions
from dlrm.config import load_config, recipe_names

USER_MISTAKE = 2


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="dlrm.train", description=__doc__.partition("\n")[0])
    parser.add_argument("--recipe", required=True, help=f"{', '.join(recipe_names())}, or a .toml file")
    parser.add_argument(
        "--set",
        dest="overrides",
        metavar="SECTION.KEY=VALUE",
        nargs="+",
        action="extend",
        default=[],
        help="change single values of the recipe, e.g. --set train.epochs=2 model.top_mlp=[64,1]",
    )
    return parser.parse_args(arguments)


def run(arguments: argparse.Namespace) -> None:
    """Parse, build, train, and close in any case."""
    config = load_config(arguments.recipe, arguments.overrides)
    check_versions("cpu" if config.train.device == "auto" else config.train.device)
    # torchrec is imported from here on, when it is known to fit
    from dlrm.build import Ranks, build, prepare, start_process_group  # noqa: PLC0415
    from dlrm.memory import keep_freed_memory  # noqa: PLC0415
    from dlrm.report import format_report  # noqa: PLC0415
    from dlrm.stop import StopSignal  # noqa: PLC0415

    keep_freed_memory()
    with StopSignal() as stop:
        ranks = Ranks.from_environment()
        inputs = prepare(config, arguments.recipe, ranks)
        start_process_group(ranks, inputs.device)
        trainer = build(inputs, stop)
        try:
            trainer.train()
            report = trainer.telemetry.finish()
        finally:
            trainer.session.close()
            trainer.telemetry.close()
            inputs.close()
    dist.destroy_process_group()
    if report is not None:
        print(f"\n{format_report(report)}", flush=True)


def main() -> int:
    """Run, and turn the user's mistakes into one line instead of a traceback."""
    first = os.environ.get("RANK", "0") == "0"
    logging.basicConfig(level=logging.WARNING if first else logging.ERROR, format="%(message)s")
    for ours in ("dlrm", "data"):
        logging.getLogger(ours).setLevel(logging.INFO if first else logging.ERROR)
    # the libraries warn of choices that are meant, TorchRec's planner through the root logger
    logging.getLogger().addFilter(
        lambda record: not record.getMessage().startswith("Sharding spec not found")
    )
    for theirs in ("torchrec", "torch.fx"):
        logging.getLogger(theirs).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning, module="torchrec")
    warnings.filterwarnings("ignore", message=".*lookup_.*_ssd", category=DeprecationWarning)
    try:
        run(parse())
    except (ValueError, IncompatiblePackagesError) as error:
        if first:
            print(f"dlrm.train: {error}", file=sys.stderr, flush=True)
        return USER_MISTAKE
    return 0


if __name__ == "__main__":
    sys.exit(main())
