"""The READMEs' tables say what the results say; their markers are checked; the prose is left alone."""

import pytest

from experiments.harness.record import RESULTS
from experiments.report.readme import TEXTS, Table, filled, readme_tables
from experiments.report.results import FigureValue, read_results


@pytest.fixture
def tables_of(store, tmp_path):
    store("precision", {"auc_bf16_minus_fp32": 0.00031, "auc_bf16_minus_fp32_ci": 0.00084})
    store("caching", {"second_epoch_speedup": 7.33, "first_epoch_ratio": 1.2})
    return lambda: readme_tables(read_results(tmp_path))


def test_a_table_has_the_rows_whose_results_are_there(tables_of):
    table = tables_of()["speed"]
    assert [row[:2] for row in table.rows] == [
        ("AUC of mixed precision minus fp32, 3 seeds, in 1e-4", "**+3.1 ± 8.4**"),
        ("second epoch from the cache, over slow storage", "**7.3 x** faster"),
    ]
    assert "python -m experiments.precision" in table.rows[0][3]


def test_unfinished_and_absent_results_are_left_out(tables_of, store):
    store("memory_growth")
    tables = tables_of()
    assert "memory" not in tables["speed"].markdown()
    assert (tables["saving"].rows, tables["papers"].rows) == ([], [])


def test_the_headline_repeats_rows_with_their_caveats(tables_of, store):
    store("preparation", {"ratio_to_torchrec": 14.17, "ratio_to_polars": 0.9, "rows_per_s": 7e5})
    (headline,) = tables_of()["headline"].rows
    assert [headline] == [row for row in tables_of()["speed"].rows if "experiments.preparation" in row[3]]
    assert "**0.90 x** the speed of polars" in headline[2]


def test_missed_goals_have_a_table(tables_of):
    missed = tables_of()["missed"].rows
    assert ("`caching`: `first_epoch_ratio`", "at most 1", "1.2", "missed") in missed


def test_a_figure_that_a_result_lacks_is_an_error(tables_of, store):
    store("preparation", {"ratio_to_torchrec": 14.17, "rows_per_s": 7e5})
    with pytest.raises(ValueError, match=r"tables.toml wants .*'ratio_to_polars'"):
        tables_of()


def test_texts_are_filled_from_the_stored_results_and_say_which_are_missing():
    results = read_results(RESULTS)
    tables = readme_tables(results)
    assert {name: len(tables[name].rows) for name in TEXTS} == {name: len(TEXTS[name]) for name in TEXTS}
    for name, table in tables.items():
        assert not {"{", "}"} & set(table.markdown()), name
    commands = [row[3] for row in tables["saving"].rows]
    assert commands[0].startswith("`python -m experiments.checkpointing` at")
    assert commands[1] == "same"
    del results["overhead"]
    saving = dict(readme_tables(results)["answers"].rows)["What does saving cost?"]
    assert saving == "Not measured yet: needs the stored results of overhead."


@pytest.mark.parametrize(
    ("value", "template", "text"),
    [
        (0.0123, "{:.1%}", "1.2 %"),
        (508_616_704, "{:,.0f/1e6} MB", "509 MB"),
        (-4.96e-5, "{:+.1f/1e-4}", "-0.5"),
        (0.00004, "{:+.4f}", "+4e-05"),
        (0.0, "{:.4f}", "0.0000"),
        (None, "{:.2f}", "not measured"),
    ],
)
def test_formats_of_figures(value, template, text):
    assert template.format(FigureValue(value=value)) == text


def test_formats_of_figures_with_their_ranges():
    assert f"{FigureValue(value=2.0, low=1.5, high=2.5):ratio}" == "**2.00 x** (1.50 to 2.50)"
    assert f"{FigureValue(value=-3e-5, ci=1e-4):delta}" == "**-0.3 ± 1.0**"
    with pytest.raises(ValueError, match="has no range"):
        format(FigureValue(value=2.0), "ratio")


MARKED = """Before.
<!-- results: speed -->

old

<!-- end -->
Between.
<!-- results: empty -->
<!-- end -->
"""
TABLE = Table(("new",), [(r"\1 \g<name>",)])


def test_a_table_escapes_bars_and_ends_with_its_legend():
    table = Table(("a", "b"), [("x|y", "z")], ["† old"])
    assert table.markdown() == "| a | b |\n| --- | --- |\n| x\\|y | z |\n\n† old"


def test_only_the_text_between_markers_changes():
    tables = {"speed": TABLE, "empty": Table((), [])}
    text = filled("README.md", MARKED, tables)
    assert text == MARKED.replace("old", TABLE.markdown()).replace("empty -->\n", "empty -->\n\n")
    assert filled("README.md", text, tables) == text


def test_an_unknown_table_is_named():
    with pytest.raises(ValueError, match=r"README.md asks for the tables \['empty'\].*\['speed'\]"):
        filled("README.md", MARKED, {"speed": TABLE})


@pytest.mark.parametrize(
    "text",
    [
        "<!-- results: speed -->\nnever ends",
        "<!-- results: speed -->\n<!-- results: speed -->\n<!-- end -->\n",
        "<!-- results: speed --> on the same line <!-- end -->",
        "<!-- end -->\n",
    ],
)
def test_markers_that_do_not_fit_are_refused(text):
    with pytest.raises(ValueError, match="needs its own line, and one"):
        filled("README.md", text, {"speed": TABLE})
