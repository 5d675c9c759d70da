"""Simulations that break each assumption of the paper's formulas alone, step by step."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from cpr.estimator.failures.arrivals import FailureModel
from cpr.estimator.planning.formulas import Job, expected_pls, interval_full, overhead_full, overhead_partial
from cpr.estimator.simulation.simulation import SimulationConfig, simulate
from experiments.emulation.emulation import HOUR_S
from experiments.harness.record import Row
from experiments.scaling.jobs import compared

JOB: Final = Job(T_total=500 * HOUR_S, T_fail=10 * HOUR_S, O_save=1, O_load=1, O_res=1, N_emb=64)
"""A job that fails 50 times, with saves and recoveries that take next to no time."""
INTERVALS: Final = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0)
"""Save intervals over the mean time between failures."""
DURATIONS: Final = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3)
"""Durations of a save, and of a recovery, over the mean time between failures."""
WAYS_TO_FAIL: Final[Mapping[str, FailureModel]] = {
    "at random": FailureModel(),
    "gamma 0.3: in bursts": FailureModel(distribution="gamma", shape=0.3),
    "gamma 3: regular": FailureModel(distribution="gamma", shape=3.0),
    "Weibull 0.7": FailureModel(distribution="weibull", shape=0.7),
    "Weibull 0.7,\neach node": FailureModel(distribution="weibull", shape=0.7, scope="node"),
    "1 in 10 takes\n8 nodes": FailureModel(group_share=0.1, group_nodes=8),
}


def measure_interval(ratio: float, num_trials: int, seed: int) -> Row:
    """Compare formulas and simulation for a save interval that is `ratio` times the time between failures."""
    both = _both(JOB, ratio * JOB.T_fail, FailureModel(), num_trials, seed)
    return {"part": "interval", "ratio": ratio, **both}


def measure_duration(ratio: float, num_trials: int, seed: int) -> Row:
    """Compare both where failures break saves and recoveries; the interval, Young's, grows with those."""
    duration_s = ratio * JOB.T_fail
    job = replace(JOB, O_save=duration_s, O_load=duration_s / 2, O_res=duration_s / 2)
    both = _both(job, interval_full(job), FailureModel(), num_trials, seed)
    return {"part": "duration", "ratio": ratio, **both}


def measure_way(name: str, num_trials: int, seed: int) -> Row:
    """Compare both for failures in bursts or groups; the interval is an hour, a tenth of their mean time."""
    return {"part": "way", "way": name, **_both(JOB, HOUR_S, WAYS_TO_FAIL[name], num_trials, seed)}


def _both(job: Job, interval_s: float, failures: FailureModel, num_trials: int, seed: int) -> Row:
    """Simulate both recoveries; the formulas do not know that nodes may fail together."""
    config = SimulationConfig(
        job=job,
        recovery="full",
        interval_s=interval_s,
        failures=failures,
        num_trials=num_trials,
        seed=seed,
    )
    full, partial = simulate(config), simulate(replace(config, recovery="partial"))
    return {
        "full": compared(overhead_full(job, interval_s), 0.0, full),
        "partial": compared(overhead_partial(job, interval_s), expected_pls(job, interval_s), partial),
    }
