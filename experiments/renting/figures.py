"""Figures of `experiments.renting` from its rows."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from statistics import mean, median

from cpr.estimator.renting.offers import Offer, plan_rent
from cpr.estimator.renting.samples import SamplesNeeded
from cpr.estimator.renting.step_time import StepTime, TimedStep, fit_step_time
from cpr.estimator.renting.traffic import Traffic
from experiments.harness.record import Row
from experiments.harness.statistics import median_figures
from experiments.renting.quality import noise_in, reached, target_of
from experiments.renting.times import Grid

LINKS = ("free", "throttled")
PRICE = 1.0
"""Of a worker for an hour; it changes no choice."""


def rows_of(rows: Sequence[Row], kind: str) -> list[Row]:
    """Rows of one kind."""
    return [row for row in rows if row["kind"] == kind]


@dataclass(frozen=True)
class Round:
    """Times of a round, and what was fitted to them."""

    grid: Grid
    rows: Mapping[int, Sequence[Row]]
    """Of all passes, by workers."""

    def step_s(self, link: str, workers: int, batch: int) -> float:
        """Measured seconds of a step, the median of the passes; one worker has no links."""
        return median(float(row["free" if workers == 1 else link][str(batch)]) for row in self.rows[workers])

    def link_bytes_per_s(self, link: str) -> float:
        """Measured speed with the most workers."""
        return median(float(row[f"{link}_link"]) for row in self.rows[self.grid.workers[-1]])

    def model(self, link: str) -> StepTime:
        """The model fitted to the corners of the grid."""
        most = self.rows[self.grid.workers[-1]][0]
        steps = [
            TimedStep(
                workers=workers,
                batch=batch,
                seconds=self.step_s(link, workers, batch),
                link_bytes_per_s=None if workers == 1 else self.link_bytes_per_s(link),
            )
            for workers, batch in self.grid.corners
        ]
        return fit_step_time(
            steps, Traffic(dense_bytes=most["dense_bytes"], pooled_bytes=most["pooled_bytes"])
        )

    def errors(self, link: str, model: StepTime, speed: float | None = None) -> list[float]:
        """Relative errors of predictions for cells that the model was not fitted to.

        Args:
            link: of the measured times.
            model: predicts them.
            speed: of other links than the model's; then only cells with links count.
        """
        cells = [cell for cell in self.grid.held_out if speed is None or cell[0] > 1]
        return [model.seconds(*cell, speed) / self.step_s(link, *cell) - 1 for cell in cells]


def rounds_of(rows: Sequence[Row], grid: Grid) -> list[Round]:
    """All rounds, in order."""
    timed = rows_of(rows, "time")
    rounds: dict[int, dict[int, list[Row]]] = {}
    for row in timed:
        rounds.setdefault(row["round"], {}).setdefault(row["workers"], []).append(row)
    return [Round(grid, rounds[number]) for number in sorted(rounds)]


def figures_of(rows: Sequence[Row], grid: Grid) -> tuple[dict[str, float | None], dict[str, str]]:
    """All figures, and notes on those that are missing."""
    figures: dict[str, float | None] = {}
    rounds = rounds_of(rows, grid)
    for link, ending in zip(LINKS, ("", "_throttled"), strict=True):
        errors = [[abs(each) for each in one.errors(link, one.model(link))] for one in rounds]
        figures |= median_figures(f"scavenger_time_error{ending}", list(map(max, errors)))
        figures |= median_figures(f"scavenger_time_error_mean{ending}", list(map(mean, errors)))
        if len(rounds) > 1:
            figures |= median_figures(f"scavenger_time_scatter{ending}", scatter(rounds, link))
    others = [
        max(map(abs, one.errors("throttled", one.model("free"), one.link_bytes_per_s("throttled"))))
        for one in rounds
    ]
    figures |= median_figures("scavenger_time_error_other_link", others)
    figures |= median_figures("scavenger_noise_error", noise_errors(rows))
    chosen, notes = regrets(rows, rounds)
    return figures | chosen, notes


def scatter(rounds: Sequence[Round], link: str) -> list[float]:
    """Largest relative difference of a held-out cell's time from its median in the other rounds, by round."""
    found = []
    for one in rounds:
        others = [each for each in rounds if each is not one]
        expected = {cell: median(each.step_s(link, *cell) for each in others) for cell in one.grid.held_out}
        found.append(max(abs(one.step_s(link, *cell) / each - 1) for cell, each in expected.items()))
    return found


def noise_errors(rows: Sequence[Row]) -> list[float]:
    """Largest relative error of the noise scale among all cases, by seed."""
    worst: dict[int, float] = {}
    for row in rows_of(rows, "linear"):
        found = float("inf") if row["found"] is None else abs(row["found"] / row["exact"] - 1)
        worst[row["seed"]] = max(worst.get(row["seed"], 0.0), found)
    return list(worst.values())


def regrets(rows: Sequence[Row], rounds: Sequence[Round]) -> tuple[dict[str, float | None], dict[str, str]]:
    """Figures of choices, by learning curves of two batches and by that of one and its gradient noise."""
    curves = rows_of(rows, "curve")
    target = target_of(curves)
    found = reached(curves, target)
    missing = [f"batch {batch}, seed {seed}" for (batch, seed), samples in found.items() if samples is None]
    names = [f"scavenger_{what}{ending}" for what in ("regret", "samples_error") for ending in ("", "_noise")]
    if missing:
        note = f"{target} was not reached with {'; '.join(missing)}."
        return dict.fromkeys(names), dict.fromkeys(names, note)
    samples = {cell: each for cell, each in found.items() if each is not None}
    batches, seeds = (sorted({cell[place] for cell in samples}) for place in (0, 1))
    exact = {batch: mean(samples[batch, seed] for seed in seeds) for batch in batches}
    figures: dict[str, float | None] = {}
    for ending in ("", "_noise"):
        needed = [_needed(ending, curves, samples, batches, seed) for seed in seeds]
        held_out = batches[1:-1] if ending == "" else batches[1:]
        errors = [max(abs(each.at(batch) / exact[batch] - 1) for batch in held_out) for each in needed]
        figures |= median_figures(f"scavenger_samples_error{ending}", errors)
        worst = [
            max(regret(one, link, each, exact) for link in LINKS) for one, each in product(rounds, needed)
        ]
        figures |= median_figures(f"scavenger_regret{ending}", worst)
    return figures, {}


def _needed(
    ending: str,
    curves: Sequence[Row],
    samples: Mapping[tuple[int, int], float],
    batches: Sequence[int],
    seed: int,
) -> SamplesNeeded:
    """Samples by batch, from one seed's runs of the smallest and the largest batch, or of the smallest."""
    least, most = batches[0], batches[-1]
    if ending == "":
        return SamplesNeeded.by_runs({batch: samples[batch, seed] for batch in (least, most)}, "two runs")
    (row,) = (row for row in curves if (row["batch"], row["seed"]) == (least, seed))
    return SamplesNeeded.by_noise(least, samples[least, seed], noise_in(row).scale, "a run and its noise")


def regret(one: Round, link: str, needed: SamplesNeeded, exact: Mapping[int, float]) -> float:
    """How much more time, or money, the chosen cell takes than the best one; the larger of both shares."""
    grid = one.grid
    plan = plan_rent(grid.workers, grid.batches, one.model(link), needed, PRICE)
    tried = {cell: measured_offer(one, link, *cell, exact) for cell in [*grid.corners, *grid.held_out]}
    found = []
    for name in ("hours", "money"):
        chosen = min(plan.offers, key=lambda offer: float(getattr(offer, name)))
        best = min(float(getattr(offer, name)) for offer in tried.values())
        found.append(float(getattr(tried[chosen.workers, chosen.batch], name)) / best - 1)
    return max(found)


def measured_offer(one: Round, link: str, workers: int, batch: int, exact: Mapping[int, float]) -> Offer:
    """Time and money of a cell, as measured."""
    return Offer(
        workers=workers,
        batch=batch,
        step_s=one.step_s(link, workers, batch),
        samples=exact[batch],
        overhead=0.0,
        price=PRICE,
    )
