"""Results are read whole or refused by name; a figure comes with its range, a result with its provenance."""

import json

import pytest

from experiments.report.results import FigureValue, number, pictures_by_name, read_results


def test_a_stored_result_is_read_with_its_modules_docstring(store, tmp_path):
    store("precision", {"auc_fp32": 0.78})
    result = read_results(tmp_path)["precision"]
    assert result.figures == {"auc_fp32": 0.78}
    assert "confidence interval" in result.description
    assert ("seeds", "1, 2, 3") in result.circumstances()


def test_a_figure_has_its_range(store, tmp_path):
    store("speed", {"a": 2.0, "a_low": 1.0, "a_high": 4.0, "b": 0.5, "b_ci": 0.25, "c": 7.0, "low": 1.0})
    result = read_results(tmp_path)["speed"]
    assert result.measured("a") == FigureValue(value=2.0, low=1.0, high=4.0)
    shown = {name: str(value) for name, value in result.main_figures().items()}
    assert shown == {"a": "2 (1 to 4)", "b": "0.5 ± 0.25", "c": "7", "low": "1"}
    assert [result.measured(name).bounds for name in "abc"] == [(1.0, 4.0), (0.25, 0.75), None]


def test_a_figure_that_is_not_there_is_named(store, tmp_path):
    store("speed", {"speed": 3.0})
    with pytest.raises(ValueError, match=r"speed has no figure 'sped'; it has \['speed'\]"):
        read_results(tmp_path)["speed"].measured("sped")


@pytest.mark.parametrize(
    ("commit", "changes", "marks"),
    [
        ("0123456789", {}, ""),
        ("449d943fe8", {}, "†"),
        ("0123456789", {"commit": "0123456789+changes"}, "‡"),
        ("0123456789", {"rows": [{"key": "a", "commit": "9"}]}, "§"),
    ],
)
def test_provenance_marks_results_of_other_code(store, tmp_path, commit, changes, marks):
    path = store("speed", {"speed": 3.0})
    path.write_text(json.dumps(json.loads(path.read_text()) | {"commit": commit} | changes))
    found = read_results(tmp_path)["speed"].provenance
    assert found == f"`python -m experiments.speed` at `{commit[:7]}`{marks}"


@pytest.mark.parametrize("text", ["{", '{"experiment": "speed"}', "[]"])
def test_other_files_are_named(tmp_path, text):
    (tmp_path / "speed.json").write_text(text)
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


def test_an_unfinished_result_has_no_pictures_of_an_earlier_one(store, tmp_path):
    store("speed")
    (tmp_path / "speed.png").touch()
    assert read_results(tmp_path)["speed"].pictures == []


@pytest.mark.parametrize(
    ("value", "digits", "text"),
    [(None, 4, "not measured"), (-0.00012345, 4, "-0.0001234"), (12345.6, 4, "12,346"), (271.37, 2, "271")],
)
def test_numbers_for_reading(value, digits, text):
    assert number(value, digits) == text
