"""Inputs of the estimator, merged from flags, a failure log and the histories of runs, in this priority."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from cpr.estimator.failures.log import FailureLog, log_of_runs
from cpr.estimator.history import RunHistory
from cpr.estimator.planning.formulas import Job
from cpr.humanize import count_text, duration_text

FLAGS: Final = {
    "T_total": "--total",
    "T_fail": "--fail",
    "O_save": "--save",
    "blocked_save": "--blocked",
    "O_load": "--load",
    "O_res": "--reschedule",
    "N_emb": "--nodes",
}
"""The flag of each of a job's values."""
NUMBERS: Final = ("N_emb", "nodes_lost", "row_share")
"""Values that are not times."""
NEEDED: Final = ("T_total", "T_fail", "O_save", "N_emb")
"""Required values; the others default to 0, or are the same for both recoveries."""


@dataclass(frozen=True, kw_only=True)
class EstimatorInputs:
    """A job and the source of each of its values."""

    job: Job
    sources: Mapping[str, str]
    """By the name of the value: "given", "measured in 2 runs", ..."""
    log: FailureLog | None = None
    """Failure log, if there is any."""
    step_s: float | None = None
    """Duration of a training step in the newest run; None without runs."""

    def __str__(self) -> str:
        lines = []
        for name, source in self.sources.items():
            value = getattr(self.job, name)
            shown = f"{value:g}" if name in NUMBERS else duration_text(value)
            lines.append(f"  {name:<12}  {shown:>9}  {source}")
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        """The values as JSON: seconds, numbers of nodes, and shares."""
        return {
            name: {"value": getattr(self.job, name), "source": source}
            for name, source in self.sources.items()
        }


_Found = dict[str, tuple[Any, str]]
"""Values of a job with their sources, by name."""


def gather(
    given: Mapping[str, float | None], runs: Sequence[RunHistory] = (), log: FailureLog | None = None
) -> EstimatorInputs:
    """Merge the inputs of the estimator.

    Args:
        given: values of flags, by the names of `FLAGS`; None: not given.
        runs: histories of runs with the same number of nodes, the newest last.
        log: failure log; takes precedence over the failures in the histories.

    Raises:
        ValueError: a value is missing or impossible; the message names the flag.
    """
    found: _Found = {}
    for name, value in given.items():
        _offer(found, name, value, "given")
    log_source = "from the log of failures"
    if log is None and runs:
        log, log_source = log_of_runs(runs), f"seen in {count_text(len(runs), 'run')}"
    if log is not None and log.num_failures:
        source = f"{count_text(log.num_failures, 'failure')} in {duration_text(log.exposure_s)}, {log_source}"
        _offer(found, "T_fail", log.exposure_s / log.num_failures, source)
    if runs:
        _measured(found, runs)
    if missing := [name for name in NEEDED if name not in found]:
        raise ValueError(_what_is_missing(missing, log))
    for name in ("O_load", "O_res"):
        _offer(
            found, name, 0.0, f"taken as 0: {FLAGS[name]} was not given (it is the same for both recoveries)"
        )
    order = [*FLAGS, "O_rows", "blocked_rows", "row_share", "nodes_lost"]
    return EstimatorInputs(
        job=Job(**{name: value for name, (value, _) in found.items()}),
        sources={name: found[name][1] for name in order if name in found},
        log=log,
        step_s=runs[-1].step_s if runs else None,
    )


def _measured(found: _Found, runs: Sequence[RunHistory]) -> None:
    sizes = sorted({run.nodes for run in runs})
    if len(sizes) > 1:
        raise ValueError(
            f"these runs had {' and '.join(map(str, sizes))} nodes; how often a job fails depends on them: "
            "give runs of one size"
        )
    is_save_given = "O_save" in found  # then measured training time lost does not belong to it
    pooled = replace(
        runs[-1],
        saves=[] if is_save_given else [save for run in runs for save in run.saves],
        failures=[failure for run in runs for failure in run.failures],
    )
    source = f"measured in {count_text(len(runs), 'run')}"
    per_failure = f"{source}, {count_text(len(pooled.failures), 'failure')}"
    _offer(found, "N_emb", pooled.nodes, source)
    newest = source if len(runs) == 1 else "measured in the newest run"
    _offer(found, "T_total", runs[-1].T_total, f"{newest}: the steps for all samples")
    _measured_saves(found, pooled, source)
    _offer(found, "O_load", pooled.O_load, per_failure)
    _offer(found, "O_res", pooled.O_res, per_failure)
    _offer(found, "nodes_lost", pooled.nodes_lost, f"{per_failure}: nodes' worth of rows lost in each")


def _measured_saves(found: _Found, pooled: RunHistory, source: str) -> None:
    """Add the costs of saves; a save takes at least as long as the training time lost by it."""
    if pooled.O_save is None or pooled.O_blocked is None:
        return
    is_cost_given = "blocked_save" in found
    counted = f"{source}, {count_text(len(pooled.saves), 'save')}"
    _offer(found, "O_save", max(pooled.O_save, pooled.O_blocked), counted)
    _offer(found, "blocked_save", pooled.O_blocked, f"{source}: what training loses")
    rows = pooled.row_save
    if rows is None or is_cost_given:
        return
    _offer(found, "O_rows", max(rows.seconds, rows.blocked_s), f"{source}: a save of some rows")
    _offer(found, "blocked_rows", rows.blocked_s, f"{source}: what training loses")
    _offer(found, "row_share", rows.share, f"{source}: of the rows, in a save of some")


def _offer(found: _Found, name: str, value: float | None, source: str) -> None:
    """Add a value, unless an earlier one takes precedence."""
    if value is not None:
        found.setdefault(name, (value, source))


def _what_is_missing(missing: Sequence[str], log: FailureLog | None) -> str:
    flags = ", ".join(f"{FLAGS[name]} ({name})" for name in missing)
    if list(missing) == ["T_fail"] and log is not None:
        return (
            f"no failure in {duration_text(log.exposure_s)}: how often the job fails is not known. Give "
            "--fail, or a log with failures by --failures"
        )
    return f"this is missing: {flags}. Give it, or measure it: --run DIR reads what a run has measured"
