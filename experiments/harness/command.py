"""The command line that every experiment has."""

import argparse
from pathlib import Path

import torch

from cpr.versions import IncompatiblePackagesError, check_versions
from experiments.harness.network import NoNetworkError, check_possible


def experiment_parser(
    description: str | None,
    *,
    rounds: int | None = None,
    dataset: bool = False,
    figures: bool = False,
    keep: bool = False,
) -> argparse.ArgumentParser:
    """An experiment's command line: `--quick` and, where asked for, `--rounds` and a data set.

    Args:
        description: docstring of the experiment's module; `--help` shows its first line.
        rounds: default of `--rounds`; None: the experiment has no such option.
        dataset: whether the command takes a prepared data set (`options.dataset`).
        figures: whether it can measure nothing and work out the figures of stored rows (`options.figures`).
        keep: whether it can keep rows that an earlier commit has measured (`options.keep`).
    """
    parser = argparse.ArgumentParser(description=(description or "").split("\n", maxsplit=1)[0])
    add = parser.add_argument
    if dataset:
        add("dataset", nargs="?", type=Path, help="prepared data; default datasets/tiny, generated if absent")
    if rounds is not None:
        add("--rounds", type=int, default=rounds, help=f"default {rounds}")
    if figures:
        add("--figures", action="store_true", help="measure nothing: work the figures out from stored rows")
    if keep:
        add("--keep", action="store_true", help="keep rows that earlier commits have measured")
    add("--quick", action="store_true", help="a small run that overwrites no stored result")
    return parser


def require_links(parser: argparse.ArgumentParser) -> None:
    """End the command with status 1 and a reason if this machine cannot limit the speed of links."""
    try:
        check_possible()
    except NoNetworkError as error:
        parser.exit(1, f"{parser.prog}: {error}\n")


def require_gpu(parser: argparse.ArgumentParser) -> None:
    """End the command with status 1 and a reason if torch, torchrec and FBGEMM do not work on a GPU here."""
    need = f"{parser.prog}: this needs an NVIDIA GPU, and"
    try:
        check_versions("cuda")
    except IncompatiblePackagesError as error:
        parser.exit(1, f"{need} {error}\n")
    if not torch.cuda.is_available():
        parser.exit(1, f"{need} torch {torch.__version__} finds none; `cpr doctor` says what is missing\n")
