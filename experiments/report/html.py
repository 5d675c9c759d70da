"""The report as one HTML page that needs nothing else: style and pictures are in it.

First the five questions with their answers; then the READMEs' tables, all goals and the papers' claims; then
a section for each result: what it is, its picture, all its figures with their goals, notes, and, folded, the
circumstances. All of it is written in markdown, in which HTML is escaped.
"""

import base64
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from string import Template
from typing import Final

from markdown_it import MarkdownIt

from experiments.report.goals import GOALS, Outcome, outcomes
from experiments.report.readme import Table, readme_tables
from experiments.report.results import Result

PAGE: Final = Template((Path(__file__).parent / "page.html").read_text())
TITLES: Final = {
    "failures": "Failures and recovery",
    "saving": "Saving",
    "quality": "What recovery costs in time and accuracy",
    "speed": "Speed",
    "growth": "What grows as the work grows",
    "unevenness": "Workers and data that are not alike",
    "renting": "How many workers to rent",
    "splitting": "Results instead of embeddings (`--sharding des`)",
    "communication": "Dense gradients over slow links",
    "papers": "Next to the papers",
}
"""Headings of the tables that have a section of their own, by the name of the table."""
MARKDOWN: Final = MarkdownIt("commonmark", {"html": False}).enable("table")


def html_page(results: Mapping[str, Result], other_pictures: Sequence[Path]) -> str:
    """The whole page.

    Args:
        results: by name.
        other_pictures: those that belong to no result.

    Raises:
        ValueError: a text or a goal names a figure that its finished result does not have.
    """
    tables = readme_tables(results)
    answers = [f"### {question}\n\n{answer}" for question, answer in tables["answers"].rows]
    sections = {"answers": ("Five questions, and their answers", _rendered(*answers))}
    sections |= {
        name: (title, _rendered(tables[name].markdown()))
        for name, title in TITLES.items()
        if tables[name].rows
    }
    sections["goals"] = "Goals, and whether they were reached", _rendered(*_goals(results))
    sections |= {name: (_title(result), _body(result)) for name, result in results.items()}
    if other_pictures:
        sections["pictures"] = "More pictures", "\n".join(map(_picture, other_pictures))
    titles = {name: MARKDOWN.renderInline(title) for name, (title, _) in sections.items()}
    return PAGE.substitute(
        contents="\n".join(f'<li><a href="#{name}">{title}</a></li>' for name, title in titles.items()),
        sections="\n".join(
            f'<section id="{name}">\n<h2>{titles[name]}</h2>\n{body}\n</section>'
            for name, (_, body) in sections.items()
        ),
    )


def _rendered(*blocks: str) -> str:
    html: str = MARKDOWN.render("\n\n".join(blocks))
    return html


def _goals(results: Mapping[str, Result]) -> list[str]:
    found = outcomes(results)
    if not found:
        return ["No result with a goal is finished yet."]
    reached = [outcome for _, _, outcome in found]
    counts = [f"{reached.count(each)} {each.value}" for each in Outcome if each in reached]
    rows = [
        (goal.experiment, f"`{goal.figure}`", str(value), str(goal), _shown(outcome))
        for goal, value, outcome in found
    ]
    return [
        f"Of {len(found)} goals, which the project's issues set: {'; '.join(counts)}.",
        Table(("experiment", "figure", "measured", "goal", "outcome"), rows).markdown(),
    ]


def _title(result: Result) -> str:
    """The first line of the experiment's docstring, without the command."""
    first_line = result.description.split("\n", maxsplit=1)[0]
    return first_line.split(": `python", maxsplit=1)[0].rstrip(".") or result.name


def _body(result: Result) -> str:
    parts = [_rendered(result.description.partition("\n")[2])]
    if result.is_finished:
        parts += [*map(_picture, result.pictures), _rendered(_figures(result))]
    else:
        parts.append(_rendered(f"**Not finished**: {len(result.body['rows'])} rows so far, no figures yet."))
    if result.body["notes"]:
        notes = [f"- `{name}`: {note}" for name, note in result.body["notes"].items()]
        parts.append(_rendered("### Notes", "\n".join(notes)))
    facts = [("measured by", result.provenance), ("finished", result.body["finished"] or "no")]
    facts += [*result.circumstances(), ("stored in", f"`experiments/results/{result.name}.json`")]
    facts += [(f"config: {name}", str(value)) for name, value in result.body["config"].items()]
    folded = _rendered(Table(("", ""), facts).markdown())
    parts.append(f"<details>\n<summary>Command and circumstances</summary>\n{folded}</details>")
    return "\n".join(parts)


def _figures(result: Result) -> str:
    """Each figure with its range and, where one was set, its goal."""
    goals = {goal.figure: goal for goal in GOALS if goal.experiment == result.name}
    rows = []
    for figure, measured in result.main_figures().items():
        goal = goals.get(figure)
        aim = (str(goal), _shown(goal.outcome(measured))) if goal else ("", "")
        rows.append((f"`{figure}`", str(measured), *aim))
    return Table(("figure", "measured", "goal", "outcome"), rows).markdown()


def _shown(outcome: Outcome) -> str:
    """Goals that were missed stand out."""
    return f"**{outcome.value}**" if outcome.is_short else outcome.value


def _picture(path: Path) -> str:
    name, data = escape(path.stem), base64.b64encode(path.read_bytes()).decode()
    return (
        f'<figure>\n<img alt="{name}" src="data:image/png;base64,{data}">\n'
        f"<figcaption><code>{name}.png</code></figcaption>\n</figure>"
    )
