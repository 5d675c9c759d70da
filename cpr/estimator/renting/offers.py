"""Time and money of training to a target by workers and batch, and the Pareto set of them.

Money is workers times time times price, as in Scavenger (arXiv 2303.06659); saves and failures prolong the
time by the formulas of `cpr.estimator.planning`, for a job whose workers fail independently of each other.
"""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from math import inf, isfinite
from typing import Any

from cpr.estimator.planning.formulas import Job
from cpr.estimator.planning.recommend import RecoveryPlan, recommend
from cpr.estimator.renting.samples import SamplesNeeded
from cpr.estimator.renting.step_time import StepTime
from cpr.humanize import count_text, duration_text


@dataclass(frozen=True, kw_only=True)
class WorkerFailures:
    """How often a worker fails and what that costs; times in seconds, the same for all numbers of workers."""

    T_fail: float
    """Mean time between failures of one worker."""
    O_save: float
    blocked_save: float | None = None
    O_load: float = 0.0
    O_res: float = 0.0
    target_pls: float = 0.1

    def recovery(self, useful_s: float, workers: int) -> RecoveryPlan:
        """The recommended recovery of a job, with its overhead.

        Args:
            useful_s: time that training takes without saves and failures.
            workers: each of them a failure domain that holds a share of the tables.

        Raises:
            ValueError: a value is impossible, or training takes no longer than a save.
        """
        if useful_s < self.O_save:
            raise ValueError(
                f"with {count_text(workers, 'worker')}, training takes {duration_text(useful_s)}, less than "
                f"a save ({duration_text(self.O_save)}): leave out --worker-fail and --save, or give more "
                "samples"
            )
        job = Job(
            T_total=useful_s,
            T_fail=self.T_fail / workers,
            O_save=self.O_save,
            blocked_save=self.blocked_save,
            O_load=self.O_load,
            O_res=self.O_res,
            N_emb=workers,
        )
        return recommend(job, self.target_pls).chosen


@dataclass(frozen=True, kw_only=True)
class Offer:
    """A number of workers and a batch, and what training to the target takes with them."""

    workers: int
    batch: int
    """Samples of a step, over all workers."""
    step_s: float
    samples: float
    """To the target."""
    overhead: float
    """Of saves and failures, as a share of the time without them."""
    price: float
    """Of a worker for an hour."""
    recovery: RecoveryPlan | None = None
    """None: failures are not considered."""
    is_extrapolated: bool = False
    """Whether workers, or samples of a worker, are outside of what was measured."""

    @property
    def steps(self) -> float:
        """To the target."""
        return self.samples / self.batch

    @property
    def hours(self) -> float:
        """Time to the target, with saves and failures."""
        return self.steps * self.step_s * (1 + self.overhead) / 3600

    @property
    def money(self) -> float:
        """Price of all workers for that time."""
        return self.workers * self.hours * self.price

    def with_failures(self, failures: WorkerFailures | None) -> "Offer":
        """The offer with its saves and failures; None: nothing fails."""
        if failures is None:
            return self
        recovery = failures.recovery(3600 * self.hours, self.workers)
        return replace(self, overhead=recovery.overhead.total, recovery=recovery)

    def to_json(self) -> dict[str, Any]:
        """The figures as JSON values."""
        figures = {"steps": self.steps, "hours": self.hours, "money": self.money}
        recovery = None if self.recovery is None else self.recovery.to_json()
        return {**asdict(self), **figures, "recovery": recovery}


@dataclass(frozen=True, kw_only=True)
class RentPlan:
    """All offers and the models that they follow from."""

    offers: Sequence[Offer]
    step_time: StepTime
    samples: SamplesNeeded
    failures: WorkerFailures | None
    link_bytes_per_s: float | None = None
    """Speed of the rented workers' links; None: as in the runs."""

    @property
    def pareto(self) -> list[Offer]:
        """The offers that no other one beats in time and money, the cheapest first."""
        return pareto(self.offers)

    @property
    def knee(self) -> Offer:
        """The offer of the Pareto set that saves most time for its money."""
        return knee(self.pareto)

    def to_json(self) -> dict[str, Any]:
        """All figures as JSON values: times in seconds, but `hours`."""
        best = self.pareto
        return {
            "cheapest": best[0].to_json(),
            "fastest": best[-1].to_json(),
            "knee": self.knee.to_json(),
            "pareto": [offer.to_json() for offer in best],
            "offers": [offer.to_json() for offer in self.offers],
            "step_time": {**asdict(self.step_time), "worst_error": self.step_time.worst_error},
            "samples": {**asdict(self.samples), "critical_batch": self.samples.critical_batch},
            "failures": None if self.failures is None else asdict(self.failures),
            "link_bytes_per_s": self.link_bytes_per_s,
        }


def plan_rent(
    workers: Iterable[int],
    batches: Iterable[int],
    step_time: StepTime,
    samples: SamplesNeeded,
    price: float,
    failures: WorkerFailures | None = None,
    link_bytes_per_s: float | None = None,
) -> RentPlan:
    """Work out the offer of each number of workers with each batch that it divides.

    Args:
        workers: numbers of workers.
        batches: samples of a step, over all workers.
        step_time: model of a step's time.
        samples: samples to the target by batch.
        price: of a worker for an hour.
        failures: of a worker; None: nothing fails and nothing is saved.
        link_bytes_per_s: see `RentPlan`.

    Raises:
        ValueError: a value is impossible, or no number of workers divides a batch.
    """
    workers, batches = sorted(set(workers)), sorted(set(batches))
    if not 0 < price < inf:
        raise ValueError(f"the price is {price:g}; give what a worker costs for an hour, more than 0")
    if min(workers, default=0) < 1 or min(batches, default=0) < 1:
        raise ValueError("there are no workers, or no samples in a batch: give numbers of 1 or more")
    offers = [
        Offer(
            workers=number,
            batch=batch,
            step_s=step_time.seconds(number, batch, link_bytes_per_s),
            samples=samples.at(batch),
            overhead=0.0,
            price=price,
            is_extrapolated=step_time.is_extrapolated(number, batch),
        ).with_failures(failures)
        for number in workers
        for batch in batches
        if batch % number == 0
    ]
    if not offers:
        raise ValueError(
            f"none of these batches ({', '.join(map(str, batches))}) can be divided among "
            f"{' or '.join(map(str, workers))} workers: give --batches that can"
        )
    if not all(isfinite(offer.money) for offer in offers):
        raise ValueError(
            f"what it costs is no number, by a price of {price:g} and {offers[0].samples:g} samples: give "
            "both in their units, a worker's for an hour and all that are trained"
        )
    return RentPlan(
        offers=offers,
        step_time=step_time,
        samples=samples,
        failures=failures,
        link_bytes_per_s=link_bytes_per_s,
    )


def pareto(offers: Iterable[Offer]) -> list[Offer]:
    """The offers that no other one beats in time and money, the cheapest first."""
    best: list[Offer] = []
    for offer in sorted(offers, key=lambda each: (each.money, each.hours, each.workers)):
        if not best or offer.hours < best[-1].hours:
            best.append(offer)
    return best


def knee(best: Sequence[Offer]) -> Offer:
    """The offer farthest below the line from the cheapest to the fastest, both axes scaled to their range.

    Scavenger's choice (arXiv 2303.06659), found as by Kneedle (Satopaa et al., 2011).

    Args:
        best: a Pareto set, the cheapest first.
    """
    cheapest, fastest = best[0], best[-1]
    money, hours = fastest.money - cheapest.money, cheapest.hours - fastest.hours
    if not (money and hours):
        return cheapest

    def below_line(offer: Offer) -> float:
        return (cheapest.hours - offer.hours) / hours - (offer.money - cheapest.money) / money

    return max(best, key=below_line)
