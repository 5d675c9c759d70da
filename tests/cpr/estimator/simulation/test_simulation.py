"""The simulation agrees with the paper's formulas and with exact renewal theory."""

from dataclasses import replace
from math import exp

import numpy as np
import pytest

from cpr.estimator.failures.arrivals import FailureModel
from cpr.estimator.planning.formulas import Job, expected_pls, overhead_full, overhead_partial
from cpr.estimator.planning.mirror import (
    MirrorModel,
    expected_pls_with_mirror,
    overhead_with_mirror,
    uncovered,
)
from cpr.estimator.simulation.simulation import SimulationConfig, simulate

HOUR = 3600.0
CALM = Job(T_total=1000 * HOUR, T_fail=100 * HOUR, O_save=20, O_load=40, O_res=60, N_emb=200)
"""An interval of an hour is far shorter than the time between failures, and hardly a save is broken."""
HARSH = Job(T_total=56 * HOUR, T_fail=2 * HOUR, O_save=336, O_load=162, O_res=162, N_emb=64)
"""Nothing that the formulas assume is true."""
NODES = FailureModel(scope="node")


def run(job, recovery, interval_s, **changes):
    return simulate(SimulationConfig(job=job, recovery=recovery, interval_s=interval_s, **changes))


def agrees(mean, expected):
    """Whether a value is within twice the 95 % confidence interval; wrong by chance once in 10,000 times."""
    return abs(mean.value - expected) <= 2 * mean.half_width


def low(mean):
    return mean.value - mean.half_width


def high(mean):
    return mean.value + mean.half_width


def exact_full(job, interval_s):
    """Overhead with exponential failures and saves that training waits for (Daly 2006, equation 20)."""
    rate = 1 / job.T_fail
    segment = exp(rate * (job.O_load + job.O_res)) * (exp(rate * (interval_s + job.O_save)) - 1) / rate
    return segment / interval_s - 1


def exact_partial(job, interval_s):
    """Overhead and PLS of partial recovery if no node is struck twice in an interval.

    Saves and recoveries are repeated until no failure breaks them.
    """
    rate = 1 / job.T_fail
    saving = (exp(rate * job.O_save) - 1) / rate
    recovering = exp(rate * (job.O_load + job.O_res))
    overhead = (1 + saving / interval_s) * recovering - 1
    pls = recovering * rate * (interval_s / 2 + saving) / job.N_emb
    return overhead, pls


@pytest.mark.parametrize("failures", [FailureModel(), NODES], ids=["job", "node"])
def test_simulation_agrees_with_formulas_where_their_assumptions_hold(failures):
    """Formulas 3, 4 and 5, part by part."""
    full = run(CALM, "full", HOUR, failures=failures)
    expected = overhead_full(CALM, HOUR)
    for part in ("lost", "load", "reschedule"):
        assert agrees(full.parts[part], getattr(expected, part))
    assert full.parts["save"].value == pytest.approx(expected.save, rel=0.01)  # saves of lost work, too
    assert agrees(full.overhead, expected.total)
    partial = run(CALM, "partial", HOUR, failures=failures)
    expected = overhead_partial(CALM, HOUR)
    assert agrees(partial.overhead, expected.total)
    assert partial.parts["lost"].value == 0 == full.pls.value
    assert agrees(partial.pls, expected_pls(CALM, HOUR))


def test_row_saves_agree_with_formulas():
    """Full recovery of the same job pays for its saves of everything."""
    job = replace(CALM, O_save=1200, blocked_save=20, O_rows=300, blocked_rows=3, row_share=1 / 8)
    partial = run(job, "partial", HOUR)
    assert agrees(partial.overhead, overhead_partial(job, HOUR).total)
    assert partial.parts["save"].value == pytest.approx(24 / HOUR, rel=0.01)
    assert agrees(partial.pls, expected_pls(job, HOUR))
    full = run(job, "full", HOUR)
    assert full.parts["save"].value == pytest.approx(20 / HOUR, rel=0.02)
    assert agrees(full.parts["lost"], overhead_full(job, HOUR).lost)


@pytest.mark.parametrize("interval_h", [0.7, 2.0, 8.0])
def test_simulation_agrees_with_exact_theory_where_formulas_do_not(interval_h):
    """Failures in the middle of saves and recoveries, intervals of up to four times the mean to a failure."""
    interval_s = interval_h * HOUR
    full = run(HARSH, "full", interval_s, give_up=1e6)
    assert agrees(full.overhead, exact_full(HARSH, interval_s))
    assert low(full.overhead) > overhead_full(HARSH, interval_s).total
    partial = run(HARSH, "partial", interval_s)
    overhead, _ = exact_partial(HARSH, interval_s)
    assert agrees(partial.overhead, overhead)
    assert low(partial.overhead) > overhead_partial(HARSH, interval_s).total


def test_pls_is_exact_and_a_node_loses_samples_once():
    """Of one node in an interval of four mean times to failure most is lost already; of 10,000 hardly any."""
    interval_s = 8 * HOUR
    many = replace(HARSH, N_emb=10_000)
    assert agrees(run(many, "partial", interval_s, num_trials=300).pls, exact_partial(many, interval_s)[1])
    one = run(replace(HARSH, N_emb=1), "partial", interval_s)
    assert high(one.pls) < 0.7 * exact_partial(replace(HARSH, N_emb=1), interval_s)[1]
    assert high(one.pls) < 1


def test_groups_multiply_the_pls_only():
    groups = FailureModel(group_share=0.5, group_nodes=9)
    together = run(CALM, "partial", HOUR, failures=groups)
    alone = run(CALM, "partial", HOUR)
    assert together.overhead == alone.overhead
    assert agrees(together.pls, expected_pls(together.config.expected_job, HOUR))
    assert low(together.pls) > 4 * high(alone.pls)


SLOW_MIRROR = MirrorModel(
    rows=10**9, row_bytes=256, changed_rows=10**6, step_s=0.5, slows_s=0.01, every_steps=100
)
"""It takes more than two hours to fill, and is 25 s behind: both are seen in the PLS."""


@pytest.mark.parametrize(
    ("changes", "mirror", "failures"),
    [
        ({}, SLOW_MIRROR, FailureModel()),
        ({}, replace(SLOW_MIRROR, share=0.5), FailureModel()),
        ({}, SLOW_MIRROR, FailureModel(group_share=0.2, group_nodes=5)),
        ({}, replace(SLOW_MIRROR, distance=5), FailureModel(group_share=0.2, group_nodes=5)),
        ({"N_emb": 2, "O_res": 4 * HOUR}, SLOW_MIRROR, FailureModel()),
    ],
    ids=["alone", "half of the rows", "racks", "keepers in other racks", "two nodes that recover for long"],
)
def test_mirrors_agree_with_formulas(changes, mirror, failures):
    """Within 5 % beside chance, as `cpr simulate` counts a formula as right; chance is less than 15 %."""
    job = replace(CALM, **changes, nodes_lost=failures.mean_nodes)
    result = run(job, "mirror", 2 * HOUR, failures=failures, mirror=mirror, num_trials=2000)
    expected = expected_pls_with_mirror(job, 2 * HOUR, mirror, failures)
    assert result.pls.half_width < 0.15 * expected
    assert abs(result.pls.value - expected) <= result.pls.half_width + 0.05 * expected
    assert high(result.pls) < 0.8 * expected_pls(job, 2 * HOUR)
    cost = overhead_with_mirror(job, 2 * HOUR, mirror)
    assert result.overhead.value == pytest.approx(cost.total, rel=0.05)
    assert result.parts["save"].value == pytest.approx(cost.save, rel=0.01)
    assert uncovered(job, mirror, failures).filling > 0.01


def test_longer_steps_fail_more_often_and_save_as_often():
    mirror = replace(SLOW_MIRROR, slows_s=SLOW_MIRROR.step_s / 2)
    result = run(CALM, "mirror", HOUR, mirror=mirror, num_trials=200)
    assert agrees(result.failures, 1.5 * CALM.T_total / CALM.T_fail)
    assert result.parts["save"].value - 0.5 == pytest.approx(CALM.O_save / HOUR, rel=0.01)


def test_mirror_that_covers_no_node_is_partial_recovery():
    """All nodes fail together."""
    everything = FailureModel(group_share=1.0, group_nodes=CALM.N_emb)
    mirror = replace(SLOW_MIRROR, slows_s=0.0)
    result = run(CALM, "mirror", HOUR, failures=everything, mirror=mirror, num_trials=20)
    without = run(CALM, "partial", HOUR, failures=everything, num_trials=20)
    assert result.pls.value == pytest.approx(without.pls.value)
    assert result.overhead == without.overhead


def test_periodic_recorded_failures():
    """Each 7 h of 10 h: one failure, at 7 h; saves at 2, 4, 6 h and so on take no time."""
    job = Job(T_total=10 * HOUR, T_fail=7 * HOUR, O_save=1e-6, O_load=30, O_res=60, N_emb=5)
    beat = FailureModel(distribution="recorded", recorded_s=(7.0,))
    full = run(job, "full", 2 * HOUR, failures=beat)
    assert full.parts["lost"].value == pytest.approx(0.1)
    assert full.parts["lost"].half_width == pytest.approx(0, abs=1e-9)
    assert full.failures.value == 1
    assert run(job, "partial", 2 * HOUR, failures=beat).pls.value == pytest.approx(0.1 / 5)


def test_both_recoveries_have_the_same_failures():
    full, partial = (run(CALM, recovery, HOUR, seed=3) for recovery in ("full", "partial"))
    same = np.abs(full.overheads - full.parts["lost"].value - partial.overheads) < 0.01
    assert same.mean() > 0.95
    assert full.failures.value == pytest.approx(partial.failures.value, rel=0.01)


def test_batches_of_runs_are_independent(monkeypatch):
    monkeypatch.setattr("cpr.estimator.simulation.simulation.NODES_AT_ONCE", 3 * HARSH.N_emb)
    pieces = run(HARSH, "partial", HOUR, num_trials=400)
    assert len(set(pieces.overheads)) > 360  # runs without failures in saves and recoveries may be alike
    assert agrees(pieces.overhead, exact_partial(HARSH, HOUR)[0])


def test_json_contains_the_figures():
    result = run(CALM, "partial", HOUR, num_trials=20)
    body = result.to_json()
    assert body["overhead"]["mean"] == result.overhead.value
    assert sum(part["mean"] for part in body["parts"].values()) == pytest.approx(result.overhead.value)
    assert body["overhead_worst_5_percent"] == np.quantile(result.overheads, 0.95)
    assert (body["recovery"], body["interval_s"], body["finished_share"]) == ("partial", HOUR, 1)


def test_unfinished_runs_are_counted():
    """Recovery takes five mean times to failure: hardly one succeeds."""
    hopeless = replace(HARSH, T_fail=60.0)
    result = run(hopeless, "full", HOUR, num_trials=10, give_up=2)
    assert result.finished_share == 0
    assert result.overhead.value > 1
    assert run(HARSH, "partial", HOUR, num_trials=10).finished_share == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"recovery": "none"}, "choose one of full, partial, mirror"),
        ({"recovery": "mirror"}, "belong together"),
        ({"mirror": SLOW_MIRROR}, "belong together"),
        ({"recovery": "mirror", "mirror": SLOW_MIRROR, "job": replace(CALM, N_emb=1)}, "needs another node"),
        ({"interval_s": 0.0}, "impossible"),
        ({"interval_s": 1001 * HOUR}, "not longer than the job"),
        ({"job": replace(CALM, O_save=7200, blocked_save=1)}, "storage cannot take them"),
        ({"job": replace(CALM, O_rows=600, row_share=1 / 8)}, "saving all rows takes 4800 s"),
        ({"job": replace(CALM, N_emb=10**12)}, "1,000,000 nodes can be simulated at most"),
        ({"failures": FailureModel(group_share=0.1, group_nodes=201)}, "cannot happen to 200"),
        ({"job": replace(CALM, nodes_lost=2)}, "group_share and group_nodes"),
        ({"job": replace(CALM, T_fail=1)}, "failures in the useful time; 10,000 can be simulated"),
        ({"num_trials": 1}, "2 at least"),
        ({"seed": -1}, "must not be negative"),
        ({"give_up": 1.0}, "give more than 1"),
    ],
)
def test_impossible_configurations_are_refused(changes, message):
    values = {"job": CALM, "recovery": "partial", "interval_s": HOUR}
    with pytest.raises(ValueError, match=message):
        SimulationConfig(**(values | changes))
