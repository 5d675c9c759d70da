"""The flag `--plot`: a picture's file, checked before anything is computed for it."""

import argparse
from pathlib import Path
from typing import Final

ENDINGS: Final = (".png", ".svg", ".pdf")


def add_plot_argument(parser: argparse.ArgumentParser, what: str) -> None:
    """Add the flag.

    Args:
        parser: of the command.
        what: is drawn, for the help.
    """
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help=f"draw {what}: a {', '.join(ENDINGS[:-1])} or {ENDINGS[-1]}"
    )


def check_picture(path: Path | None) -> None:
    """Refuse a file that cannot be drawn.

    Raises:
        ValueError: its ending is not that of a picture, or its folder does not exist.
    """
    if path is None:
        return
    if path.suffix.lower() not in ENDINGS:
        raise ValueError(f"--plot {path}: the ending says the format; choose one of {', '.join(ENDINGS)}")
    if not path.parent.is_dir():
        raise ValueError(f"--plot {path}: there is no folder {path.parent}; make it first")
