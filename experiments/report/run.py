"""What was measured, for reading: `python -m experiments.report [--check]`.

From the stored results it writes the page beside them in markdown (`results/README.md`), the same as one
HTML page that needs nothing else (`results/report.html`), with goals and the papers' figures beside ours,
and the marked tables of the top-level README. An experiment without a result is simply absent. With
`--check` nothing is written; the command fails and says what is stale.
"""

import argparse
import sys
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Final

from experiments.harness.record import RESULTS
from experiments.report.html import html_page
from experiments.report.markdown import markdown_page
from experiments.report.readme import filled, readme_tables
from experiments.report.results import pictures_by_name, read_results

README: Final = Path(__file__).parents[2] / "README.md"
PAGE_NAME: Final = "README.md"
HTML_NAME: Final = "report.html"
SHOWN: Final = 100
"""Characters of a stale line that the message shows, about half of them before the difference."""


def main(arguments: Sequence[str] | None = None, folder: Path = RESULTS, readme: Path = README) -> int:
    """Write the pages and the README's tables, or check them; 1 if something is stale or cannot be read."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--check", action="store_true", help="write nothing; fail if something is stale")
    options = parser.parse_args(arguments)
    try:
        wanted = pages(folder, readme)
    except ValueError as error:
        print(f"no report: {error}", file=sys.stderr)
        return 1
    if options.check:
        stale = [message for path, text in wanted.items() if (message := staleness(path, text))]
        for message in stale:
            print(message, file=sys.stderr)
        if stale:
            print("write them again with `python -m experiments.report`", file=sys.stderr)
        return 1 if stale else 0
    for path, text in wanted.items():
        path.write_text(text)
        print(f"written to {path}")
    return 0


def pages(folder: Path, readme: Path) -> dict[Path, str]:
    """What every file that the report keeps should hold, by path.

    Args:
        folder: of the stored results.
        readme: the README whose marked tables are kept equal to them.

    Raises:
        ValueError: there are no results, one cannot be read, a figure that something names is not in its
            result, or the README's markers are wrong.
    """
    results = read_results(folder)
    others = pictures_by_name(folder, results)[""]
    return {
        folder / PAGE_NAME: markdown_page(results, others),
        folder / HTML_NAME: html_page(results, others),
        readme: filled(readme.read_text(), readme_tables(results)),
    }


def staleness(path: Path, wanted: str) -> str:
    """Where the file first differs from what it should hold; empty if it does not."""
    if not path.exists():
        return f"{path} is missing"
    pairs = zip_longest(path.read_text().splitlines(), wanted.splitlines(), fillvalue="(nothing)")
    for place, (is_there, should_be) in enumerate(pairs, start=1):
        if is_there != should_be:
            differs = next(at for at, (a, b) in enumerate(zip_longest(is_there, should_be)) if a != b)
            start = max(differs - SHOWN // 2, 0)
            shown = slice(start, start + SHOWN)
            return (
                f"{path}, line {place}, is stale:\n  it says     {is_there[shown]}\n"
                f"  results say {should_be[shown]}"
            )
    return ""
