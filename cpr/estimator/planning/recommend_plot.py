"""Picture of a recommendation: overhead against interval for both recoveries, and the fits of failures."""

from pathlib import Path
from typing import Any, Final

import numpy as np
from matplotlib.figure import Figure

from cpr.estimator.failures.fits import kaplan_meier
from cpr.estimator.failures.log_report import LogReport
from cpr.estimator.planning.formulas import overhead_full, overhead_partial
from cpr.estimator.planning.recommend import Recommendation
from cpr.humanize import count_text, duration_text

POINTS: Final = 400
TICKS_S: Final = (1, 10, 60, 600, 3600, 4 * 3600, 24 * 3600, 7 * 24 * 3600, 30 * 24 * 3600)


def plot(what: Recommendation, path: Path, failures: LogReport | None = None) -> None:
    """Draw a recommendation into a .png, .svg or .pdf file; a second panel shows the fits of failures.

    Raises:
        ValueError: the format is not known.
        OSError: the file cannot be written.
    """
    shown = failures if failures is not None and failures.fits else None
    num_panels = 1 if shown is None else 2
    figure = Figure(figsize=(7 * num_panels, 4.5), layout="constrained")
    panels = figure.subplots(1, num_panels, squeeze=False)[0]
    _draw_overheads(panels[0], what)
    if shown is not None:
        _draw_failures(panels[1], shown)
    figure.savefig(path, dpi=150)


def _draw_overheads(axes: Any, what: Recommendation) -> None:
    job, plans = what.job, [plan for plan in (what.full, what.partial) if plan is not None]
    shortest = min(plan.interval_s for plan in plans) / 10
    intervals = np.geomspace(min(max(shortest, job.delay), job.T_total / 2), job.T_total, POINTS)
    for name, formula, color in (("full", overhead_full, "C3"), ("partial", overhead_partial, "C0")):
        overheads = [100 * formula(job, float(interval)).total for interval in intervals]
        axes.plot(intervals, overheads, color=color, label=f"{name} recovery")
    for plan in plans:
        color, cost = ("C3" if plan.recovery == "full" else "C0"), 100 * plan.overhead.total
        axes.plot(plan.interval_s, cost, "o", color=color, markersize=10 if plan is what.chosen else 6)
        axes.annotate(
            f"{duration_text(plan.interval_s)}: {cost:.3g}%"
            + (" (recommended)" if plan is what.chosen else ""),
            (plan.interval_s, cost),
            xytext=(0, 10) if plan.recovery == "full" else (-8, -16),
            textcoords="offset points",
            ha="center" if plan.recovery == "full" else "right",
        )
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="time from one save to the next",
        ylabel="overhead, of training time",
        title=f"{job.N_emb} nodes, a failure each {duration_text(job.T_fail)}, "
        f"target PLS {what.target_pls:g}",
    )
    if least := min(plan.overhead.total for plan in plans):
        axes.set_ylim(bottom=50 * least)  # room for labels below the curve
    axes.yaxis.set_major_formatter("{x:g}%")
    ticks = [tick for tick in TICKS_S if intervals[0] <= tick <= intervals[-1]]
    axes.set_xticks(ticks, [duration_text(tick) for tick in ticks])
    axes.set_xticks([], minor=True)
    axes.legend()
    axes.grid(alpha=0.3)


def _draw_failures(axes: Any, failures: LogReport) -> None:
    times, over = kaplan_meier(failures.log)
    hours = times / 3600
    steps = np.concatenate([[0], hours]), np.concatenate([[0], over])
    axes.step(*steps, where="post", color="k", label="observed")
    reach = np.linspace(0, 1.2 * hours[-1], POINTS)
    for fit in failures.fits:
        label = f"{fit.distribution} (shape {fit.shape:.2g})"
        axes.plot(reach, fit.cdf(3600 * reach), label=label, alpha=0.8)
    axes.set(
        xlabel="hours from one failure to the next",
        ylabel="share of the times that are shorter",
        ylim=(0, 1.02),
        title=count_text(failures.log.num_failures, "failure"),
    )
    axes.legend()
    axes.grid(alpha=0.3)
