import itertools
from dataclasses import replace
from statistics import mean, stdev

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpr.estimator.planning.formulas import expected_pls
from experiments.emulation.emulation import (
    HOUR_S,
    HOURS,
    NODES,
    SCHEMES,
    Run,
    events_of,
    rows_of_node,
    step_at,
    step_saved,
)


def failures(run):
    return [(event.hour, event.nodes) for event in events_of(run) if event.nodes]


def saves(run):
    return [event.hour for event in events_of(run) if not event.nodes]


def test_the_papers_setting():
    assert saves(Run(scheme="vanilla", seed=0)) == [pytest.approx(44.8)]
    assert saves(Run(scheme="mfu", seed=0)) == pytest.approx([5.6 * k for k in range(1, 10)])
    naive = saves(Run(scheme="naive", seed=0))
    assert naive[0] == pytest.approx((2 * 5.6 / 60 * 28) ** 0.5)
    assert len(naive) == int(HOURS / naive[0])
    assert events_of(Run(scheme="none", seed=0)) == []


def test_all_schemes_of_a_seed_see_the_same_failures():
    seen = {str(failures(Run(scheme=scheme, seed=3))) for scheme in SCHEMES[1:]}
    assert len(seen) == 1
    assert failures(Run(scheme="mfu", seed=4)) != failures(Run(scheme="mfu", seed=3))


def test_harder_runs_have_the_failures_of_easier_ones_too():
    easy, hard = Run(scheme="mfu", seed=1), Run(scheme="mfu", seed=1, failures=9, nodes_lost=3)
    hours = dict(failures(hard))
    assert len(hours) == 9
    for hour, nodes in failures(easy):
        assert set(nodes) < set(hours[hour])
        assert len(hours[hour]) == 3


@given(st.integers(0, 10_000_000))
def test_every_row_is_of_one_node(num_rows):
    bounds = [rows_of_node(node, num_rows) for node in range(NODES)]
    assert bounds[0][0] == 0
    assert bounds[-1][1] == num_rows
    assert all(left[1] == right[0] for left, right in itertools.pairwise(bounds))
    assert max(end - begin for begin, end in bounds) - min(end - begin for begin, end in bounds) <= 1


def test_work_counts_as_saved_by_whole_intervals_for_schemes_with_priority_too():
    for scheme in ("vanilla", "mfu"):
        run = Run(scheme=scheme, seed=0)
        assert step_saved(run, 44.7, 560) == 0
        assert step_saved(run, 44.9, 560) == step_at(run.interval_h, 560) == 448


def test_pls_is_as_expected_by_formula_3():
    run = Run(scheme="vanilla", seed=0, target_pls=0.0125)
    steps = 1_000_000

    def pls(seed):
        hours = [hour for hour, _ in failures(replace(run, seed=seed))]
        return sum(step_at(hour, steps) - step_saved(run, hour, steps) for hour in hours) / steps / NODES

    found = [pls(seed) for seed in range(400)]
    expected = expected_pls(run.job, run.interval_h * HOUR_S)
    assert expected == pytest.approx(0.0125)
    assert abs(mean(found) - expected) < 4 * stdev(found) / len(found) ** 0.5


def test_names_tell_runs_apart():
    runs = [
        Run(scheme="mfu", seed=0),
        Run(scheme="ssu", seed=0),
        Run(scheme="mfu", seed=1),
        Run(scheme="mfu", seed=0, failures=3),
        Run(scheme="mfu", seed=0, ratio=0.5),
        Run(scheme="mfu", seed=0, top_coverage=0.5),
        Run(scheme="mfu", seed=0, network="dcnv2"),
    ]
    assert len({run.name for run in runs}) == len(runs)
    assert Run(scheme="mfu", seed=2, failures=20).name == "mfu, failures 20, seed 2"


def test_a_run_is_compared_with_one_of_the_same_model_and_data():
    run = Run(scheme="mfu", seed=2, failures=5, network="dcnv2", optimizer="sgd", top_coverage=0.5)
    assert run.without_failures == Run(
        scheme="none", seed=2, network="dcnv2", optimizer="sgd", top_coverage=0.5
    )
