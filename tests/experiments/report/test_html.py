"""The HTML page is whole, needs nothing from elsewhere, hides nothing, and escapes what it is given."""

import base64
from html.parser import HTMLParser

import pytest

from experiments.harness.record import Record
from experiments.report.html import html_page
from experiments.report.results import pictures_by_name, read_results

VOID = {"meta", "img", "br", "link", "input", "hr"}
PICTURE = b"\x89PNG invented"


class Page(HTMLParser):
    """What the page consists of; fails on a tag that is closed by another one or never."""

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


def store(folder, name, figures, notes=None, config=None):
    Record(name, config or {}, seeds=[1, 2], folder=folder).finish(figures, notes)


def page_of(folder):
    results = read_results(folder)
    return html_page(results, pictures_by_name(folder, results)[""])


def section(html, name):
    return html.split(f'<section id="{name}">')[1].split("</section>")[0]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["pytest"])  # results name the arguments they were measured with
    store(tmp_path, "caching", {"second_epoch_speedup": 7.0, "first_epoch_ratio": 1.5})
    store(
        tmp_path,
        "overhead",
        {
            **{"overhead_full": 0.085, "overhead_cpr": 0.0053, "overhead_partial_naive": 0.044},
            **{"overhead_cpr_background": 0.004, "auc_delta_mfu": -0.0001, "auc_delta_mfu_ci": 0.0002},
            **{"auc_delta_ssu": -0.0003, "auc_delta_ssu_ci": 0.0002},
            **{"auc_delta_mfu_sgd": -0.0003, "auc_delta_mfu_sgd_ci": 0.0002, "auc_delta_mfu_dcnv2": 0.0},
        },
        notes={"overhead_full": "accounted, not lived through"},
        config={"hours": 56},
    )
    Record("throughput", {}, seeds=[1], folder=tmp_path).measure("a", lambda: {"samples_per_s": 99})
    for stem in ("caching", "throughput", "learning_curve"):
        (tmp_path / f"{stem}.png").write_bytes(PICTURE)
    return tmp_path


def test_the_page_is_whole_and_needs_nothing_from_elsewhere(folder):
    html = page_of(folder)
    page = Page(html)
    assert html.startswith("<!doctype html>")
    assert not {"script", "link", "iframe"} & set(page.tags)
    assert "url(" not in html
    assert "@import" not in html
    data = f"data:image/png;base64,{base64.b64encode(PICTURE).decode()}"
    assert page.values("src") == [data, data]  # of caching, and the one that belongs to none


def test_the_contents_lead_to_every_section_and_links_stay_beside_the_page(folder):
    page = Page(page_of(folder))
    places = page.values("id")
    links = page.values("href")
    assert places == ["contents", "goals", "caching", "overhead", "throughput", "pictures"]
    assert [link for link in links if link.startswith("#")][:5] == [f"#{place}" for place in places[1:]]
    assert {link[1:] for link in links if link.startswith("#")} <= set(places)
    files = {link for link in links if not link.startswith("#")}
    assert files == {"caching.json", "overhead.json", "throughput.json"}


def test_goals_that_were_missed_stand_beside_those_that_were_met(folder):
    html = page_of(folder)
    goals = section(html, "goals")
    assert "Of 6 goals, which the project's issues set: 3 met; 3 missed." in goals
    for where in (goals, section(html, "caching")):
        assert '<td>7</td><td>at least 5</td><td><span class="met">met</span></td>' in where
        assert '<td>1.5</td><td>at most 1</td><td><span class="missed">missed</span></td>' in where


def test_the_paper_stands_beside_ours_with_what_differs(folder):
    text = section(page_of(folder), "overhead")
    assert "8.2 to 8.5 % of training time<br><small>read in the paper&#x27;s abstract</small>" in text
    assert "8.5 %<br><small><code>overhead_full</code></small>" in text
    assert "agrees by construction" in text
    assert "-0.0003 ± 0.0002<br><small><code>auc_delta_ssu</code></small>" in text
    assert "Beside the paper" not in section(page_of(folder), "caching")


def test_notes_are_open_and_circumstances_folded(folder):
    text = section(page_of(folder), "overhead")
    open_part, folded = text.split("<details>")
    assert "<code>overhead_full</code>: accounted, not lived through" in open_part
    assert "python -m experiments.overhead" in folded
    assert "config: hours" in folded
    assert "1, 2" in folded


def test_an_unfinished_result_says_so_and_shows_neither_figures_nor_pictures(folder):
    text = section(page_of(folder), "throughput")
    assert "Not finished: 1 rows so far" in text
    assert "<img" not in text
    assert "<th>figure</th>" not in text


def test_an_experiment_without_a_result_is_absent(folder):
    (folder / "overhead.json").unlink()
    assert "overhead" not in page_of(folder)


def test_without_any_goal_there_is_no_empty_table(tmp_path):
    store(tmp_path, "invented", {"speed": 1.0})
    assert "No result with a goal is finished yet" in section(page_of(tmp_path), "goals")


def test_what_results_say_is_text_not_markup(tmp_path):
    evil = "<b onclick='x()'>&</b>"
    store(tmp_path, "invented", {evil: 1.0, "none": None}, {"none": evil, evil: "x"}, {evil: evil})
    html = page_of(tmp_path)
    Page(html)
    assert "<b " not in html
    assert "&lt;b onclick=" in html


def test_the_experiments_own_words_are_its_title_and_introduction(folder):
    text = section(page_of(folder), "caching")
    assert "<h2>What the cache is worth on slow storage</h2>" in text
    assert "<li><code>first_epoch_ratio</code>: median over rounds" in text
