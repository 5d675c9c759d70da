"""Comparison of formulas and simulation for each recovery: the result of `cpr simulate`."""

from dataclasses import dataclass, replace
from typing import Any, Final

from cpr.estimator.failures.arrivals import FailureModel
from cpr.estimator.planning.formulas import (
    FAR_SHORTER,
    FEW_SAVES,
    Job,
    Overhead,
    expected_pls,
    interval_full,
    overhead_full,
    overhead_partial,
)
from cpr.estimator.planning.mirror import MirrorModel, expected_pls_with_mirror, overhead_with_mirror
from cpr.estimator.planning.recommend import recommended_interval
from cpr.estimator.simulation.simulation import PARTS, Mean, Recovery, Simulation, SimulationConfig, simulate
from cpr.humanize import duration_text

NAMES: Final[dict[Recovery, str]] = {
    "full": "full recovery",
    "partial": "partial recovery",
    "mirror": "with mirrors",
}
MATTERS: Final = 0.05
"""Relative error of a formula below which it counts as right."""


@dataclass(frozen=True, kw_only=True)
class ComparedRecovery:
    """One recovery: simulation and prediction."""

    expected: Overhead
    """By formula 4 or 5, or that of mirrors."""
    expected_pls: float
    """By formula 3, or that of mirrors; 0 for full recovery."""
    simulation: Simulation

    @property
    def departs(self) -> bool:
        """Whether the formulas are wrong by more than chance and by more than `MATTERS`."""
        return any(abs(error) > tolerance for error, tolerance in self._errors())

    @property
    def falls_short(self) -> bool:
        """Whether the formulas are too high by that much, which more failures cannot explain."""
        return any(-error > tolerance for error, tolerance in self._errors())

    def _errors(self) -> tuple[tuple[float, float], ...]:
        """Error and tolerance of the overhead and of the PLS."""
        pairs = (self.simulation.overhead, self.expected.total), (self.simulation.pls, self.expected_pls)
        return tuple((mean.value - formula, mean.half_width + MATTERS * formula) for mean, formula in pairs)

    def to_json(self) -> dict[str, Any]:
        """The figures as JSON values."""
        parts = {part: getattr(self.expected, part) for part in PARTS}
        return {
            "interval_s": self.simulation.config.interval_s,
            "formula": {"overhead": self.expected.total, "parts": parts, "pls": self.expected_pls},
            "simulated": self.simulation.to_json(),
        }


@dataclass(frozen=True, kw_only=True)
class RecoveryComparison:
    """The recoveries of a job, simulated with the same failures."""

    full: ComparedRecovery
    partial: ComparedRecovery
    mirror: ComparedRecovery | None = None
    """Partial recovery with mirrors; None: the job has none."""

    @property
    def sides(self) -> dict[Recovery, ComparedRecovery]:
        """All recoveries by name."""
        both: dict[Recovery, ComparedRecovery] = {"full": self.full, "partial": self.partial}
        return both if self.mirror is None else {**both, "mirror": self.mirror}

    @property
    def config(self) -> SimulationConfig:
        """Configuration of full recovery; the others differ in the interval and the mirror."""
        return self.full.simulation.config

    @property
    def job(self) -> Job:
        """The simulated job."""
        return self.config.job

    @property
    def saved(self) -> Mean:
        """Share of useful time gained by partial recovery, paired by run."""
        return Mean.of(self.full.simulation.overheads - self.partial.simulation.overheads)

    def to_json(self) -> dict[str, Any]:
        """The figures as JSON values."""
        return {
            "num_trials": self.config.num_trials,
            "seed": self.config.seed,
            **{name: side.to_json() for name, side in self.sides.items()},
            "partial_saves": self.saved.to_json(),
            "departures": departures(self),
        }


def compare(
    job: Job,
    failures: FailureModel,
    *,
    target_pls: float,
    interval_s: float | None = None,
    num_trials: int = 1000,
    seed: int = 0,
    mirror: MirrorModel | None = None,
) -> RecoveryComparison:
    """Simulate `num_trials` runs of each recovery of a job, and evaluate the formulas.

    `interval_s` is that of all recoveries; None: the recommended interval of each, with `target_pls`. With a
    `mirror`, partial recovery is simulated without and with it, at the same interval.
    """
    config = SimulationConfig(
        job=job, recovery="full", interval_s=job.T_total, failures=failures, num_trials=num_trials, seed=seed
    )
    expected = config.expected_job
    full_s = interval_full(expected) if interval_s is None else interval_s
    partial_s = recommended_interval(expected, target_pls) if interval_s is None else interval_s
    return RecoveryComparison(
        full=ComparedRecovery(
            expected=overhead_full(expected, full_s),
            expected_pls=0.0,
            simulation=simulate(replace(config, interval_s=full_s)),
        ),
        partial=ComparedRecovery(
            expected=overhead_partial(expected, partial_s),
            expected_pls=expected_pls(expected, partial_s),
            simulation=simulate(replace(config, recovery="partial", interval_s=partial_s)),
        ),
        mirror=None if mirror is None else _with_mirror(config, partial_s, mirror),
    )


def _with_mirror(config: SimulationConfig, interval_s: float, mirror: MirrorModel) -> ComparedRecovery:
    job = config.expected_job
    return ComparedRecovery(
        expected=overhead_with_mirror(job, interval_s, mirror),
        expected_pls=expected_pls_with_mirror(job, interval_s, mirror, config.failures),
        simulation=simulate(replace(config, recovery="mirror", interval_s=interval_s, mirror=mirror)),
    )


def departures(comparison: RecoveryComparison) -> list[str]:
    """Reasons why the formulas are wrong; empty if they are right."""
    wrong = [side.simulation.config for side in comparison.sides.values() if side.departs]
    if not wrong:
        return []
    job, failures = comparison.job, comparison.config.failures
    found = []
    for config in wrong:
        name = NAMES["full" if config.recovery == "full" else "partial"]  # whose interval mirrors have
        interval = f"{name}'s interval of {duration_text(config.interval_s)}"
        if config.interval_s > FAR_SHORTER * job.T_fail:
            found.append(f"{interval} is not far shorter than the time between failures")
        if job.T_total < FEW_SAVES * config.interval_s:
            found.append(f"{interval} fits only {job.T_total / config.interval_s:.2g} times into the job")
    if job.O_load + job.O_res > FAR_SHORTER * job.T_fail:
        found.append("the next failure often comes before a recovery is over, which starts over")
    if job.O_save > FAR_SHORTER * job.T_fail:
        found.append("failures often break a save, which does not count")
    falls_short = any(side.falls_short for side in comparison.sides.values())
    if failures.distribution != "exponential" and (failures.scope == "job" or falls_short):
        found.append("failures have a memory: they do not come evenly")
    return list(dict.fromkeys(found)) or [
        "failures also come while a job saves and recovers: there are more than in useful time alone"
    ]
