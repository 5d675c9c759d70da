"""Text output of `cpr simulate`."""

import re

from cpr.estimator.failures.arrivals import FailureModel
from cpr.estimator.simulation.comparison import NAMES, RecoveryComparison, departures
from cpr.estimator.simulation.simulation import PARTS, Mean
from cpr.humanize import align_columns, duration_text

PART_NAMES = {"save": "saves", "lost": "work done again", "load": "loading", "reschedule": "rescheduling"}


def as_text(comparison: RecoveryComparison) -> str:
    """Text of a comparison: a table, the gain of partial recovery, and where the formulas are wrong."""
    job, config = comparison.job, comparison.config
    runs = f"{config.num_trials:,} runs of {duration_text(job.T_total)} on {job.N_emb:,} nodes"
    lines = [f"{runs}, seed {config.seed}; {_failures_text(job.T_fail, config.failures)}", ""]
    lines += _table(comparison)
    lines += ["", f"partial recovery saves {_share(comparison.saved)} of the useful time"]
    for name, side in comparison.sides.items():
        given_up = 1 - side.simulation.finished_share
        if given_up:
            lines.append(
                f"{NAMES[name]}: {given_up:.1%} of the runs were given up after "
                f"{config.give_up:g} times the useful time; its costs are lower bounds"
            )
    reasons = departures(comparison)
    if reasons:
        lines += ["the formulas are wrong here:", *(f"- {reason}" for reason in reasons)]
    else:
        lines.append("the formulas agree")
    return "\n".join(lines)


def _failures_text(mean_s: float, failures: FailureModel) -> str:
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


def _table(comparison: RecoveryComparison) -> list[str]:
    """Formula and simulation of each recovery, in two columns each."""
    sides = comparison.sides
    rows = [["", *("by formula", "simulated") * len(sides)], ["interval"], ["overhead"]]
    rows += [[f"  {PART_NAMES[part]}"] for part in PARTS]
    rows += [["worst 5 % of runs, at least"], ["PLS"], ["failures in a run"]]
    if comparison.mirror is not None:
        rows[3] = [f"  {PART_NAMES['save']} and mirrors"]
    for name, side in sides.items():
        form = ".2g" if name == "mirror" else ".4f"  # mirrors leave little of it
        simulation, job = side.simulation, comparison.job
        interval = duration_text(simulation.config.interval_s)
        cells = [
            (interval, interval),
            (_percent(side.expected.total), _share(simulation.overhead)),
            *((_percent(getattr(side.expected, part)), _share(simulation.parts[part])) for part in PARTS),
            ("", _percent(simulation.worst(0.05))),
            (f"{side.expected_pls:{form}}", _number(simulation.pls, form)),
            (f"{job.T_total / job.T_fail:.4g}", _number(simulation.failures, ".2f")),
        ]
        for row, pair in zip(rows[1:], cells, strict=True):
            row.extend(pair)
    head, *lines = align_columns(rows, left=range(1 + 2 * len(sides)))
    title = ""
    for name, column in zip(sides, re.finditer("by formula", head), strict=True):
        title = f"{title:{column.start()}}{NAMES[name]}"
    return [title, head, *lines]


def _percent(share: float) -> str:
    return f"{share:.2%}".replace("%", " %")


def _share(mean: Mean) -> str:
    return f"{100 * mean.value:.2f} +- {100 * mean.half_width:.2f} %"


def _number(mean: Mean, form: str) -> str:
    return f"{mean.value:{form}} +- {mean.half_width:{form}}"
