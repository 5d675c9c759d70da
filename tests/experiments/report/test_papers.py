"""What is printed as a paper's claim says how it is known; our side is shown in its units."""

import pytest

from experiments.harness.record import Record
from experiments.report.papers import COMPARISONS, Comparison, Known
from experiments.report.results import read_results


def comparison(**fields):
    defaults = {"experiment": "invented", "subject": "s", "claim": "c", "known": Known.READ, "differs": "d"}
    return Comparison(**(defaults | fields))


@pytest.fixture
def result(tmp_path):
    figures = {"share": 0.0053, "none": None, "auc": -0.0001, "auc_ci": 0.0002}
    Record("invented", {}, seeds=[1], folder=tmp_path).finish(figures, {"none": "too slow"})
    return read_results(tmp_path)["invented"]


def test_our_side_is_shown_as_the_papers(result):
    assert comparison(figures=("share",)).answers(result) == [("share", "0.0053")]
    assert comparison(figures=("share", "none"), percent=True).answers(result) == [
        ("share", "0.53 %"),
        ("none", "not measured"),
    ]
    assert comparison(figures=("auc",)).answers(result) == [("auc", "-0.0001 ± 0.0002")]
    assert comparison().answers(result) == []


def test_a_figure_that_the_result_lacks_is_an_error(result):
    with pytest.raises(ValueError, match="no figure 'other'"):
        comparison(figures=("other",)).answers(result)


def test_every_comparison_says_what_differs():
    for each in COMPARISONS:
        assert each.differs.endswith("."), each
        assert len(each.differs) > 40, each
