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


def section(html, name):
    return html.split(f'<section id="{name}">')[1].split("</section>")[0]


@pytest.fixture
def folder(store, tmp_path):
    figures = {"second_epoch_speedup": 7.0, "first_epoch_ratio": 1.5}
    store("caching", figures, notes={"first_epoch_ratio": "of a slow disk"}, config={"hours": 56})
    store("throughput")
    for stem in ("caching", "throughput", "learning_curve"):
        (tmp_path / f"{stem}.png").write_bytes(PICTURE)
    return tmp_path


def test_the_page_is_whole_and_needs_nothing_from_elsewhere(folder):
    html = page_of(folder)
    page = Page(html)
    assert html.startswith("<!doctype html>")
    assert not {"script", "link", "iframe"} & set(page.tags)
    assert "url(" not in html
    data = f"data:image/png;base64,{base64.b64encode(PICTURE).decode()}"
    assert page.values("src") == [data, data]  # of caching, and the one that belongs to none


def test_the_five_questions_come_first_and_the_contents_lead_to_every_section(folder):
    page = Page(page_of(folder))
    places = page.values("id")
    assert places == ["contents", "answers", "speed", "goals", "caching", "throughput", "pictures"]
    assert page.values("href") == [f"#{place}" for place in places[1:]]
    assert section(page_of(folder), "answers").count("<h3>") == 5


def test_goals_that_were_missed_stand_next_to_those_that_were_reached(folder):
    html = page_of(folder)
    assert "Of 2 goals, which the project's issues set: 1 reached; 1 missed." in section(html, "goals")
    text = section(html, "caching")
    assert "<td>7</td><td>at least 5</td><td>reached</td>" in text
    assert "<td>1.5</td><td>at most 1</td><td><strong>missed</strong></td>" in text


def test_notes_are_open_and_circumstances_folded(folder):
    open_part, folded = section(page_of(folder), "caching").split("<details>")
    assert "<code>first_epoch_ratio</code>: of a slow disk" in open_part
    assert "python -m experiments.caching" in folded
    assert "config: hours" in folded


def test_an_unfinished_result_says_so_and_shows_neither_figures_nor_pictures(folder):
    text = section(page_of(folder), "throughput")
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


def test_the_experiments_docstring_is_its_title_and_introduction(folder):
    text = section(page_of(folder), "caching")
    assert "<h2>What the cache gains on slow storage</h2>" in text
    assert "<li><code>first_epoch_ratio</code>: median over rounds" in text
