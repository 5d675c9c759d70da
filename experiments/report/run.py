"""What was measured, for reading: `python -m experiments.report [--check] [--out FOLDER]`.

From the stored results it draws all pictures again, fills the marked tables of the top-level README and of
`experiments/README.md`, and writes the whole report as one HTML page, `runs/report.html`, which is not kept
under version control. An experiment without a result is simply absent. With `--check` nothing is written; the
command fails and names the README that is stale.
"""

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module
from itertools import zip_longest
from pathlib import Path
from typing import Final

from PIL import Image

from experiments.harness.record import RESULTS
from experiments.report.html import html_page
from experiments.report.readme import filled, readme_tables
from experiments.report.results import EXPERIMENTS, Result, pictures_by_name, read_results

READMES: Final = (EXPERIMENTS.parent / "README.md", EXPERIMENTS / "README.md")
OUT: Final = Path("runs")
HTML_NAME: Final = "report.html"
NUM_COLORS: Final = 256
"""Colors that a stored picture keeps: lines and bars need no more, and the file is a third as large."""
SHOWN: Final = 100
"""Characters of a stale line that the message shows, about half of them before the difference."""


def main(
    arguments: Sequence[str] | None = None, folder: Path = RESULTS, readmes: Sequence[Path] = READMES
) -> int:
    """Write pictures, tables and the page, or check the tables; 1 if one is stale or cannot be made."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a README is stale")
    parser.add_argument("--out", type=Path, default=OUT, help="folder for report.html; default %(default)s")
    options = parser.parse_args(arguments)
    try:
        results = read_results(folder)
        wanted = filled_readmes(results, readmes)
        if options.check:
            return _check(wanted)
        for result in results.values():
            redraw(result, folder)
        for picture in folder.glob("*.png"):
            shrink(picture)
        results = read_results(folder)  # with the pictures that are there now
        wanted[options.out / HTML_NAME] = html_page(results, pictures_by_name(folder, results)[""])
    except ValueError as error:
        print(f"no report: {error}", file=sys.stderr)
        return 1
    options.out.mkdir(parents=True, exist_ok=True)
    for path, text in wanted.items():
        path.write_text(text)
        print(f"written to {path}")
    return 0


def filled_readmes(results: dict[str, Result], readmes: Sequence[Path]) -> dict[Path, str]:
    """The text that each README should hold.

    Raises:
        ValueError: a figure that a table names is not in its result, or a README's markers are wrong.
    """
    tables = readme_tables(results)
    return {path: filled(path.name, path.read_text(), tables) for path in readmes}


def redraw(result: Result, folder: Path) -> None:
    """Draw the pictures of a finished result into `folder`, by `draw` of its own module if there is one."""
    if result.module is not None and result.is_finished:
        name = ".".join(result.module.relative_to(EXPERIMENTS.parent).with_suffix("").parts)
        draw = getattr(import_module(name), "draw", None)
        if draw is not None:
            draw(result.body, folder)


def shrink(path: Path) -> None:
    """Store a picture with few colours, unless it has few already."""
    with Image.open(path) as image:
        if image.mode == "P":
            return
        small = image.convert("RGB").quantize(NUM_COLORS, dither=Image.Dither.NONE)
    small.save(path, optimize=True)


def _check(wanted: dict[Path, str]) -> int:
    stale = [message for path, text in wanted.items() if (message := staleness(path, text))]
    if stale:
        print(*stale, "write them again with `python -m experiments.report`", sep="\n", file=sys.stderr)
    return 1 if stale else 0


def staleness(path: Path, wanted: str) -> str:
    """A message with the first line of the file that differs from `wanted`; empty if there is none."""
    pairs = zip_longest(path.read_text().splitlines(), wanted.splitlines(), fillvalue="(nothing)")
    for place, (is_there, should_be) in enumerate(pairs, start=1):
        if is_there != should_be:
            differs = next(at for at, (a, b) in enumerate(zip_longest(is_there, should_be)) if a != b)
            start = max(differs - SHOWN // 2, 0)
            shown = slice(start, start + SHOWN)
            return (
                f"{path}, line {place}, is stale:\n  it says     {is_there[shown]}\n  results say "
                f"{should_be[shown]}"
            )
    return ""
