"""The README's tables say what the results say; its markers are checked; its prose is left alone."""

from string import Formatter

import pytest

from experiments.harness.record import Record
from experiments.report.readme import Figure, filled, formatted, readme_tables
from experiments.report.readme_tables import TABLES
from experiments.report.results import read_results


def tables_of(folder):
    return readme_tables(read_results(folder))


def store(folder, name, figures, config=None, seeds=(1, 2, 3), notes=None):
    Record(name, config or {}, seeds=seeds, folder=folder).finish(figures, notes)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["pytest"])  # results name the arguments they were measured with
    store(tmp_path, "precision", {"auc_bf16_minus_fp32": 0.00031, "auc_bf16_minus_fp32_ci": 0.00084})
    store(tmp_path, "caching", {"second_epoch_speedup": 7.33, "first_epoch_ratio": 1.2})
    return tmp_path


def test_a_table_has_the_rows_whose_results_are_there(folder):
    lines = tables_of(folder)["speed"].splitlines()
    assert lines[0] == "| what | result | command |"
    assert [line.split(" | ")[:2] for line in lines[2:]] == [
        ["| AUC of mixed precision minus fp32, 3 seeds", "**+0.0003**, 95 % interval ±0.0008"],
        [
            "| second epoch from the cache, over slow storage",
            "**7.3 x** faster; the first takes 1.20 x the time",
        ],
    ]
    assert "python -m experiments.precision" in lines[2]


def test_a_table_without_results_is_empty(folder):
    tables = tables_of(folder)
    assert set(tables) == {*TABLES, "evidence", "missed", "paper"}
    assert (tables["saving"], tables["brain"], tables["paper"]) == ("", "", "")
    assert tables["evidence"] == tables["speed"]


def test_an_unfinished_result_is_left_out(folder):
    Record("memory_growth", {}, seeds=[1], folder=folder).measure("a", lambda: {"rss": 1})
    assert "memory" not in tables_of(folder)["speed"]


def test_missed_goals_have_a_table(folder):
    lines = tables_of(folder)["missed"].splitlines()[2:]
    assert lines == ["| `caching`: `first_epoch_ratio` | at most 1 | 1.2 | missed |"]


def test_the_papers_figures_have_a_table(folder):
    store(folder, "recovery_soak", SOAK)
    (line,) = tables_of(folder)["paper"].splitlines()[2:]
    assert "(read in the paper's abstract)" in line
    assert "-3.01e-05 (`soak_auc_delta`)" in line


SOAK = {
    "soak_minutes": 28.8,
    "soak_failures": 23,
    "soak_partitions": 2,
    "soak_pauses": 3,
    "soak_outages": 4,
    "soak_rows_wrong": 0,
    "soak_nodes_failed": 0,
    "soak_auc_delta": -3.009e-05,
    "soak_pls": 0.0035,
    "soak_leftovers": 0,
}


def test_figures_stand_in_what_was_measured_too(folder):
    store(folder, "recovery_soak", SOAK)
    text = tables_of(folder)["failures"]
    assert "| 29 minutes of training on two nodes with 23 failures" in text
    assert "2 partitions, 3 pauses of a node, 4 outages of storage" in text
    assert "AUC **-3.0e-05** at a PLS of **0.0035**; rows that were not what they had to be: 0;" in text


def test_the_command_of_neighbouring_rows_is_named_once(folder):
    figures = {"ratio_to_torchrec": 14.17, "ratio_to_polars": 0.796, "rows_per_s": 701_564.5}
    store(folder, "preparation", figures)
    lines = [
        line for line in tables_of(folder)["speed"].splitlines() if "**14.2 x**" in line or "702" in line
    ]
    assert "python -m experiments.preparation" in lines[0]
    assert lines[1].endswith("| **0.80 x**; 702 thousand rows/s | same |")


def test_a_figure_that_a_result_lacks_is_an_error(folder):
    store(folder, "preparation", {"ratio_to_torchrec": 14.17, "ratio_to_polars": 0.796})
    with pytest.raises(ValueError, match=r"the result of preparation.*'rows_per_s'"):
        tables_of(folder)


ROWS = [row for rows in TABLES.values() for row in rows]


def fields(row):
    """What a row's format strings ask for."""
    return {name for _, name, _, _ in Formatter().parse(row.what + row.result) if name}


def test_every_row_can_be_made_once_its_figures_are_there(tmp_path):
    figures, config = {}, {"rounds": 3, "restarts": 20, "train.max_steps": 10}
    for row in ROWS:
        wanted = {name for name in fields(row) if name != "num_seeds" and not name.startswith("config[")}
        figures.setdefault(row.experiment, {}).update(dict.fromkeys(wanted, 0.5))
    for name, values in figures.items():
        store(tmp_path, name, values, config)
    results = read_results(tmp_path)
    for row in ROWS:
        text = formatted(row.what, results[row.experiment]) + formatted(row.result, results[row.experiment])
        assert not {"{", "}"} & set(text), row


@pytest.mark.parametrize(
    ("value", "template", "text"),
    [
        (0.0123, "{:.1%}", "1.2 %"),
        (508_616_704, "{:,.0f/1e6} MB", "509 MB"),
        (-4.96e-5, "{:+.1f/1e-4}", "-0.5"),
        (None, "{:.2f}", "not measured"),
    ],
)
def test_formats_of_figures(value, template, text):
    assert template.format(Figure(value)) == text


MARKED = """Before.
<!-- results: speed -->

old

<!-- end -->
Between.
<!-- results: empty -->
<!-- end -->
"""


def test_only_what_is_between_markers_changes():
    text = filled(MARKED, {"speed": "| new |", "empty": ""})
    assert text == MARKED.replace("old", "| new |").replace("empty -->\n", "empty -->\n\n")
    assert filled(text, {"speed": "| new |", "empty": ""}) == text


def test_what_a_table_holds_is_no_pattern():
    assert r"\1 \g<name>" in filled(MARKED, {"speed": r"\1 \g<name>", "empty": ""})


def test_an_unknown_table_is_named():
    with pytest.raises(ValueError, match=r"asks for the tables \['empty'\].*\['speed'\]"):
        filled(MARKED, {"speed": ""})


@pytest.mark.parametrize(
    "text",
    [
        "<!-- results: speed -->\nnever ends",
        "<!-- results: speed -->\n<!-- results: speed -->\n<!-- end -->\n",
        "<!-- results: speed --> on the same line <!-- end -->",
        "<!-- results: -->\n<!-- end -->\n",
        "<!-- end -->\n",
    ],
)
def test_markers_that_do_not_fit_are_refused(text):
    with pytest.raises(ValueError, match="needs its own line, and one"):
        filled(text, {"speed": ""})
