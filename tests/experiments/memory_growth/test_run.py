import numpy as np
import pytest

from experiments.harness import launch
from experiments.memory_growth import run
from experiments.memory_growth.run import end_over_start, figures_of, growth_per_1000_steps, main

STEPS = list(range(100, 10_001, 100))
NOISE = np.random.default_rng(0).normal(0, 200_000, len(STEPS))


def memory(bytes_per_step):
    return [int(5e8 + bytes_per_step * step + noise) for step, noise in zip(STEPS, NOISE, strict=True)]


@pytest.mark.parametrize("bytes_per_step", [0, 1024])
def test_interval_of_the_growth_contains_the_true_growth(bytes_per_step):
    slope, reach = growth_per_1000_steps(STEPS, memory(bytes_per_step))
    assert abs(slope - 1000 * bytes_per_step) < reach < 300_000


def test_only_the_second_half_counts_for_the_slope():
    warming_up = [value if step > 5000 else 10 for step, value in zip(STEPS, memory(0), strict=True)]
    assert growth_per_1000_steps(STEPS, warming_up) == growth_per_1000_steps(STEPS, memory(0))


def test_short_lived_memory_is_no_growth():
    evaluating = [value + 5e7 * (step % 1000 == 0) for step, value in zip(STEPS, memory(0), strict=True)]
    slope, reach = growth_per_1000_steps(STEPS, evaluating)
    assert abs(slope) < reach < 300_000


def test_start_is_after_the_warm_up():
    values = [1 if step <= 1000 else 100 if step <= 2000 else 7 if step <= 9000 else 150 for step in STEPS]
    assert end_over_start(STEPS, values) == 1.5


def test_figures_are_those_of_the_worker_that_grew_most():
    samples = [
        {
            "step": step,
            "in_use_bytes": [growing, calm],
            "rss_bytes": [calm, 2 * growing],
            "pss_bytes": [calm] * 2,
        }
        for step, calm, growing in zip(STEPS, memory(0), memory(5000), strict=True)
    ]
    figures = figures_of(samples)
    slope, reach = growth_per_1000_steps(STEPS, memory(5000))
    assert figures["growth_bytes_per_1000_steps"] == slope
    assert figures["growth_bytes_per_1000_steps_ci"] == reach
    assert figures["rss_growth_bytes_per_1000_steps"] == pytest.approx(2 * slope)
    assert figures["rss_end_over_start"] > 1.05
    assert figures["pss_end_over_start"] < 1.01


@pytest.mark.system
@pytest.mark.timeout(180)
@pytest.mark.usefixtures("forks")
def test_quick_run_records_both_workers(run_quick, monkeypatch):
    monkeypatch.setattr(run, "torchrun_command", launch.torchrun_command)
    (row,) = run_quick(main, "memory_growth")["rows"]
    assert [sample["step"] for sample in row["samples"]] == list(range(2, 41, 2))
    for sample in row["samples"]:
        assert len(sample["rss_bytes"]) == 2
        assert min(sample["pss_bytes"]) > 1e8  # a worker with torch in it
        assert all(
            0 < used < rss for used, rss in zip(sample["in_use_bytes"], sample["rss_bytes"], strict=True)
        )
