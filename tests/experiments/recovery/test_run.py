"""The experiment on recovery: its arithmetic; its runs are those of tests/system/recovery."""

import json

import pytest

from experiments.recovery.run import figures_of
from experiments.recovery.timeline import have_all, mark, phases, read_marks

PHASES = ("started", "imported", "met", "built", "restored", "stepped")


def row(number, world_size, ours, rival):
    return {
        "key": f"{world_size} workers, round {number}",
        "world_size": world_size,
        "phases": {"ours": dict.fromkeys(PHASES, ours / 6), "rival": dict.fromkeys(PHASES, rival / 6)},
    }


def test_ratios_are_taken_within_a_round():
    figures = figures_of([row(number, 2, ours, 8.0) for number, ours in enumerate((2.0, 3.0, 7.0))])
    assert figures == pytest.approx(
        {
            **{"time_ratio_2": 3 / 8, "time_ratio_2_low": 2 / 8, "time_ratio_2_high": 7 / 8},
            **{"seconds_2": 3.0, "rival_seconds_2": 8.0},
        }
    )


@pytest.fixture
def timeline(tmp_path, monkeypatch):
    path = tmp_path / "timeline.jsonl"

    def mark_of(rank, generation, event, **more):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(generation))
        mark(path, event, **more)

    return path, mark_of


def test_a_phase_ends_when_the_last_rank_has_reached_it(timeline):
    path, mark_of = timeline
    for rank, offset in ((0, 0.0), (1, 0.5)):
        for number, event in enumerate(PHASES):
            mark_of(rank, 1, event, time=100.0 + number + offset)
    mark_of(0, 0, "stepped", time=50.0)  # of the generation before
    took = phases(read_marks(path), 1, killed_at=99.0)
    assert took == pytest.approx({"started": 1.5, **dict.fromkeys(PHASES[1:], 1.0)})


def test_a_generation_is_complete_when_all_its_ranks_are(timeline):
    path, mark_of = timeline
    mark_of(0, 0, "stepped")
    mark_of(1, 0, "stepped")
    mark_of(0, 1, "stepped")
    assert have_all(read_marks(path), "stepped", 0, 2)
    assert not have_all(read_marks(path), "stepped", 1, 2)


def test_a_line_that_is_being_written_is_left_for_later(timeline):
    path, mark_of = timeline
    mark_of(0, 0, "started")
    with path.open("a") as file:
        file.write(json.dumps({"event": "imported"})[:10])
    assert [event["event"] for event in read_marks(path)] == ["started"]
