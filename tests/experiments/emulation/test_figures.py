from dataclasses import asdict

import numpy as np
import pytest
from scipy.stats import ttest_rel

from experiments.emulation.emulation import Run
from experiments.emulation.figures import (
    Estimate,
    by_setting,
    correlation,
    deltas,
    estimates,
    run_of,
    slope,
)


def row(scheme, seed, auc, **more):
    return {"key": "?", **asdict(Run(scheme=scheme, seed=seed, **more)), "auc": auc}


ROWS = [
    row("none", 0, 0.75),
    row("mfu", 0, 0.7499),
    row("mfu", 1, 0.7603),
    row("none", 1, 0.76),
    row("none", 2, 0.74),
    row("mfu", 2, 0.7398),
    row("none", 0, 0.5, network="dcnv2"),
    row("mfu", 0, 0.4, network="dcnv2"),
]


def test_runs_are_compared_within_a_seed_and_a_network():
    found = deltas(ROWS)
    assert found[Run(scheme="mfu", seed=1)] == pytest.approx(0.0003)
    assert found[Run(scheme="mfu", seed=0, network="dcnv2")] == pytest.approx(-0.1)
    assert len(found) == 4
    assert by_setting(found)[Run(scheme="mfu", seed=0)] == pytest.approx([-0.0001, 0.0003, -0.0002])


def test_intervals_are_those_of_a_paired_t_test():
    estimate = estimates(ROWS[:6])[Run(scheme="mfu", seed=0)]
    interval = ttest_rel([0.7499, 0.7603, 0.7398], [0.75, 0.76, 0.74]).confidence_interval(0.95)
    assert (estimate.value - estimate.half_width, estimate.value + estimate.half_width) == pytest.approx(
        (interval.low, interval.high)
    )
    assert estimate.figures("x") == {"x": estimate.value, "x_ci": estimate.half_width}


def test_a_row_names_its_run():
    run = Run(scheme="ssu", seed=4, failures=3, ratio=0.5, top_coverage=0.9)
    assert run_of({"key": "?", **asdict(run), "auc": 0.7}) == run


def test_slopes_go_through_the_origin_and_count_a_seed_once():
    rng = np.random.default_rng(0)
    points = {}
    for seed in range(3):
        for number, pls in enumerate(rng.uniform(0.01, 0.4, 4 + seed)):
            points[Run(scheme="mfu", seed=seed, failures=number)] = (pls, (0.01 + 0.002 * seed) * pls)
    found = slope(points)
    assert found.value == pytest.approx(0.012)
    assert found.half_width == pytest.approx(Estimate.of([0.01, 0.012, 0.014]).half_width)
    flat = {run: (pls, 0.001 * pls) for run, (pls, _) in points.items()}
    assert correlation(flat).value == pytest.approx(1)


def correlated(rng, seeds, within, between):
    """Points of eight runs a seed, of which a share of the noise is that of the seed."""
    points = {}
    for seed in range(seeds):
        shared = rng.normal() * between
        for number in range(8):
            x = rng.normal()
            points[Run(scheme="mfu", seed=seed, failures=number)] = (x, x + shared + rng.normal() * within)
    return points


@pytest.mark.parametrize("between", [0.0, 0.8])
def test_intervals_of_correlations_hold_the_truth_about_as_often_as_they_say(between):
    rng = np.random.default_rng(1)
    truth = 1 / (1 + 0.6**2 + between**2) ** 0.5
    found = [correlation(correlated(rng, 6, 0.6, between)) for _ in range(400)]
    held = sum(each.low <= truth <= each.high for each in found) / len(found)
    assert 0.88 <= held <= 0.99
    assert all(each.low <= each.value <= each.high for each in found)


def test_a_correlation_of_one_has_an_interval():
    points = {
        Run(scheme="mfu", seed=seed, failures=number): (number, 2.0 * number)
        for seed in (0, 1)
        for number in range(3)
    }
    found = correlation(points)
    assert (found.low, found.value, found.high) == pytest.approx((1, 1, 1))
    assert found.figures("x").keys() == {"x", "x_low", "x_high"}
