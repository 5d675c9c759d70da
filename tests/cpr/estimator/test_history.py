import json
import re
from dataclasses import replace

import pytest

from cpr.checkpoint.storage.local import LocalStorage
from cpr.estimator.history import (
    HISTORY_PATH,
    SAVES_KEPT,
    SAVES_LOOKED_AT,
    RunHistory,
    TypicalSave,
    read_history,
    write_history,
)
from tests.cpr.estimator.histories import make_failure, make_history, make_save


def as_read(history):
    """JSON content of a history with a save and a failure."""
    history = history.with_save(make_save(5)).with_failure(make_failure(40.0, detect=1.0))
    return json.loads(json.dumps(history.to_json()))


@pytest.fixture
def history():
    return make_history()


def test_costs_are_none_without_saves_failures_or_total(history):
    assert (
        history.O_save is history.O_blocked is history.O_load is history.O_res is history.nodes_lost is None
    )
    assert history.gaps_s == []
    assert history.unfinished_gap_s == 150.0
    assert history.T_total == pytest.approx(1000.0)
    assert replace(history, samples_total=None).T_total is None


def test_cost_of_saves_is_their_median(history):
    for step, seconds in enumerate([60.0, 10.0, 12.0]):  # the first of a run is slow
        history = history.with_save(make_save(step, seconds=seconds, blocked_s=seconds / 20))
    assert history.O_save == 12.0
    assert history.O_blocked == pytest.approx(0.6)


def test_slower_steps_during_saves_are_part_of_their_cost(history):
    for step, slowed_s in enumerate([3.0, -1.0, 1.0, None]):  # noise lies on both sides
        history = history.with_save(make_save(step, blocked_s=0.5, slowed_s=slowed_s))
    assert history.O_blocked == 1.5
    assert RunHistory.from_json(json.loads(json.dumps(history.to_json()))) == history


def test_cost_of_saves_is_at_least_the_waiting_time(history):
    for step, slowed_s in enumerate([-0.1, -0.3, 0.1]):
        history = history.with_save(make_save(step, blocked_s=0.5, slowed_s=slowed_s))
    assert history.O_blocked == 0.5


def test_row_saves_and_full_saves_have_separate_costs(history):
    history = history.with_save(make_save(0, seconds=30.0, blocked_s=3.0))
    assert history.row_save is None
    for step in range(3):
        history = history.with_save(
            make_save(step, 5.0, 0.25, kind="rows", share=0.125, slowed_s=0.25 * step)
        )
    assert (history.O_save, history.O_blocked) == (30.0, 3.0)
    only_rows = replace(history, saves=history.saves[1:])
    assert (only_rows.O_save, only_rows.O_blocked) == (40.0, 4.0)  # extrapolated
    assert history.row_save == TypicalSave(seconds=5.0, blocked_s=0.5, share=0.125)


def test_old_row_saves_do_not_count_after_many_full_saves(history):
    for step in range(3):
        history = history.with_save(make_save(step, 5.0, 0.25, kind="rows", share=0.125))
    history = history.with_save(make_save(3, seconds=30.0, blocked_s=3.0))
    assert history.row_save is not None  # a base in between, as row saves need
    for step in range(SAVES_LOOKED_AT):
        history = history.with_save(make_save(step, seconds=30.0, blocked_s=3.0))
    assert history.row_save is None


def test_cost_of_failures_is_their_mean_without_the_step_itself(history):
    history = history.with_failure(make_failure(40.0, detect=1.0, restart=2.0, restore=3.0, first_step=0.3))
    history = history.with_failure(
        make_failure(100.0, imports=6.0, reattach=1.0, restore=1.0, first_step=0.05)
    )
    assert history.O_load == pytest.approx((3 + 2) / 2)
    assert history.O_res == pytest.approx((3.2 + 6) / 2)
    assert history.nodes_lost == 1.0
    assert history.gaps_s == [40.0, 60.0]
    assert history.unfinished_gap_s == 50.0


def test_written_history_is_read_back(history, tmp_path):
    storage = LocalStorage(tmp_path / "run")
    assert read_history(storage) is None
    history = history.with_save(make_save(5)).with_failure(make_failure(40.0, detect=1.0))
    write_history(storage, history)
    assert read_history(storage) == history


def test_history_of_the_newest_epoch_counts_despite_later_writes(history, tmp_path):
    storage = LocalStorage(tmp_path)
    newer = replace(history, steps_done=history.steps_done + 1)
    write_history(storage, history)
    write_history(storage, newer, epoch=12)
    assert read_history(storage) == newer
    assert list(storage.list()) == ["history-12.json"]
    write_history(storage, history, epoch=9)  # by an owner that was asleep
    assert read_history(storage) == newer


def test_histories_of_other_versions_of_the_program_are_read(history):
    data = json.loads(json.dumps(history.with_save(make_save(5)).to_json()))
    data["weather"] = data["saves"][0]["mood"] = "fine"  # by a later version of the program
    del data["saves"][0]["slowed_s"]  # which an earlier version did not write
    assert RunHistory.from_json(data) == history.with_save(make_save(5))


def test_many_row_saves_do_not_displace_the_full_save(history):
    history = history.with_save(make_save(0))
    for step in range(SAVES_KEPT + 3):
        history = history.with_save(make_save(step, kind="rows", share=0.125))
    assert [save.kind for save in history.saves] == ["base", *["rows"] * SAVES_KEPT]
    assert history.saves[-1].step == SAVES_KEPT + 2


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"format": "cpr-history", "version": 99}',
        '{"format": "cpr-history", "version": 1}',
        "[" * 100_000,
    ],
)
def test_other_content_is_refused_with_the_name_of_the_file(text, tmp_path):
    (tmp_path / HISTORY_PATH).write_text(text)
    with pytest.raises(ValueError, match=HISTORY_PATH):
        read_history(LocalStorage(tmp_path))


@pytest.mark.parametrize(
    ("where", "wrong", "message"),
    [
        (("clock_s",), float("nan"), "clock_s is nan"),
        (("elapsed_s",), -1.0, "elapsed_s is -1.0, which is below 0"),
        (("nodes",), True, "nodes is True"),
        (("nodes",), 0, "nodes is 0"),
        (("samples_total",), "many", "samples_total is 'many'"),
        (("saves",), None, "saves is None, not a list"),
        (("saves", 0), 3, "saves[0] is 3, not an object"),
        (("saves", 0, "seconds"), [], "saves[0].seconds is a list"),
        (("saves", 0, "kind"), "some", "saves[0].kind is 'some'"),
        (("saves", 0, "share"), 0.0, "share is 0.0"),
        (("saves", 0, "share"), 1.5, "share is 1.5"),
        (("saves", 0, "slowed_s"), "much", "saves[0].slowed_s is 'much'"),
        (("saves", 0, "slowed_s"), float("nan"), "saves[0].slowed_s is nan"),
        (("failures", 0, "nodes_lost"), None, "failures[0].nodes_lost is None"),
        (("failures", 0, "seconds"), 3.0, "failures[0].seconds is 3.0"),
        (("failures", 0, "seconds", "detect"), float("inf"), "failures[0].seconds['detect'] is inf"),
    ],
)
def test_invalid_values_are_refused_with_their_place_and_the_file(history, tmp_path, where, wrong, message):
    data = as_read(history)
    *path, last = where
    place = data
    for key in path:
        place = place[key]
    place[last] = wrong
    (tmp_path / HISTORY_PATH).write_text(json.dumps(data))
    with pytest.raises(ValueError, match=re.escape(f"{HISTORY_PATH} is no history: {message}")):
        read_history(LocalStorage(tmp_path))
