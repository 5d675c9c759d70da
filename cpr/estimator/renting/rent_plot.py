"""Picture of the choice of workers: time over money, with the Pareto set."""

from pathlib import Path

from matplotlib.figure import Figure

from cpr.estimator.renting.offers import RentPlan


def plot(plan: RentPlan, path: Path) -> None:
    """Draw all offers into a .png, .svg or .pdf file, by number of workers, and the line of the Pareto set.

    Batches of offers outside of what was measured have an asterisk, as in the text.

    Raises:
        ValueError: the format is not known.
        OSError: the file cannot be written.
    """
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for number in sorted({offer.workers for offer in plan.offers}):
        offers = [offer for offer in plan.offers if offer.workers == number]
        label = f"{number} worker{'s'[: number > 1]}"
        axes.plot([each.money for each in offers], [each.hours for each in offers], "o", label=label)
        for each in offers:
            batch, at = f"{each.batch:,}{'*' * each.is_extrapolated}", (each.money, each.hours)
            axes.annotate(batch, at, (5, 4), textcoords="offset points", fontsize=7)
    best = plan.pareto
    line = [each.money for each in best], [each.hours for each in best]
    axes.plot(*line, color="k", linewidth=0.8, zorder=0, label="Pareto set")
    axes.plot(plan.knee.money, plan.knee.hours, "o", markersize=13, fillstyle="none", color="k", label="knee")
    outside = "; *: outside of what was measured" * any(each.is_extrapolated for each in plan.offers)
    axes.set(xscale="log", yscale="log", xlabel="money", ylabel="hours")
    axes.set_title(f"To the target, by batch{outside}")
    axes.margins(0.1)  # for the batches beside their points
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=150)
