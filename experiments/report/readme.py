"""Tables of the top-level README that say exactly what the stored results say.

A table stands between `<!-- results: NAME -->` and `<!-- end -->`; what is there is replaced by what
`readme_tables` makes of the stored results. Everything else in the README is left alone.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from experiments.report.goals import outcomes
from experiments.report.markdown import table
from experiments.report.papers import COMPARISONS, Comparison
from experiments.report.readme_tables import TABLES, Row
from experiments.report.results import Result, finished_only

MARKED: Final = re.compile(r"(<!-- results: (?P<name>[\w-]+) -->\n)(?P<table>.*?)(<!-- end -->)", re.DOTALL)
BEGINNING: Final = re.compile(r"<!-- results:")
ENDING: Final = re.compile(r"<!-- end -->")
ALL: Final = "evidence"
"""The table of all rows, in this order."""


class Figure:
    """A figure within a format string; `readme_tables` says what its formats are."""

    def __init__(self, value: float | None) -> None:
        self._value = value

    def __format__(self, spec: str) -> str:
        if self._value is None:
            return "not measured"
        spec, _, divisor = spec.partition("/")
        return format(self._value / float(divisor or 1), spec).replace("%", " %")


def readme_tables(results: Mapping[str, Result]) -> dict[str, str]:
    """Every table in markdown by name; empty where none of its rows is measured.

    Besides the tables above: `evidence`, all of their rows; `missed`, the goals that were not met; `paper`,
    the papers' figures beside ours.

    Raises:
        ValueError: a row names a figure that its finished result does not have.
    """
    finished = finished_only(results)
    tables = {name: _rows_table(rows, finished) for name, rows in TABLES.items()}
    tables[ALL] = _rows_table([row for rows in TABLES.values() for row in rows], finished)
    return tables | {"missed": _missed(results), "paper": _paper(finished)}


def _rows_table(rows: Sequence[Row], results: Mapping[str, Result]) -> str:
    lines: list[tuple[str, str, str]] = []
    last = ""
    for row in rows:
        if row.experiment in results:
            result = results[row.experiment]
            command = "same" if result.command == last else f"`{result.command}`"
            lines.append((formatted(row.what, result), formatted(row.result, result), command))
            last = result.command
    return table(("what", "result", "command"), lines) if lines else ""


def formatted(template: str, result: Result) -> str:
    """A row's format string with the result's figures in it.

    Raises:
        ValueError: it names a figure that the result does not have, or a format that is none.
    """
    values: dict[str, Any] = {name: Figure(value) for name, value in result.figures.items()}
    values |= {"num_seeds": len(result.seeds), "config": result.config}
    try:
        return template.format_map(values)
    except (KeyError, ValueError) as error:
        raise ValueError(
            f"experiments/report/readme_tables.py wants {template!r} from the result of {result.name}, "
            f"which has {sorted(result.figures)}: {error!r}"
        ) from error


def _missed(results: Mapping[str, Result]) -> str:
    rows = [
        (f"`{goal.experiment}`: `{goal.figure}`", str(goal), str(measured), verdict.value)
        for goal, measured, verdict in outcomes(results)
        if verdict.is_short
    ]
    return table(("figure", "goal", "measured", "outcome"), rows) if rows else ""


def _paper(results: Mapping[str, Result]) -> str:
    rows = [
        (each.subject, f"{each.paper}: {each.claim} ({each.known.value})", _ours(each, result), each.differs)
        for each in COMPARISONS
        if each.experiment in results
        for result in [results[each.experiment]]
    ]
    return table(("", "the papers", "here", "what differs, and why"), rows) if rows else ""


def _ours(comparison: Comparison, result: Result) -> str:
    shown = [f"{text} (`{figure}`)" for figure, text in comparison.answers(result)]
    return ", ".join(shown) or f"the picture of `{result.name}`"


def filled(text: str, tables: Mapping[str, str]) -> str:
    """The README with every marked table as it should be.

    Args:
        text: the README.
        tables: markdown by the name that the markers use; may be empty where nothing is measured yet.

    Raises:
        ValueError: a marker names no table of ours, or has no end of its own.
    """
    found = list(MARKED.finditer(text))
    whole = [match for match in found if not BEGINNING.search(match["table"])]
    if not len(whole) == len(BEGINNING.findall(text)) == len(ENDING.findall(text)):
        raise ValueError(
            "README.md: each `<!-- results: NAME -->` needs its own line, and one `<!-- end -->` after it"
        )
    unknown = sorted({match["name"] for match in found} - tables.keys())
    if unknown:
        raise ValueError(
            f"README.md asks for the tables {unknown}; experiments/report/readme.py makes {sorted(tables)}"
        )
    return MARKED.sub(lambda match: f"{match[1]}\n{_spaced(tables[match['name']])}{match[4]}", text)


def _spaced(table: str) -> str:
    return f"{table}\n\n" if table else ""
