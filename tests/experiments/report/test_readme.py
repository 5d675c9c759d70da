"""The READMEs' tables say what the results say; their markers are checked; the prose is left alone."""

from string import Formatter

import pytest

from experiments.report.questions import QUESTIONS, answers
from experiments.report.readme import Figure, filled, formatted, readme_tables
from experiments.report.readme_tables import TABLES
from experiments.report.results import read_results
from experiments.report.tables import Table

PREPARATION = {"ratio_to_torchrec": 14.17, "ratio_to_polars": 0.796, "rows_per_s": 701_564.5}


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


def test_the_headline_repeats_rows_with_their_caveats(tables_of):
    (headline,) = tables_of()["headline"].rows
    assert headline == tables_of()["speed"].rows[0]
    assert "margin fixed in advance" in headline[2]


def test_missed_goals_have_a_table(tables_of):
    missed = tables_of()["missed"].rows
    assert ("`caching`: `first_epoch_ratio`", "at most 1", "1.2", "missed") in missed


def test_neighbouring_rows_name_their_command_once(tables_of, store):
    store("preparation", PREPARATION)
    store("throughput", dict.fromkeys(_figures_of("throughput"), 0.5), config={"rounds": 3, "rows": 4})
    commands = [row[3] for row in tables_of()["speed"].rows]
    assert commands[0].startswith("`python -m experiments.throughput` at")
    assert commands[1] == "same"


def test_a_figure_that_a_result_lacks_is_an_error(tables_of, store):
    store("preparation", {"ratio_to_torchrec": 14.17})
    with pytest.raises(ValueError, match=r"the result of preparation.*'ratio_to_polars'"):
        tables_of()


ROWS = [row for rows in TABLES.values() for row in rows]


def _figures_of(experiment):
    """Figures that the rows of an experiment ask for."""
    templates = [row.what + row.result + row.caveat for row in ROWS if row.experiment == experiment]
    names = {name for text in templates for _, name, _, _ in Formatter().parse(text) if name}
    return {name for name in names if name != "num_seeds" and not name.startswith("config[")}


def test_every_row_can_be_made_once_its_figures_are_there(store, tmp_path):
    config = {"rounds": 3, "rows": 4, "train.max_steps": 10}
    for experiment in {row.experiment for row in ROWS}:
        store(experiment, dict.fromkeys(_figures_of(experiment), 0.5), config=config)
    results = read_results(tmp_path)
    for row in ROWS:
        text = "".join(
            formatted(text, results[row.experiment]) for text in (row.what, row.result, row.caveat)
        )
        assert not {"{", "}"} & set(text), row


def test_a_question_is_answered_or_names_the_experiment_that_is_missing(store, tmp_path):
    names = {name for _, name, _, _ in Formatter().parse("".join(QUESTIONS.values())) if name}
    recovery = [name[:-1].split("[")[1] for name in names if name.startswith("recovery[")]
    store("recovery", dict.fromkeys(recovery, 0.5))
    shown = dict(answers(read_results(tmp_path)).rows)
    fast, saving = (
        next(text for name, text in shown.items() if word in name) for word in ("fast is r", "saving")
    )
    assert "**0.5 s** against 0.5 s" in fast
    assert saving == "Not measured yet: needs the stored results of checkpointing, overhead."


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
    assert template.format(Figure(value)) == text


MARKED = """Before.
<!-- results: speed -->

old

<!-- end -->
Between.
<!-- results: empty -->
<!-- end -->
"""
TABLE = Table(("new",), [(r"\1 \g<name>",)])


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
