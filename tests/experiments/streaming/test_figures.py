"""Figures of made-up runs, and the growth of a made-up backlog."""

import pytest

from experiments.streaming.backlog import POINTS, Backlog, curve
from experiments.streaming.figures import draw, figures_of
from experiments.streaming.run import main
from experiments.streaming.runs import samples_per_s


def steps_of(num_steps, *, step_s=0.01, batch=100, arrivals_per_s=15_000.0, waiting=0.0):
    """Lines of the stream whose backlog grows as the formula says."""
    lines = []
    for step in range(num_steps):
        waiting += step_s * arrivals_per_s - batch
        lines.append(
            {"step": 7 + step, "time": 50 + step * step_s, "trained": batch * step, "waiting": waiting}
        )
    return lines


ARRIVALS = [(50 + 0.5 * number, int(7500 * number)) for number in range(21)]


def test_a_backlog_that_grows_by_the_formula_has_no_error():
    found = Backlog.of(steps_of(1000), ARRIVALS)
    assert found.batch == 100
    assert found.step_s == pytest.approx(0.01)
    assert found.arrivals_per_s == pytest.approx(15_000)
    assert found.growth == pytest.approx(50)
    assert found.expected == pytest.approx(50)
    assert found.error == pytest.approx(0, abs=1e-9)


def test_a_backlog_that_grows_too_fast_has_an_error():
    steps = [line | {"waiting": 1.1 * line["waiting"]} for line in steps_of(1000)]
    assert Backlog.of(steps, ARRIVALS).error == pytest.approx(0.1)


def test_a_curve_has_few_points_from_the_first_step_on():
    points = curve(steps_of(1000))
    assert len(points) == POINTS
    assert points[0] == [0, 50]


def test_speed_is_that_of_the_middle_of_a_run():
    times = [0, 10, *range(11, 19), 100]
    lines = [{"samples": 10 * number, "time": time} for number, time in enumerate(times)]
    assert samples_per_s(lines) == 10


def rows():
    made = []
    for number in range(2):
        made += [
            {"case": "files", "auc": 0.7, "samples_per_s": 100.0},
            {"case": "stream", "auc": 0.701 + 0.002 * number, "samples_per_s": 90.0 + number},
            {
                "case": "kafka",
                "samples_per_s": 80.0,
                "lag_s": 0.1 + number,
                "backlog": {"error": 0.02 * number, "expected": 50.0, "curve": [[0, 10], [10, 500]]},
            },
            {"case": "folder", "lag_s": 4.0, "samples_per_s": 80.0},
            {
                "case": "limited",
                "limit": 100,
                "largest": 120 + number,
                "arrived": 50,
                "trained": 30,
                "left_out": 15,
                "bad": 5 - number,
                "curve": [[0, 10], [10, 100]],
            },
        ]
        made[-5:] = [row | {"round": number} for row in made[-5:]]
    return [
        *made,
        {"case": "killed_kafka", "round": 0, "kills": 5, "lost": 0, "repeated": 2},
        {"case": "killed_folder", "round": 0, "kills": 4, "lost": 1, "repeated": 0},
    ]


def test_figures_of_made_up_runs():
    figures = figures_of(rows())
    assert figures["stream_auc_delta"] == pytest.approx(0.002)
    assert figures["stream_auc_delta_ci"] > 0
    assert (figures["stream_speed_ratio_low"], figures["stream_speed_ratio_high"]) == (0.9, 0.91)
    assert figures["stream_max_samples_per_s"] == 90.5
    assert figures["stream_lag_s"] == pytest.approx(0.6)
    assert figures["stream_folder_lag_s"] == 4
    assert figures["stream_backlog_error_high"] == 0.02
    assert figures["stream_largest_backlog"] == pytest.approx(1.205)
    assert figures["stream_unaccounted_records"] == 1
    assert (figures["stream_kills"], figures["stream_lost_records"]) == (9, 1)
    assert figures["stream_repeated_records"] == 2


def test_the_picture_is_drawn_from_the_rows(tmp_path):
    draw({"rows": rows()}, tmp_path)
    assert (tmp_path / "streaming.png").stat().st_size > 10_000


def test_without_the_client_of_kafka_the_command_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setattr("experiments.streaming.run.find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        main(["--quick"])
    assert 'pip install ".[kafka]"' in capsys.readouterr().err
