"""Docstrings as HTML: paragraphs, bullets and `code`, which is all the markdown that they use."""

import re
from html import escape

Block = list[str]
"""Lines that belong together: a paragraph, or one bullet with its continuation."""


def prose(text: str) -> str:
    """HTML of a docstring; everything that HTML would read as markup is escaped."""
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


def inline(text: str) -> str:
    """One line: escaped, with `code` set as code."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text))


def _blocks(text: str) -> list[Block]:
    """The text cut at empty lines and before each bullet."""
    blocks: list[Block] = [[]]
    for line in text.splitlines():
        if not line.strip() or line.startswith("- "):
            blocks.append([])
        if line.strip():
            blocks[-1].append(line.strip())
    return [block for block in blocks if block]
