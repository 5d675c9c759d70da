"""The jobs of `experiments.scaling`, by formula and simulated.

The emulated job has any number of nodes; another one breaks each assumption of the formulas.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

from cpr.estimator.failures.arrivals import FailureModel
from cpr.estimator.planning.formulas import (
    Job,
    Overhead,
    expected_pls,
    interval_full,
    interval_partial,
    overhead_full,
    overhead_partial,
)
from cpr.estimator.simulation.simulation import PARTS, Recovery, Simulation, SimulationConfig, simulate
from experiments.emulation.emulation import HOUR_S, NODES, PRODUCTION
from experiments.harness.record import RESULTS, Row, finished_result

TARGET_PLS: Final = 0.1
JOB: Final = replace(PRODUCTION, O_load=PRODUCTION.O_load / 2, O_res=PRODUCTION.O_load / 2)
"""The emulated job; only the sum of loading and rescheduling is known, of which each is half here."""
LAWS: Final = {"independent": 1.0, "milder": 0.5}
"""By name: `T_fail` falls with this power of the number of nodes. Nodes that fail independently make it 1."""
SCHEMES: Final[Mapping[str, tuple[Recovery, bool]]] = {
    "full": ("full", False),
    "partial": ("partial", False),
    "full_background": ("full", True),
    "partial_background": ("partial", True),
}
"""How a job recovers, and whether it saves in the background, by the name in rows and figures."""


def waiting_share(folder: Path = RESULTS) -> float:
    """The share of a background save's time that training loses by waiting and by slower steps.

    `experiments.checkpointing` measured it, where workers and writers share two processor cores.

    Raises:
        ValueError: that result is not there.
    """
    path = folder / "checkpointing.json"
    stored = finished_result(path)
    if stored is None:
        raise ValueError(f"{path} is not finished; run python -m experiments.checkpointing first")
    return 1 - float(stored["figures"]["throughput_while_saving"])


def job_at(num_nodes: int, law: str, blocked_share: float = 1.0) -> Job:
    """The job on `num_nodes` nodes that fail by one of `LAWS`.

    The times of a save and a load do not change: tables grow with the nodes, and each node has its own part.
    Training loses the `blocked_share` of a save's time; 1: saves are synchronous.
    """
    mean_s = JOB.T_fail * (NODES / num_nodes) ** LAWS[law]
    blocked_s = None if blocked_share == 1 else blocked_share * JOB.O_save
    return replace(JOB, N_emb=num_nodes, T_fail=mean_s, blocked_save=blocked_s)


def measure(scheme: str, num_nodes: int, law: str, blocked_share: float, num_trials: int, seed: int) -> Row:
    """Overhead and PLS, by formula and simulated."""
    recovery, is_background = SCHEMES[scheme]
    job = job_at(num_nodes, law, blocked_share if is_background else 1.0)
    if recovery == "full":
        interval_s = interval_full(job)
        expected, pls = overhead_full(job, interval_s), 0.0
    else:
        interval_s = interval_partial(job, TARGET_PLS)
        expected, pls = overhead_partial(job, interval_s), expected_pls(job, interval_s)
    config = SimulationConfig(
        job=job, recovery=recovery, interval_s=interval_s, num_trials=num_trials, seed=seed
    )
    about = {"part": "nodes", "scheme": scheme, "nodes": num_nodes, "law": law}
    return {**about, **compared(expected, pls, simulate(config))}


def compared(expected: Overhead, pls: float, simulation: Simulation) -> Row:
    """The fields of a row that compare a formula with a simulation."""
    return {
        "T_fail_s": simulation.config.job.T_fail,
        "interval_s": simulation.config.interval_s,
        "formula": expected.total,
        "formula_parts": {part: getattr(expected, part) for part in PARTS},
        "formula_pls": pls,
        "simulated": simulation.overhead.value,
        "simulated_ci": simulation.overhead.half_width,
        "simulated_parts": {part: mean.value for part, mean in simulation.parts.items()},
        "simulated_pls": simulation.pls.value,
        "simulated_pls_ci": simulation.pls.half_width,
        "finished_share": simulation.finished_share,
    }


BROKEN_JOB: Final = Job(T_total=500 * HOUR_S, T_fail=10 * HOUR_S, O_save=1, O_load=1, O_res=1, N_emb=64)
"""A job that fails 50 times, with saves and recoveries that take next to no time: each assumption of the
formulas is broken alone."""
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
    both = _both(BROKEN_JOB, ratio * BROKEN_JOB.T_fail, FailureModel(), num_trials, seed)
    return {"part": "interval", "ratio": ratio, **both}


def measure_duration(ratio: float, num_trials: int, seed: int) -> Row:
    """Compare both where failures break saves and recoveries; the interval, Young's, grows with those."""
    duration_s = ratio * BROKEN_JOB.T_fail
    job = replace(BROKEN_JOB, O_save=duration_s, O_load=duration_s / 2, O_res=duration_s / 2)
    both = _both(job, interval_full(job), FailureModel(), num_trials, seed)
    return {"part": "duration", "ratio": ratio, **both}


def measure_way(name: str, num_trials: int, seed: int) -> Row:
    """Compare both for failures in bursts or groups; the interval is an hour, a tenth of their mean time."""
    return {"part": "way", "way": name, **_both(BROKEN_JOB, HOUR_S, WAYS_TO_FAIL[name], num_trials, seed)}


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
