"""The experiment on recovery: its arithmetic; its runs are those of tests/system/recovery."""

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


def test_a_phase_ends_when_the_last_rank_has_reached_it(tmp_path, monkeypatch):
    path = tmp_path / "timeline.jsonl"

    def reached(rank, generation, event, **more):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(generation))
        mark(path, event, **more)

    reached(0, 0, "stepped", time=50.0)
    for number, event in enumerate(PHASES):
        reached(0, 1, event, time=100.0 + number)
    assert not have_all(read_marks(path), "stepped", 1, 2)
    for number, event in enumerate(PHASES):
        reached(1, 1, event, time=100.5 + number)
    assert have_all(read_marks(path), "stepped", 1, 2)
    with path.open("a") as file:
        file.write('{"event": "im')  # is being written
    took = phases(read_marks(path), 1, killed_at=99.0)
    assert took == pytest.approx({"started": 1.5, **dict.fromkeys(PHASES[1:], 1.0)})
