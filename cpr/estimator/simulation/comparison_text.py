"""What `cpr simulate` prints."""

from cpr.estimator.failures.arrivals import FailureModel
from cpr.estimator.simulation.comparison import Compared, Comparison, departures
from cpr.estimator.simulation.means import Mean
from cpr.estimator.simulation.simulation import PARTS
from cpr.humanize import duration_text

PART_NAMES = {"save": "saves", "lost": "work done again", "load": "loading", "reschedule": "rescheduling"}


def as_text(comparison: Comparison) -> str:
    """A table, what partial recovery saves, and where the formulas are wrong."""
    job, config = comparison.job, comparison.config
    runs = f"{config.num_trials:,} runs of {duration_text(job.T_total)} on {job.N_emb:,} nodes"
    lines = [f"{runs}, seed {config.seed}; {_failures_text(job.T_fail, config.failures)}", ""]
    lines += _table(comparison)
    lines += ["", f"partial recovery saves {_share(comparison.saved)} of the useful time"]
    for side in (comparison.full, comparison.partial):
        given_up = 1 - side.simulation.finished_share
        if given_up:
            lines.append(
                f"{side.simulation.config.recovery} recovery: {given_up:.1%} of the runs were given up after "
                f"{config.give_up:g} times the useful time; its costs are lower bounds"
            )
    reasons = departures(comparison)
    if reasons:
        lines += ["the formulas are wrong here:", *(f"- {reason}" for reason in reasons)]
    else:
        lines.append("the formulas agree")
    return "\n".join(lines)


def _failures_text(mean_s: float, failures: FailureModel) -> str:
    """How failures come."""
    how = {
        "exponential": "at random",
        "recorded": f"as {len(failures.recorded_s)} recorded ones",
    }.get(failures.distribution, f"{failures.distribution} of shape {failures.shape:g}")
    text = f"a failure every {duration_text(mean_s)}, {how}"
    if failures.scope == "node":
        text += ", of each node by itself"
    if failures.group_share:
        text += f"; {failures.group_share:.3g} of them take {failures.group_nodes} nodes"
    return text


def _table(comparison: Comparison) -> list[str]:
    """Formula and simulation of both recoveries."""
    sides = (comparison.full, comparison.partial)
    rows = [("", "full recovery", "", "partial recovery", ""), ("", *("by formula", "simulated") * 2)]
    rows.append(_row("interval", *(_interval(side) for side in sides)))
    rows.append(
        _row("overhead", *((_percent(s.expected.total), _share(s.simulation.overhead)) for s in sides))
    )
    for part in PARTS:
        cells = ((_percent(getattr(s.expected, part)), _share(s.simulation.parts[part])) for s in sides)
        rows.append(_row(f"  {PART_NAMES[part]}", *cells))
    rows.append(
        _row("worst 5 % of runs, at least", *(("", _percent(s.simulation.worst(0.05))) for s in sides))
    )
    rows.append(_row("PLS", *((f"{s.expected_pls:.4f}", _number(s.simulation.pls)) for s in sides)))
    expected = comparison.job.T_total / comparison.job.T_fail
    rows.append(
        _row("failures in a run", *((f"{expected:.4g}", _number(s.simulation.failures, 2)) for s in sides))
    )
    widths = [max(len(row[place]) for row in rows[1:]) for place in range(5)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]


def _row(name: str, full: tuple[str, str], partial: tuple[str, str]) -> tuple[str, str, str, str, str]:
    return (name, *full, *partial)


def _interval(side: Compared) -> tuple[str, str]:
    text = duration_text(side.simulation.config.interval_s)
    return text, text


def _percent(share: float) -> str:
    return f"{share:.2%}".replace("%", " %")


def _share(mean: Mean) -> str:
    return f"{100 * mean.value:.2f} +- {100 * mean.half_width:.2f} %"


def _number(mean: Mean, digits: int = 4) -> str:
    return f"{mean.value:.{digits}f} +- {mean.half_width:.{digits}f}"
