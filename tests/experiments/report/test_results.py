"""Results are read whole or refused by name; a figure comes with its range."""

import json

import pytest

from experiments.harness.record import Record
from experiments.report.results import Measured, number, pictures_by_name, read_results


def store(folder, name="speed", figures=None, finished=True):
    record = Record(name, {"rounds": 5}, seeds=[3, 4], folder=folder)
    record.measure("a", lambda: {"took_s": 1.5})
    if finished:
        record.finish(figures or {"speed": 3.0})
    return record.path


def test_a_stored_result_is_read_with_what_its_module_says(tmp_path):
    store(tmp_path, "precision", {"auc_fp32": 0.78})
    result = read_results(tmp_path)["precision"]
    assert result.figures == {"auc_fp32": 0.78}
    assert (result.num_rows, result.seeds, result.config) == (1, [3, 4], {"rounds": 5})
    assert "confidence interval" in result.description
    assert ("seeds", "3, 4") in result.circumstances()


def test_an_experiment_without_a_module_has_no_description(tmp_path):
    store(tmp_path)
    assert read_results(tmp_path)["speed"].description == ""


def test_a_figure_has_its_range(tmp_path):
    figures = {"a": 2.0, "a_low": 1.0, "a_high": 4.0, "b": 0.5, "b_ci": 0.25, "c": 7.0, "low": 1.0}
    store(tmp_path, figures=figures)
    result = read_results(tmp_path)["speed"]
    assert result.measured("a") == Measured(value=2.0, low=1.0, high=4.0)
    assert list(result.main_figures()) == ["a", "b", "c", "low"]
    assert [str(measured) for measured in result.main_figures().values()] == [
        "2 (1 to 4)",
        "0.5 ± 0.25",
        "7",
        "1",
    ]
    assert [result.measured(name).bounds for name in "abc"] == [(1.0, 4.0), (0.25, 0.75), None]


def test_a_figure_that_is_not_there_is_named(tmp_path):
    store(tmp_path)
    with pytest.raises(ValueError, match=r"speed has no figure 'sped'; it has \['speed'\]"):
        read_results(tmp_path)["speed"].measured("sped")


def test_a_damaged_result_is_named(tmp_path):
    (tmp_path / "speed.json").write_text("{")
    with pytest.raises(ValueError, match=r"speed\.json is no result"):
        read_results(tmp_path)


@pytest.mark.parametrize("body", [{"experiment": "speed"}, []])
def test_other_json_is_named(tmp_path, body):
    (tmp_path / "speed.json").write_text(json.dumps(body))
    with pytest.raises(ValueError, match=r"speed\.json is no result"):
        read_results(tmp_path)


def test_pictures_belong_to_the_longest_name(tmp_path):
    for stem in ("recovery", "recovery_timeline", "recovery_soak", "recovery_soak_2", "recovering", "curve"):
        (tmp_path / f"{stem}.png").touch()
    found = pictures_by_name(tmp_path, ["recovery", "recovery_soak", "codecs"])
    assert {name: [path.stem for path in paths] for name, paths in found.items()} == {
        "": ["curve", "recovering"],
        "recovery": ["recovery", "recovery_timeline"],
        "recovery_soak": ["recovery_soak", "recovery_soak_2"],
        "codecs": [],
    }


def test_an_unfinished_result_has_no_pictures_of_an_earlier_one(tmp_path):
    store(tmp_path, finished=False)
    (tmp_path / "speed.png").touch()
    assert read_results(tmp_path)["speed"].pictures == []


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "not measured"), (-0.00012345, "-0.0001234"), (12345.6, "12,346"), (0.0, "0"), (7, "7")],
)
def test_numbers_for_reading(value, text):
    assert number(value) == text


def test_few_digits_leave_out_none_before_the_point():
    assert [number(value, 2) for value in (271.37, 99.7, 1.2e-6)] == ["271", "100", "1.2e-06"]
