"""The experiment on recovery: its arithmetic; its runs are those of tests/system/recovery."""

import json

import pytest

from experiments.checkpointing.job import Job
from experiments.recovery.run import COUNTS, figures_of, measurements
from experiments.recovery.timeline import Timeline, have_all, phases, read_events

PHASES = ("started", "imported", "met", "built", "restored", "stepped")


def row(number, world_size, ours, rival):
    return {
        "key": f"{world_size} workers, round {number}",
        "round": number,
        "world_size": world_size,
        "phases": {"ours": dict.fromkeys(PHASES, ours / 6), "rival": dict.fromkeys(PHASES, rival / 6)},
    }


def exactness(world_size, **counts):
    return {"key": f"e{world_size}", "world_size": world_size, **dict.fromkeys(COUNTS, 0), **counts}


ROWS = [
    exactness(2),
    exactness(4, rows_restored_wrong=3, batches_twice=1),
    {"key": "restart 0", "success": True},
    {"key": "restart 1", "success": False},
    *(row(number, 2, ours, 8.0) for number, ours in enumerate((2.0, 3.0, 7.0))),
]


def test_figures():
    figures, notes = figures_of(ROWS, sizes=(2,))
    assert figures["time_ratio_2"] == pytest.approx(3 / 8)
    assert (figures["time_ratio_2_low"], figures["time_ratio_2_high"]) == pytest.approx((2 / 8, 7 / 8))
    assert (figures["seconds_2"], figures["rival_seconds_2"]) == pytest.approx((3.0, 8.0))
    assert figures["first_restart_success"] == 0.5
    assert (figures["rows_restored_wrong"], figures["batches_twice"], figures["dense_wrong"]) == (3, 1, 0)
    assert figures["time_ratio_4"] is None
    assert all(name in notes for name, value in figures.items() if value is None)


def test_parts_have_keys_of_their_own(tmp_path):
    found = measurements(Job(), (2, 4), 3, 5, tmp_path)
    parts = [part for part, _ in found.values()]
    assert {part: parts.count(part) for part in parts} == {"exactness": 4, "restarts": 5, "timing": 6}


@pytest.fixture
def timeline(tmp_path, monkeypatch):
    path = tmp_path / "timeline.jsonl"

    def mark(rank, generation, event, **more):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(generation))
        Timeline(path).mark(event, **more)

    return path, mark


def test_a_phase_ends_when_the_last_rank_has_reached_it(timeline):
    path, mark = timeline
    for rank, offset in ((0, 0.0), (1, 0.5)):
        for number, event in enumerate(PHASES):
            mark(rank, 1, event, time=100.0 + number + offset)
    mark(0, 0, "stepped", time=50.0)  # of the generation before
    took = phases(read_events(path), 1, killed_at=99.0)
    assert took == pytest.approx({"started": 1.5, **dict.fromkeys(PHASES[1:], 1.0)})


def test_all_ranks_of_the_generation_are_waited_for(timeline):
    path, mark = timeline
    mark(0, 0, "stepped")
    mark(1, 0, "stepped")
    mark(0, 1, "stepped")
    assert have_all(read_events(path), "stepped", 0, 2)
    assert not have_all(read_events(path), "stepped", 1, 2)


def test_a_line_that_is_being_written_is_left_for_later(timeline):
    path, mark = timeline
    mark(0, 0, "started")
    with path.open("a") as file:
        file.write(json.dumps({"event": "imported"})[:10])
    assert [event["event"] for event in read_events(path)] == ["started"]
