"""Predictions against measurements: figures of made-up rows."""

from itertools import product

import pytest

from cpr.estimator.renting.samples import SamplesNeeded
from experiments.renting.figures import Round, figures_of, noise_errors, regret, rounds_of, scatter
from experiments.renting.times import Grid
from tests.cpr.estimator.renting.lines import LINK, TRAFFIC, noise, seconds

GRID = Grid(rounds=2)
FREE = 100 * LINK
LINKS = {"free": FREE, "throttled": LINK}


def time_row(number, workers, slower=None, turn=0):
    """Steps that follow the model, but for factors of some batches."""
    row = {"key": f"time {number} {turn} {workers}", "kind": "time", "round": number, "workers": workers}
    row |= {"dense_bytes": TRAFFIC.dense_bytes, "pooled_bytes": TRAFFIC.pooled_bytes}
    for name, link in LINKS.items():
        row[name] = {
            str(batch): seconds(workers, batch, link) * (slower or {}).get(batch, 1.0)
            for batch in GRID.batches
        }
        row[f"{name}_link"] = link
    return row


def curve_row(batch, seed, needed=lambda batch: 10_000 + 20 * batch, scale=500.0):
    """A run whose log loss falls evenly, so that it is 0.5 after `needed` samples."""
    measured = noise(2, batch, scale=scale)
    return {
        "key": f"curve {batch} {seed}",
        "kind": "curve",
        "batch": batch,
        "seed": seed,
        "curve": [[0, 0.6], [4 * needed(batch) / 3, 0.6 - 0.1 * 4 / 3]],
        "noise_steps": measured.steps,
        "noise_local": measured.local,
        "noise_averaged": measured.averaged,
    }


def linear_row(seed, found):
    return {
        "key": f"linear {seed}",
        "kind": "linear",
        "case": "2",
        "seed": seed,
        "found": found,
        "exact": 100.0,
    }


def rows(**curves):
    times = [time_row(number, workers) for number in range(2) for workers in GRID.workers]
    quality = [curve_row(batch, seed, **curves) for batch in GRID.batches for seed in range(2)]
    return [*times, *quality, linear_row(0, 103.0), linear_row(0, 99.0), linear_row(1, 96.0)]


def test_what_follows_the_model_is_predicted():
    figures, notes = figures_of(rows(), GRID)
    for name in ("time_error", "time_error_throttled", "time_error_other_link", "samples_error", "regret"):
        assert figures[f"scavenger_{name}_high"] == pytest.approx(0, abs=1e-6), name
    assert figures["scavenger_noise_error"] == pytest.approx(0.035)
    assert figures["scavenger_samples_error_noise"] == pytest.approx(0, abs=1e-6), "20 = 10,000 / 500"
    assert not notes


def test_noise_that_misleads_is_an_error_and_may_cost_a_choice():
    figures, _ = figures_of(rows(scale=5.0), GRID)
    assert figures["scavenger_samples_error"] == pytest.approx(0, abs=1e-6)
    least, most = GRID.batches[0], GRID.batches[-1]
    wrong = (10_000 + 20 * least) * (5 + most) / (5 + least) / (10_000 + 20 * most) - 1
    assert figures["scavenger_samples_error_noise"] == pytest.approx(wrong)


def test_errors_are_those_of_cells_that_were_not_fitted_to():
    middle = GRID.batches[1]
    one = Round(GRID, {workers: [time_row(0, workers, {middle: 1.25})] for workers in GRID.workers})
    errors = dict(zip(GRID.held_out, one.errors("free", one.model("free")), strict=True))
    assert {errors[cell] < -0.19 for cell in errors if cell[1] == middle} == {True}
    assert max(abs(errors[cell]) for cell in errors if cell[1] != middle) < 1e-6
    assert len(errors) + len(GRID.corners) == len(GRID.workers) * len(GRID.batches)


def test_scatter_is_how_far_a_round_is_from_the_others():
    middle, corner, most = GRID.batches[1], GRID.batches[-1], GRID.workers[-1]
    slow = [{middle: 1.5}, {}, {}]
    rounds = rounds_of(
        [time_row(number, workers, each) for number, each in enumerate(slow) for workers in GRID.workers],
        GRID,
    )
    assert scatter(rounds, "free") == pytest.approx([0.5, 0.2, 0.2])
    of_a_corner = [time_row(0, most, {corner: 1.5}), *(time_row(0, each) for each in GRID.workers[:-1])]
    rounds[0] = Round(GRID, {row["workers"]: [row] for row in of_a_corner})
    assert (most, corner) in GRID.corners
    assert scatter(rounds, "free") == pytest.approx([0, 0, 0], abs=1e-9)


def test_a_slow_pass_does_not_count_where_there_are_others():
    passes = enumerate([dict.fromkeys(GRID.batches, 3.0), {}, {}])
    made = [
        time_row(0, workers, slower, turn) for turn, slower in passes for workers in reversed(GRID.workers)
    ]
    (one,) = rounds_of(made, GRID)
    assert one.step_s("free", 2, 1024) == pytest.approx(seconds(2, 1024, FREE))
    errors = one.errors("throttled", one.model("throttled"))
    assert errors == pytest.approx([0] * len(errors), abs=1e-6)


def test_regret_is_what_the_choice_takes_more_than_the_best():
    """A batch takes twice the samples that were predicted for it."""
    one = rounds_of(rows(), GRID)[0]
    needed = SamplesNeeded(least_samples=10_000.0, least_steps=20.0, source="")
    exact = {batch: needed.at(batch) for batch in GRID.batches}
    assert regret(one, "free", needed, exact) == pytest.approx(0, abs=1e-6)
    cells = list(product(GRID.workers, GRID.batches))
    hours = {cell: exact[cell[1]] / cell[1] * seconds(*cell, FREE) for cell in cells}
    money = {cell: cell[0] * hours[cell] for cell in cells}
    chosen = min(hours, key=hours.__getitem__), min(money, key=money.__getitem__)
    wrong = chosen[0][1]
    doubled = [
        {cell: each * (1 + (cell[1] == wrong)) for cell, each in costs.items()} for costs in (hours, money)
    ]
    expected = max(costs[cell] / min(costs.values()) - 1 for cell, costs in zip(chosen, doubled, strict=True))
    assert expected > 0.01
    found = regret(one, "free", needed, exact | {wrong: 2 * exact[wrong]})
    assert found == pytest.approx(expected)


def test_a_target_that_is_not_reached_leaves_figures_out():
    made = rows()
    short = next(row for row in made if row["key"] == "curve 512 1")
    short["curve"] = [[0, 0.6], [100, 0.59]]
    figures, notes = figures_of(made, GRID)
    assert figures["scavenger_regret"] is None
    assert "was not reached with batch 512, seed 1" in notes["scavenger_regret"]
    assert figures["scavenger_time_error"] is not None


def test_a_noise_scale_that_was_not_found_counts_as_wrong():
    assert noise_errors([linear_row(0, None), linear_row(1, 101.0)]) == [float("inf"), pytest.approx(0.01)]
