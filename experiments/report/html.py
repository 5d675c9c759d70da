"""The report as one HTML page that needs nothing else: style and pictures are in it.

First the five questions with their answers; then the READMEs' tables, all goals and the papers' claims; then
a section for each result: what it is, its picture, all its figures with their goals, notes, and, folded, the
circumstances.
"""

import base64
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Final

from experiments.report.goals import GOALS, Outcome, outcomes
from experiments.report.questions import answers
from experiments.report.readme import readme_tables
from experiments.report.results import Result
from experiments.report.tables import Table, inline, prose
from experiments.report.template import DETAILS, PAGE, PICTURE, SECTION, STYLE

TITLE: Final = "CPR: what was measured"
INTRODUCTION: Final = (
    "Made by `python -m experiments.report` from the stored results in `experiments/results`. Each was "
    "measured by the command it names, at the commit it names; the same command measures it again. A range "
    "in brackets runs from the lowest to the highest of several rounds; ± is half a 95 % confidence "
    "interval."
)
TITLES: Final = {
    "failures": "Failures and recovery",
    "saving": "Saving",
    "quality": "What recovery costs in time and accuracy",
    "speed": "Speed",
    "splitting": "Results instead of embeddings (`--sharding des`)",
    "communication": "Dense gradients over slow links",
    "papers": "Next to the papers",
}
"""Of the tables that have a section of their own."""


def html_page(results: Mapping[str, Result], other_pictures: Sequence[Path]) -> str:
    """The whole page.

    Args:
        results: by name.
        other_pictures: those that belong to no result.

    Raises:
        ValueError: a text, a goal or a claim names a figure that its finished result does not have.
    """
    tables = readme_tables(results)
    sections = {"answers": ("Five questions, and their answers", _answers(results))}
    sections |= {
        name: (inline(title), tables[name].html()) for name, title in TITLES.items() if tables[name].rows
    }
    sections["goals"] = "Goals, and whether they were reached", _goals(results)
    sections |= {name: (_title(result), _body(result)) for name, result in results.items()}
    if other_pictures:
        sections["pictures"] = "More pictures", "\n".join(map(_picture, other_pictures))
    contents = [f'<li><a href="#{escape(name)}">{title}</a></li>' for name, (title, _) in sections.items()]
    return PAGE.substitute(
        title=escape(TITLE),
        style=STYLE,
        introduction=inline(INTRODUCTION),
        contents="\n".join(contents),
        sections="\n".join(
            SECTION.substitute(name=escape(name), title=title, body=body)
            for name, (title, body) in sections.items()
        ),
    )


def _answers(results: Mapping[str, Result]) -> str:
    rows = answers(results).rows
    return "\n".join(f"<h3>{inline(question)}</h3>\n<p>{inline(answer)}</p>" for question, answer in rows)


def _goals(results: Mapping[str, Result]) -> str:
    found = outcomes(results)
    reached = [outcome for _, _, outcome in found]
    counts = [f"{reached.count(each)} {each.value}" for each in Outcome if each in reached]
    rows = [
        (goal.experiment, f"`{goal.figure}`", str(value), str(goal), _shown(outcome))
        for goal, value, outcome in found
    ]
    table = Table(("experiment", "figure", "measured", "goal", "outcome"), rows).html()
    count = f"Of {len(found)} goals, which the project's issues set: {'; '.join(counts)}."
    return f"<p>{count}</p>\n{table}" if found else "<p>No result with a goal is finished yet.</p>"


def _title(result: Result) -> str:
    """The first line of the experiment's docstring, without the command."""
    first_line = result.description.split("\n", maxsplit=1)[0]
    return inline(first_line.split(": `python", maxsplit=1)[0].rstrip(".") or result.name)


def _body(result: Result) -> str:
    parts = [prose(result.description.partition("\n")[2])]
    if result.is_finished:
        parts += [*map(_picture, result.pictures), _figures(result)]
    else:
        num_rows = len(result.body["rows"])
        parts.append(f"<p><strong>Not finished</strong>: {num_rows} rows so far, no figures yet.</p>")
    if result.body["notes"]:
        notes = [f"- `{name}`: {note}" for name, note in result.body["notes"].items()]
        parts.append("<h3>Notes</h3>\n" + prose("\n".join(notes)))
    facts = [("measured by", result.provenance), ("finished", result.body["finished"] or "no")]
    facts += [*result.circumstances(), ("stored in", f"`experiments/results/{result.name}.json`")]
    facts += [(f"config: {name}", str(value)) for name, value in result.body["config"].items()]
    parts.append(DETAILS.substitute(summary="Command and circumstances", body=Table(("", ""), facts).html()))
    return "\n".join(filter(None, parts))


def _figures(result: Result) -> str:
    """Each figure with its range and, where one was set, its goal."""
    goals = {goal.figure: goal for goal in GOALS if goal.experiment == result.name}
    rows = []
    for figure, measured in result.main_figures().items():
        goal = goals.get(figure)
        aim = (str(goal), _shown(goal.outcome(measured))) if goal else ("", "")
        rows.append((f"`{figure}`", str(measured), *aim))
    return Table(("figure", "measured", "goal", "outcome"), rows).html()


def _shown(outcome: Outcome) -> str:
    """Goals that were missed stand out."""
    return f"**{outcome.value}**" if outcome.is_short else outcome.value


def _picture(path: Path) -> str:
    name, data = escape(path.stem), base64.b64encode(path.read_bytes()).decode()
    return PICTURE.substitute(alt=name, data=data, caption=f"<code>{name}.png</code>")
