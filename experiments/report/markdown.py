"""The page of all stored results in markdown, which a code host shows beside the files themselves."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

from experiments.report.results import Result, number

INTRODUCTION: Final = """# Stored results

Made by `python -m experiments.report` from the files beside it. Each result was measured by the command
it names, at the commit it names; the same command measures it again. [report.html](report.html), to be
opened in a browser, has the same with goals and the paper's figures beside."""


def markdown_page(results: Mapping[str, Result], other_pictures: Sequence[Path]) -> str:
    """One section a result; then the pictures that belong to none."""
    sections = [_section(result) for result in results.values()]
    if other_pictures:
        sections.append("\n".join(["## More pictures", "", *map(_picture, other_pictures)]))
    return "\n\n".join([INTRODUCTION, *sections]) + "\n"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A markdown table; a bar within a cell is escaped."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)


def _section(result: Result) -> str:
    state = result.finished or f"**not finished**: {result.num_rows} rows so far, no figures yet"
    facts = dict(result.circumstances())
    facts["commit"] = f"`{facts['commit']}`"
    parts = [f"## {result.name}", result.description]
    parts.append(table(("", ""), [("command", f"`{result.command}`"), ("finished", state), *facts.items()]))
    if result.figures:
        rows = [(f"`{figure}`", number(value)) for figure, value in result.figures.items()]
        parts.append(table(("figure", "value"), rows))
    parts += [f"- `{noted}`: {note}" for noted, note in result.notes.items()]
    parts += map(_picture, result.pictures)
    return "\n\n".join(filter(None, parts))


def _picture(path: Path) -> str:
    return f"![{path.stem}]({path.name})"
