"""Tables and text of the report, written once as markdown cells and rendered as markdown or as HTML.

Cells and docstrings use three pieces of markdown: `code`, **bold** and bullets that begin with `- `.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape


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

    def html(self) -> str:
        """The table in HTML, its cells escaped; empty without rows."""
        if not self.rows:
            return ""
        header = "".join(f"<th>{inline(cell)}</th>" for cell in self.header)
        rows = "\n".join(
            "<tr>" + "".join(f"<td>{inline(cell)}</td>" for cell in row) + "</tr>" for row in self.rows
        )
        legend = "".join(f"\n<p><small>{inline(line)}</small></p>" for line in self.legend)
        table = f"<table>\n<thead><tr>{header}</tr></thead>\n<tbody>\n{rows}\n</tbody>\n</table>"
        return f'<div class="scroll">{table}</div>{legend}'


def inline(text: str) -> str:
    """One line of markdown as HTML: escaped, with `code` and **bold**."""
    text = re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text))
    return re.sub(r"\*\*([^*]+)\*\*", r"<strong>\1</strong>", text)


def prose(text: str) -> str:
    """A docstring as HTML: paragraphs and bullets, everything that HTML would read as markup escaped."""
    html: list[str] = []
    bullets: list[str] = []
    for block in [*_blocks(text), []]:
        if block and block[0].startswith("- "):
            bullets.append(f"<li>{inline(' '.join(block)[2:])}</li>")
            continue
        if bullets:
            html.append("<ul>\n" + "\n".join(bullets) + "\n</ul>")
            bullets = []
        if block:
            html.append(f"<p>{inline(' '.join(block))}</p>")
    return "\n".join(html)


def _blocks(text: str) -> list[list[str]]:
    """Lines that belong together: a paragraph, or one bullet with its continuation."""
    blocks: list[list[str]] = [[]]
    for line in text.splitlines():
        if not line.strip() or line.startswith("- "):
            blocks.append([])
        if line.strip():
            blocks[-1].append(line.strip())
    return [block for block in blocks if block]
