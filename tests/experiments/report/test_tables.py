"""Tables and docstrings come out as valid markdown and HTML."""

from experiments.report.tables import Table, inline, prose


def test_a_table_in_markdown_escapes_bars_and_ends_with_its_legend():
    table = Table(("a", "b"), [("x|y", "z")], ["† old"])
    assert table.markdown() == "| a | b |\n| --- | --- |\n| x\\|y | z |\n\n† old"


def test_a_table_in_html_escapes_its_cells():
    html = Table(("a",), [("<b> `x` **y**",)], ["† old"]).html()
    assert "<td>&lt;b&gt; <code>x</code> <strong>y</strong></td>" in html
    assert html.endswith("<p><small>† old</small></p>")


def test_a_table_without_rows_is_empty():
    assert (Table(("a",), []).markdown(), Table(("a",), []).html()) == ("", "")


def test_paragraphs_bullets_and_code():
    text = """One line
and its second.

Figures:

- `a`, `b`: a long
  bullet.
- `c`: another.
After."""
    assert prose(text).split("\n") == [
        "<p>One line and its second.</p>",
        "<p>Figures:</p>",
        "<ul>",
        "<li><code>a</code>, <code>b</code>: a long bullet.</li>",
        "<li><code>c</code>: another. After.</li>",
        "</ul>",
    ]


def test_markup_is_escaped_within_code_too():
    assert inline('a < b and `<x> & "y"`') == "a &lt; b and <code>&lt;x&gt; &amp; &quot;y&quot;</code>"
