"""The little markdown that docstrings use, as HTML."""

from experiments.report.prose import inline, prose


def test_paragraphs_bullets_and_code():
    text = """One line
and its second.

Figures:

- `a`, `b`: a long
  bullet.
- `c`: another.
After."""
    assert prose(text) == "\n".join(
        [
            "<p>One line and its second.</p>",
            "<p>Figures:</p>",
            "<ul>",
            "<li><code>a</code>, <code>b</code>: a long bullet.</li>",
            "<li><code>c</code>: another. After.</li>",
            "</ul>",
        ]
    )


def test_nothing_gives_nothing():
    assert prose("") == ""


def test_markup_is_escaped_within_code_too():
    assert inline('a < b and `<x> & "y"`') == "a &lt; b and <code>&lt;x&gt; &amp; &quot;y&quot;</code>"


def test_a_lone_backtick_stays():
    assert inline("a ` b") == "a ` b"
