"""A result is kept while it is made, goes on where it stopped, and is never a mixture."""

import json
from math import inf, nan

import pytest

from experiments.harness import record as module
from experiments.harness.record import Record


@pytest.fixture(autouse=True)
def one_commit(monkeypatch):
    monkeypatch.setattr(module, "_commit", lambda: "abc")


def open_record(folder, config=None, seeds=(1,)):
    return Record("speed", config or {"size": (1, 2)}, seeds=seeds, folder=folder)


class InterruptedExperimentError(Exception):
    pass


def interrupted():
    raise InterruptedExperimentError


def not_again():
    pytest.fail("measured a second time")


def test_a_row_is_on_disk_at_once_so_that_an_interrupted_experiment_goes_on(tmp_path):
    first = open_record(tmp_path)
    first.measure("a", lambda: {"took_s": 1.5})
    stored = json.loads(first.path.read_text())
    assert (stored["rows"], stored["finished"]) == ([{"key": "a", "took_s": 1.5}], None)
    assert [path.name for path in tmp_path.iterdir()] == ["speed.json"]
    with pytest.raises(InterruptedExperimentError):
        first.measure("b", interrupted)
    second = open_record(tmp_path)
    assert second.measure("a", not_again) == {"key": "a", "took_s": 1.5}
    assert second.measure("b", lambda: {"took_s": 2.0})["took_s"] == 2.0
    assert [row["key"] for row in second.rows] == ["a", "b"]
    second.finish({"speed": 3.0})
    assert open_record(tmp_path).rows == []  # a finished one starts over


@pytest.mark.parametrize(
    ("config", "seeds", "commit"), [({"size": (1, 3)}, (1,), "abc"), (None, (2,), "abc"), (None, (1,), "def")]
)
def test_rows_measured_under_other_circumstances_are_not_mixed_in(
    tmp_path, monkeypatch, config, seeds, commit
):
    open_record(tmp_path).measure("a", lambda: {"took_s": 1.5})
    monkeypatch.setattr(module, "_commit", lambda: commit)
    assert open_record(tmp_path, config, seeds).rows == []


def test_the_result_holds_figures_and_circumstances(tmp_path):
    record = open_record(tmp_path)
    path = record.finish({"speed": 3.0, "memory": None}, {"memory": "no tool here"})
    stored = json.loads(path.read_text())
    assert stored["figures"] == {"speed": 3.0, "memory": None}
    assert stored["notes"] == {"memory": "no tool here"}
    assert stored["commit"] == "abc"
    assert stored["finished"].endswith("Z")
    assert stored["machine"]["cores"] > 0
    assert "torch" in stored["versions"]
    assert stored["command"].startswith("python -m experiments.speed")


def test_a_figure_without_a_value_needs_a_reason(tmp_path):
    record = open_record(tmp_path)
    with pytest.raises(ValueError, match="memory"):
        record.finish({"speed": 3.0, "memory": None}, {"speed": "a note on another"})
    assert not record.path.exists()


def test_a_figure_that_is_no_number_was_not_measured(tmp_path):
    """Or the report would tell that its goal was missed, or met, and the file would not be JSON."""
    record = open_record(tmp_path)
    path = record.finish({"speed": 3.0, "ratio": nan, "gain": inf}, {"gain": "of the worst cell"})
    stored = json.loads(path.read_text(), parse_constant=pytest.fail)
    assert stored["figures"] == {"speed": 3.0, "ratio": None, "gain": None}
    assert stored["notes"] == {
        "ratio": "it came out as nan.",
        "gain": "it came out as inf. of the worst cell",
    }


def test_a_quick_run_leaves_the_stored_result_alone(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(module, "RESULTS", tmp_path / "results")
    stored = Record("speed", {}, seeds=[]).finish({"speed": 3.0}).read_text()
    quick = Record("speed", {}, seeds=[], quick=True)
    quick.finish({"speed": 1.0})
    assert quick.path.resolve() != (tmp_path / "results" / "speed.json").resolve()
    assert (tmp_path / "results" / "speed.json").read_text() == stored


def test_rows_of_another_commit_are_kept_on_purpose_and_say_so(tmp_path, monkeypatch):
    first = open_record(tmp_path)
    for key in ("slow", "quick"):
        first.measure(key, lambda: {"took_s": 1.5})
    first.finish({"speed": 3.0})
    for commit in ("def", "ghi"):
        monkeypatch.setattr(module, "_commit", lambda commit=commit: commit)
        later = open_record(tmp_path)
        later.keep(lambda row: row["key"] == "slow")
        assert later.rows == [{"commit": "abc", "key": "slow", "took_s": 1.5}]
        later.measure("quick", lambda: {"took_s": 0.5})
        assert json.loads(later.path.read_text())["commit"] == commit
    again = open_record(tmp_path)  # interrupted before it was finished
    again.keep(lambda row: row["key"] == "slow")
    assert [row["key"] for row in again.rows] == ["slow", "quick"]


def test_rows_of_other_circumstances_than_the_commit_cannot_be_kept(tmp_path):
    with pytest.raises(ValueError, match="is not there"):
        open_record(tmp_path).keep(lambda row: True)
    open_record(tmp_path).measure("slow", lambda: {"took_s": 1.5})
    with pytest.raises(ValueError, match="of other config; measure all of them"):
        open_record(tmp_path, {"size": (1, 3)}).keep(lambda row: True)
