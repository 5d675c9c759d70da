"""Figures next to a paper's claim are shown in the paper's units."""

import pytest

from experiments.report.papers import Known, PaperClaim
from experiments.report.results import read_results


@pytest.mark.parametrize(
    ("figure", "percent", "shown"),
    [
        ("share", False, "0.0053"),
        ("share", True, "0.53 %"),
        ("none", True, "not measured"),
        ("auc", False, "-0.0001 ± 0.0002"),
    ],
)
def test_figures_are_shown_in_the_papers_units(store, tmp_path, figure, percent, shown):
    store("invented", {"share": 0.0053, "none": None, "auc": -0.0001, "auc_ci": 0.0002}, {"none": "too slow"})
    texts = {"subject": "s", "claim": "c", "known": Known.READ, "differs": "d"}
    claim = PaperClaim(experiment="invented", figures=(figure,), percent=percent, **texts)
    assert claim.answers(read_results(tmp_path)["invented"]) == [(figure, shown)]
