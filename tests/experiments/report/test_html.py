"""The HTML page is whole, needs nothing from elsewhere, hides nothing, and escapes what it is given."""

import base64
from html.parser import HTMLParser

import pytest

from experiments.report.html import html_page
from experiments.report.results import pictures_by_name, read_results

VOID = {"meta", "img", "br", "link", "input", "hr"}
PICTURE = b"\x89PNG invented"


class Page(HTMLParser):
    """The tags and attributes of a page; fails on a tag that is closed by another one or never."""

    def __init__(self, html):
        super().__init__()
        self.tags, self.attributes, self._open = [], [], []
        self.feed(html)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes.append(dict(attributes))
        if tag not in VOID:
            self._open.append(tag)

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def values(self, name):
        return [each[name] for each in self.attributes if name in each]


def page_of(folder):
    results = read_results(folder)
    return html_page(results, pictures_by_name(folder, results)[""])


@pytest.fixture
def html(store, tmp_path):
    figures = {"second_epoch_speedup": 7.0, "first_epoch_ratio": 1.5}
    store("caching", figures, notes={"first_epoch_ratio": "of a slow disk"}, config={"hours": 56})
    store("throughput")
    for stem in ("caching", "throughput", "learning_curve"):
        (tmp_path / f"{stem}.png").write_bytes(PICTURE)
    return page_of(tmp_path)


def section(html, name):
    return html.split(f'<section id="{name}">')[1].split("</section>")[0]


def test_the_page_is_whole_and_leads_to_every_section_the_questions_first(html):
    page = Page(html)
    assert html.startswith("<!doctype html>")
    assert not {"script", "link", "iframe"} & set(page.tags)
    assert "url(" not in html
    data = f"data:image/png;base64,{base64.b64encode(PICTURE).decode()}"
    assert page.values("src") == [data, data]  # of caching, and the one that belongs to none
    places = page.values("id")
    assert places == ["contents", "answers", "speed", "goals", "caching", "throughput", "pictures"]
    assert page.values("href") == [f"#{place}" for place in places[1:]]
    assert section(html, "answers").count("<h3>") == 5


def test_a_result_has_its_docstring_figures_goals_and_notes_and_its_circumstances_folded(html):
    assert "1 reached; 1 missed." in section(html, "goals")
    open_part, folded = section(html, "caching").split("<details>")
    assert "<h2>What the cache gains on slow storage</h2>" in open_part
    assert "<li><code>first_epoch_ratio</code>: median over rounds" in open_part
    assert "<td>7</td>\n<td>at least 5</td>\n<td>reached</td>" in open_part
    assert "<td>1.5</td>\n<td>at most 1</td>\n<td><strong>missed</strong></td>" in open_part
    assert "<code>first_epoch_ratio</code>: of a slow disk" in open_part
    assert "python -m experiments.caching" in folded
    assert "config: hours" in folded


def test_an_unfinished_result_says_so_and_shows_neither_figures_nor_pictures(html):
    text = section(html, "throughput")
    assert "<strong>Not finished</strong>: 1 rows so far" in text
    assert "<img" not in text
    assert "<th>figure</th>" not in text


def test_texts_of_results_are_escaped(store, tmp_path):
    evil = "<b onclick='x()'>&</b>"
    store("invented", {evil: 1.0, "none": None}, {"none": evil, evil: "x"}, {evil: evil})
    html = page_of(tmp_path)
    Page(html)
    assert "<b " not in html
    assert "&lt;b onclick=" in html
