"""Formulas and simulation side by side, for both recoveries: what `cpr simulate` shows."""

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
from cpr.estimator.planning.recommend import recommended_interval
from cpr.estimator.simulation.means import Mean
from cpr.estimator.simulation.simulation import PARTS, Recovery, Simulation, SimulationConfig, simulate
from cpr.humanize import duration_text

RECOVERIES: Final[tuple[Recovery, ...]] = ("full", "partial")
MATTERS: Final = 0.05
"""A formula that is wrong by a smaller part of its value is right."""


@dataclass(frozen=True, kw_only=True)
class Compared:
    """One recovery."""

    expected: Overhead
    """By formula 4 or 5."""
    expected_pls: float
    """By formula 3; 0 for full recovery."""
    simulation: Simulation

    @property
    def departs(self) -> bool:
        """Whether the formulas are wrong by more than chance, and by enough to matter."""
        return any(
            abs(mean.value - value) > mean.half_width + MATTERS * value for mean, value in self._pairs()
        )

    @property
    def falls_short(self) -> bool:
        """Whether less is simulated than the formulas say, by as much: more failures cannot be why."""
        return any(value - mean.value > mean.half_width + MATTERS * value for mean, value in self._pairs())

    def _pairs(self) -> tuple[tuple[Mean, float], ...]:
        """What is simulated, and what the formulas say of it."""
        return (
            (self.simulation.overhead, self.expected.total),
            (self.simulation.pls, self.expected_pls),
        )

    def to_json(self) -> dict[str, Any]:
        """For machines."""
        parts = {part: getattr(self.expected, part) for part in PARTS}
        formula = {"overhead": self.expected.total, "parts": parts, "pls": self.expected_pls}
        return {"interval_s": self.simulation.config.interval_s, "formula": formula} | {
            "simulated": self.simulation.to_json()
        }


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Both recoveries of a job, through the same failures."""

    full: Compared
    partial: Compared

    @property
    def job(self) -> Job:
        """What was simulated."""
        return self.full.simulation.config.job

    @property
    def config(self) -> SimulationConfig:
        """Of full recovery; that of partial recovery differs in the interval alone."""
        return self.full.simulation.config

    @property
    def saved(self) -> Mean:
        """The share of useful time that partial recovery saves, run by run through the same failures."""
        return Mean.of(self.full.simulation.overheads - self.partial.simulation.overheads)

    def to_json(self) -> dict[str, Any]:
        """For machines."""
        config = self.config
        return {
            "num_trials": config.num_trials,
            "seed": config.seed,
            "full": self.full.to_json(),
            "partial": self.partial.to_json(),
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
) -> Comparison:
    """Simulate both recoveries, and ask the formulas.

    Args:
        job: what is simulated.
        failures: how they come.
        target_pls: of partial recovery.
        interval_s: of both; None: what is recommended for each.
        num_trials: runs of each.
        seed: of the failures.
    """
    config = SimulationConfig(
        job=job, recovery="full", interval_s=job.T_total, failures=failures, num_trials=num_trials, seed=seed
    )
    expected = config.expected_job
    full_s, partial_s = interval_s, interval_s
    if full_s is None or partial_s is None:
        full_s, partial_s = interval_full(expected), recommended_interval(expected, target_pls)
    full, partial = (
        simulate(replace(config, recovery=recovery, interval_s=interval))
        for recovery, interval in zip(RECOVERIES, (full_s, partial_s), strict=True)
    )
    return Comparison(
        full=Compared(expected=overhead_full(expected, full_s), expected_pls=0.0, simulation=full),
        partial=Compared(
            expected=overhead_partial(expected, partial_s),
            expected_pls=expected_pls(expected, partial_s),
            simulation=partial,
        ),
    )


def departures(comparison: Comparison) -> list[str]:
    """Why the formulas are wrong, in words; empty where they are right."""
    wrong = [side.simulation.config for side in (comparison.full, comparison.partial) if side.departs]
    if not wrong:
        return []
    job, failures = comparison.job, comparison.config.failures
    found = []
    for config in wrong:
        interval = f"{config.recovery} recovery's interval of {duration_text(config.interval_s)}"
        if config.interval_s > FAR_SHORTER * job.T_fail:
            found.append(f"{interval} is not far shorter than the time between failures")
        if job.T_total < FEW_SAVES * config.interval_s:
            found.append(f"{interval} fits only {job.T_total / config.interval_s:.2g} times into the job")
    if job.O_load + job.O_res > FAR_SHORTER * job.T_fail:
        found.append("the next failure often comes before a recovery is over, which begins again")
    if job.O_save > FAR_SHORTER * job.T_fail:
        found.append("failures often break a save, which does not count")
    falls_short = comparison.full.falls_short or comparison.partial.falls_short
    if failures.distribution != "exponential" and (failures.scope == "job" or falls_short):
        found.append("failures have a memory: they do not come evenly")
    return found or [
        "failures go on while a job saves and recovers: there are more than useful time alone sees"
    ]
