"""Tables of the READMEs that say exactly what the stored results say.

A table stands between `<!-- results: NAME -->` and `<!-- end -->`; what is there is replaced by what
`readme_tables` makes of the stored results. Everything else in a README is left alone.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from experiments.report.goals import outcomes
from experiments.report.papers import CLAIMS, PaperClaim
from experiments.report.readme_tables import TABLES, TableRow
from experiments.report.results import MARKS, Result, finished_only
from experiments.report.tables import Table

MARKED: Final = re.compile(r"(<!-- results: (?P<name>[\w-]+) -->\n)(?P<table>.*?)(<!-- end -->)", re.DOTALL)
BEGINNING: Final = re.compile(r"<!-- results:")
ENDING: Final = re.compile(r"<!-- end -->")


class Figure:
    """A figure within a format string; the docstring of `readme_tables` describes the formats."""

    def __init__(self, value: float | None) -> None:
        self._value = value

    def __format__(self, spec: str) -> str:
        if self._value is None:
            return "not measured"
        spec, _, divisor = spec.partition("/")
        value = self._value / float(divisor or 1)
        text = format(value, spec)
        if value and not re.search("[1-9]", text):  # rounded to "+0.0000", it would pass for exactly none
            text = format(value, ("+" if "+" in spec else "") + (".2%" if "%" in spec else ".1g"))
        return text.replace("%", " %")


def readme_tables(results: Mapping[str, Result]) -> dict[str, Table]:
    """Every table by the name that the markers use; without rows where nothing is measured.

    Besides those of `TABLES`: `headline`, their most important rows; `missed`, the goals that were not
    reached; `papers`, the papers' claims next to our figures.

    Raises:
        ValueError: a row names a figure that its finished result does not have.
    """
    finished = finished_only(results)
    rows = [row for table in TABLES.values() for row in table if row.is_headline]
    tables = {"headline": _rows_table(rows, finished)}
    tables |= {name: _rows_table(rows, finished) for name, rows in TABLES.items()}
    return tables | {"missed": _missed(results), "papers": _papers(finished)}


def _rows_table(rows: Sequence[TableRow], results: Mapping[str, Result]) -> Table:
    lines: list[tuple[str, ...]] = []
    shown, last = "", ""
    for row in rows:
        if row.experiment in results:
            result = results[row.experiment]
            texts = (formatted(text, result) for text in (row.what, row.result, row.caveat))
            lines.append((*texts, "same" if result.provenance == last else result.provenance))
            last = result.provenance
            shown += last
    legend = [f"{mark} {meaning}." for mark, meaning in MARKS.items() if mark in shown]
    return Table(("what", "result", "what qualifies it", "measured by"), lines, legend)


def formatted(template: str, result: Result) -> str:
    """A row's format string with the result's figures in it.

    Raises:
        ValueError: it names a figure that the result does not have, or an unknown format.
    """
    values: dict[str, Any] = {name: Figure(value) for name, value in result.figures.items()}
    values |= {"num_seeds": len(result.body["seeds"]), "config": result.body["config"]}
    try:
        return template.format_map(values)
    except (KeyError, ValueError) as error:
        raise ValueError(
            f"experiments/report/readme_tables.py wants {template!r} from the result of {result.name}, "
            f"which has {sorted(result.figures)}: {error!r}"
        ) from error


def _missed(results: Mapping[str, Result]) -> Table:
    rows = [
        (f"`{goal.experiment}`: `{goal.figure}`", str(goal), str(measured), outcome.value)
        for goal, measured, outcome in outcomes(results)
        if outcome.is_short
    ]
    return Table(("figure", "goal", "measured", "outcome"), rows)


def _papers(results: Mapping[str, Result]) -> Table:
    rows = [
        (
            claim.subject,
            f"{claim.paper}: {claim.claim} ({claim.known.value})",
            _ours(claim, result),
            claim.differs,
        )
        for claim in CLAIMS
        if claim.experiment in results
        for result in [results[claim.experiment]]
    ]
    return Table(("", "the papers", "here", "what differs, and why"), rows)


def _ours(claim: PaperClaim, result: Result) -> str:
    shown = [f"{text} (`{figure}`)" for figure, text in claim.answers(result)]
    return ", ".join(shown) or f"the picture of `{result.name}`"


def filled(name: str, text: str, tables: Mapping[str, Table]) -> str:
    """A README with every marked table as it should be.

    Args:
        name: of the README, for messages.
        text: of the README.
        tables: by the name that the markers use.

    Raises:
        ValueError: a marker names no table, or has no end of its own.
    """
    found = list(MARKED.finditer(text))
    whole = [match for match in found if not BEGINNING.search(match["table"])]
    if not len(whole) == len(BEGINNING.findall(text)) == len(ENDING.findall(text)):
        raise ValueError(
            f"{name}: each `<!-- results: NAME -->` needs its own line, and one `<!-- end -->` after it"
        )
    unknown = sorted({match["name"] for match in found} - tables.keys())
    if unknown:
        raise ValueError(f"{name} asks for the tables {unknown}; experiments/report makes {sorted(tables)}")
    return MARKED.sub(
        lambda match: f"{match[1]}\n{_spaced(tables[match['name']].markdown())}{match[4]}", text
    )


def _spaced(table: str) -> str:
    return f"{table}\n\n" if table else ""
