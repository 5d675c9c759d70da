"""The report as one HTML page that needs nothing else: style and pictures are in it.

First the goals and what became of each; then a section a result: what it is, its picture, its figures with
their goals, the paper's figures beside them, notes, and, folded, the circumstances.
"""

import base64
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Final

from experiments.report.goals import GOALS, Verdict, outcomes
from experiments.report.papers import COMPARISONS, Comparison
from experiments.report.prose import inline, prose
from experiments.report.results import Result
from experiments.report.template import DETAILS, PAGE, PICTURE, SECTION, STYLE, TABLE

TITLE: Final = "CPR: what was measured"
INTRODUCTION: Final = (
    "Made by `python -m experiments.report` from the stored results in `experiments/results`. Each was "
    "measured by the command it names, at the commit it names; the same command measures it again. A range "
    "in brackets runs from the lowest to the highest of several rounds; ± is half a 95 % confidence interval."
)
CLASSES: Final = {
    Verdict.MET: "met",
    Verdict.MET_IN_PART: "part",
    Verdict.MISSED_IN_PART: "missed",
    Verdict.MISSED: "missed",
    Verdict.OPEN: "part",
}


def html_page(results: Mapping[str, Result], other_pictures: Sequence[Path]) -> str:
    """The whole page.

    Raises:
        ValueError: a goal or a comparison names a figure that its finished result does not have.
    """
    sections = {"goals": ("Goals, and what became of them", _goals(results))}
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


def _goals(results: Mapping[str, Result]) -> str:
    found = outcomes(results)
    if not found:
        return "<p>No result with a goal is finished yet.</p>"
    verdicts = [verdict for _, _, verdict in found]
    counts = [f"{verdicts.count(each)} {each.value}" for each in Verdict if each in verdicts]
    rows = [
        [
            f'<a href="#{escape(goal.experiment)}">{escape(goal.experiment)}</a>',
            f"<code>{escape(goal.figure)}</code>",
            escape(str(value)),
            escape(str(goal)),
            _verdict(verdict),
        ]
        for goal, value, verdict in found
    ]
    count = f"<p>Of {len(found)} goals, which the project's issues set: {'; '.join(counts)}.</p>"
    return f"{count}\n{_table(('experiment', 'figure', 'measured', 'goal', 'outcome'), rows)}"


def _title(result: Result) -> str:
    """What the experiment's module calls itself, without the command."""
    first_line = result.description.split("\n", maxsplit=1)[0]
    return inline(first_line.split(": `python", maxsplit=1)[0].rstrip(".") or result.name)


def _body(result: Result) -> str:
    parts = [_without_title(result.description)]
    if result.finished:
        parts += map(_picture, result.pictures)
        parts += [_figures(result), _comparisons(result)]
    else:
        parts.append(
            f'<p class="unfinished">Not finished: {result.num_rows} rows so far, no figures yet.</p>'
        )
    if result.notes:
        notes = [
            f"<li><code>{escape(name)}</code>: {inline(note)}</li>" for name, note in result.notes.items()
        ]
        parts.append("<h3>Notes</h3>\n<ul>\n" + "\n".join(notes) + "\n</ul>")
    parts.append(_details(result))
    return "\n".join(filter(None, parts))


def _without_title(description: str) -> str:
    return prose(description.partition("\n")[2])


def _figures(result: Result) -> str:
    """Each figure with its range and, where one was set, its goal."""
    goals = {goal.figure: goal for goal in GOALS if goal.experiment == result.name}
    rows = []
    for figure, measured in result.main_figures().items():
        goal = goals.get(figure)
        aim = [escape(str(goal)), _verdict(goal.verdict(measured))] if goal else ["", ""]
        rows.append([f"<code>{escape(figure)}</code>", escape(str(measured)), *aim])
    header: tuple[str, ...] = ("figure", "measured", "goal", "outcome")
    if not goals:
        header, rows = header[:2], [row[:2] for row in rows]
    return _table(header, rows) if rows else ""


def _comparisons(result: Result) -> str:
    """The paper's figures beside ours."""
    compared = [each for each in COMPARISONS if each.experiment == result.name]
    if not compared:
        return ""
    papers = dict.fromkeys(each.paper for each in compared)
    tables = [_beside(paper, [each for each in compared if each.paper == paper], result) for paper in papers]
    return "\n".join(["<h3>Beside the paper</h3>", *tables])


def _beside(paper: str, compared: Sequence[Comparison], result: Result) -> str:
    """One paper's figures beside ours."""
    rows = [
        [
            inline(each.subject),
            f"{inline(each.claim)}<br><small>{inline(each.known.value)}</small>",
            _ours(each, result),
            inline(each.differs),
        ]
        for each in compared
    ]
    return _table(("", paper, "here", "what differs, and why"), rows)


def _ours(comparison: Comparison, result: Result) -> str:
    if not comparison.figures:
        return "the picture above"
    return "<br>".join(
        f"{escape(text)}<br><small><code>{escape(figure)}</code></small>"
        for figure, text in comparison.answers(result)
    )


def _details(result: Result) -> str:
    facts = [("command", result.command), ("finished", result.finished or "no"), *result.circumstances()]
    facts += [(f"config: {name}", str(value)) for name, value in result.config.items()]
    rows = [[escape(label), f"<code>{escape(text)}</code>"] for label, text in facts]
    rows.append(["stored in", f'<a href="{escape(result.name)}.json">{escape(result.name)}.json</a>'])
    return DETAILS.substitute(summary="Command and circumstances", body=_table(("", ""), rows))


def _verdict(verdict: Verdict) -> str:
    return f'<span class="{CLASSES[verdict]}">{escape(verdict.value)}</span>'


def _picture(path: Path) -> str:
    name = escape(path.stem)
    return PICTURE.substitute(
        alt=name, data=base64.b64encode(path.read_bytes()).decode(), caption=f"<code>{name}.png</code>"
    )


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of cells that are HTML already."""
    lines = ["<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows]
    return TABLE.substitute(
        header="".join(f"<th>{escape(cell)}</th>" for cell in header), rows="\n".join(lines)
    )
