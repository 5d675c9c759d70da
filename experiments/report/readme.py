"""Tables of the READMEs that say exactly what the stored results say; `tables.toml` has their texts.

A table stands between `<!-- results: NAME -->` and `<!-- end -->`; what is there is replaced by what
`readme_tables` makes of the stored results. Everything else in a README is left alone.
"""

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from string import Formatter
from typing import Any, Final

from experiments.report.goals import outcomes
from experiments.report.results import MARKS, Result, finished_only

MARKED: Final = re.compile(r"(<!-- results: (?P<name>[\w-]+) -->\n)(?P<table>.*?)(<!-- end -->)", re.DOTALL)
BEGINNING: Final = re.compile(r"<!-- results:")
ENDING: Final = re.compile(r"<!-- end -->")

Texts = Sequence[Mapping[str, Any]]

TEXTS: Final[Mapping[str, Texts]] = tomllib.loads((Path(__file__).parent / "tables.toml").read_text())
PAPERS, ANSWERS = "papers", "answers"
ROWS: Final = {name: texts for name, texts in TEXTS.items() if name not in {PAPERS, ANSWERS}}
"""The tables whose rows are results."""


@dataclass(frozen=True)
class Table:
    """A header and rows of inline markdown, with lines of explanation below; `rows` may be empty."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    legend: Sequence[str] = ()

    def markdown(self) -> str:
        """The table in markdown, a bar within a cell escaped; empty without rows."""
        if not self.rows:
            return ""
        lines = [self.header, ["---"] * len(self.header), *self.rows]
        escaped = [" | ".join(cell.replace("|", "\\|") for cell in line) for line in lines]
        table = "\n".join(f"| {line} |" for line in escaped)
        return "\n\n".join([table, *self.legend])


def readme_tables(results: Mapping[str, Result]) -> dict[str, Table]:
    """Every table by the name that the markers use; without rows where nothing is measured.

    Besides those of `TEXTS`: `headline`, their most important rows; `missed`, the goals not reached.

    Raises:
        ValueError: a text names a figure that its finished result does not have.
    """
    finished = finished_only(results)
    rows = [row for table in ROWS.values() for row in table if row.get("headline")]
    tables = {name: _rows_table(rows, finished) for name, rows in {"headline": rows, **ROWS}.items()}
    return tables | {
        "missed": _missed(results),
        PAPERS: _papers(TEXTS[PAPERS], finished),
        ANSWERS: _answers(TEXTS[ANSWERS], finished),
    }


def _rows_table(rows: Texts, results: Mapping[str, Result]) -> Table:
    lines: list[tuple[str, ...]] = []
    shown, last = "", ""
    for row in rows:
        if row["experiment"] in results:
            result = results[row["experiment"]]
            texts = (formatted(row.get(each, ""), result) for each in ("what", "result", "caveat"))
            lines.append((*texts, "same" if result.provenance == last else result.provenance))
            last = result.provenance
            shown += last
    legend = [f"{mark} {meaning}." for mark, meaning in MARKS.items() if mark in shown]
    return Table(("what", "result", "what qualifies it", "measured by"), lines, legend)


def formatted(template: str, result: Result) -> str:
    """A format string with the result's figures in it.

    Raises:
        ValueError: it names a figure that the result does not have, or an unknown format.
    """
    values: dict[str, Any] = {name: result.measured(name) for name in result.figures}
    values |= {"num_seeds": len(result.body["seeds"]), "config": result.body["config"]}
    return _filled(template, values)


def _filled(template: str, values: Mapping[str, Any]) -> str:
    try:
        return template.format_map(values)
    except (KeyError, ValueError) as error:
        raise ValueError(
            f"experiments/report/tables.toml wants {template!r} of {sorted(values)}: {error!r}"
        ) from error


def _missed(results: Mapping[str, Result]) -> Table:
    rows = [
        (f"`{goal.experiment}`: `{goal.figure}`", str(goal), str(measured), outcome.value)
        for goal, measured, outcome in outcomes(results)
        if outcome.is_short
    ]
    return Table(("figure", "goal", "measured", "outcome"), rows)


def _papers(claims: Texts, results: Mapping[str, Result]) -> Table:
    """The papers' claims next to our figures."""
    rows = [
        (claim["subject"], claim["claim"], formatted(claim["here"], result), claim["differs"])
        for claim in claims
        if (result := results.get(claim["experiment"]))
    ]
    return Table(("", "the papers", "here", "what differs, and why"), rows)


def _answers(questions: Texts, results: Mapping[str, Result]) -> Table:
    """Every question with its answer, or with the experiments that have to be run first."""
    figures = {
        name: {figure: result.measured(figure) for figure in result.figures}
        for name, result in results.items()
    }
    rows = []
    for text in questions:
        needed = {name.partition("[")[0] for _, name, _, _ in Formatter().parse(text["answer"]) if name}
        if missing := sorted(needed - figures.keys()):
            answer = f"Not measured yet: needs the stored results of {', '.join(missing)}."
        else:
            answer = _filled(text["answer"], figures)
        rows.append((text["question"], answer))
    return Table(("question", "answer"), rows)


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
