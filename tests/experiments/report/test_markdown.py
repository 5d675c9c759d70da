"""The markdown page shows what is finished, and says what is not."""

import pytest

from experiments.harness.record import Record
from experiments.report.markdown import markdown_page, table
from experiments.report.results import pictures_by_name, read_results


@pytest.fixture
def page(tmp_path):
    done = Record("precision", {"x": 1}, seeds=[3, 4], folder=tmp_path)
    done.measure("a", lambda: {"auc": 0.5})
    done.finish({"auc_bf16_minus_fp32": -0.00012345, "rate": 12345.6, "none": None}, {"none": "too slow"})
    open_one = Record("throughput", {"x": 1}, seeds=[1], folder=tmp_path)
    open_one.measure("a", lambda: {"samples_per_s": 99})
    for name in ("precision", "throughput", "learning_curve"):
        (tmp_path / f"{name}.png").write_bytes(b"")
    results = read_results(tmp_path)
    return markdown_page(results, pictures_by_name(tmp_path, results)[""])


def section(page, name):
    (found,) = [part for part in page.split("\n## ") if part.startswith(name)]
    return found


def test_a_finished_result_shows_its_figures_circumstances_and_picture(page):
    text = section(page, "precision")
    assert "| `auc_bf16_minus_fp32` | -0.0001234 |" in text
    assert "| `rate` | 12,346 |" in text
    assert "| `none` | not measured |" in text
    assert "`none`: too slow" in text
    assert "python -m experiments.precision" in text
    assert "3, 4" in text
    assert "![precision](precision.png)" in text
    assert "confidence interval" in text  # what the experiment says about its figures
    assert "not finished" not in text


def test_an_unfinished_result_is_marked_and_shows_no_figures(page):
    text = section(page, "throughput")
    assert "**not finished**: 1 rows so far" in text
    assert "| figure |" not in text
    assert "throughput.png" not in text  # a picture of an earlier result


def test_pictures_beside_the_results_are_shown_too(page):
    assert "![learning_curve](learning_curve.png)" in section(page, "More pictures")


def test_a_bar_within_a_cell_does_not_end_it():
    assert table(("a", "b"), [("x|y", "z")]) == "| a | b |\n| --- | --- |\n| x\\|y | z |"
