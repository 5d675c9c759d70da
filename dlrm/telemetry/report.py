"""The final report of a run: a text table, and the same as JSON."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from cpr.humanize import align_columns
from cpr.mirror.config import MirrorFigures
from cpr.recovery.run.report import PHASES
from data.stream.loader import StreamFigures
from dlrm.comm.feedback import LostResiduals
from dlrm.comm.stats import ExchangeFigures
from dlrm.metrics import MetricValues, SampleMean

REPORT_NAME: Final = "report.json"
UNDEFINED: Final = "not defined"
WHY_WIDTH: Final = 60
"""Characters of a worker's error shown in the table; the log and `report.json` have all of it."""


@dataclass(frozen=True, kw_only=True)
class SavesReport:
    """Cost of the newest saves of a run."""

    num_bases: int
    """Number of full saves."""
    num_row_saves: int
    """Number of saves of the most important rows only."""
    blocked_s: float
    """Median time that training waited for a row save, or for a full save if there were no row saves."""


@dataclass(frozen=True, kw_only=True)
class FailureHistory:
    """Failure history of a run and its cost."""

    recoveries: tuple[Mapping[str, Any], ...]
    """Each recovery as `cpr.recovery.run.report.Recovery.to_dict` gives it: dead workers, row origins,
    seconds by phase."""
    pls: float | None
    """Total portion of lost samples (PLS, CPR paper); None if unknown."""
    saves: SavesReport | None = None
    """None if nothing was saved."""
    mirror: MirrorFigures | None = None
    """Of rank 0's rows, by the newest workers; None without mirrors."""


@dataclass(frozen=True, kw_only=True)
class ExchangeReport:
    """Cost of the exchange of dense gradients on rank 0, and the gradients that were lost."""

    name: str
    """Name of the exchange in use at the end."""
    seconds: float
    """Mean time that a step waited for the exchange, slower ranks included."""
    share: float | None
    """Share of the step; None if unknown."""
    sent_bytes: float
    """Mean bytes that a rank sent in a step."""
    kept_share: float
    """Mean share of the gradient's values that were sent."""
    losses: tuple[LostResiduals, ...]
    """Unsent gradients that were lost with their workers."""


@dataclass(frozen=True, kw_only=True)
class BestReport:
    """The state that was kept as the best (`train.keep_best`), and why training stopped early."""

    metric: str
    value: float | None
    """None if no state could be kept."""
    step: int | None
    uri: str
    missed: float | None
    """A better value whose state could not be written; None if there was none."""
    stopped_early: str
    """Empty if training did not stop early."""


def exchange_report(
    figures: Sequence[ExchangeFigures], losses: Sequence[LostResiduals]
) -> ExchangeReport | None:
    """Average the exchange figures of a run over its steps; None if no gradients were exchanged."""
    steps = sum(each.steps for each in figures)
    if not steps:
        return None

    def mean(name: str) -> float:
        return float(sum(each.steps * getattr(each, name) for each in figures)) / steps

    step_seconds = mean("step_seconds")
    return ExchangeReport(
        name=figures[-1].name,
        seconds=mean("seconds"),
        share=mean("seconds") / step_seconds if step_seconds else None,
        sent_bytes=mean("sent_bytes"),
        kept_share=mean("kept_share"),
        losses=tuple(losses),
    )


@dataclass(frozen=True, kw_only=True)
class Report:
    """Results of a finished run."""

    recipe: str
    run_folder: str
    metrics: MetricValues | None
    """The last evaluation on the test days; None if there was none."""
    best_auc: float | None
    """The AUC that no model can beat on this data; None if unknown, as for real data."""
    steps: int
    samples: int
    """Training samples done, over all ranks."""
    seconds: float
    """Wall-clock time of the run, evaluations included."""
    samples_per_s: float
    """Training samples per second over all ranks, without evaluations."""
    failures: FailureHistory | None = None
    """None without partial recovery."""
    exchange: ExchangeReport | None = None
    """None with one rank, or after too few steps."""
    best: BestReport | None = None
    """None without `train.keep_best`."""
    stream: StreamFigures | None = None
    """None if no samples streamed in."""


def format_report(report: Report) -> str:
    """Format the report as an aligned text table, without a final newline."""
    rows = [
        *quality_rows(report.metrics, report.best_auc),
        *_best_rows(report.best),
        ("training samples/s", f"{report.samples_per_s:,.0f}"),
        ("steps", f"{report.steps:,}"),
        ("training samples", f"{report.samples:,}"),
        *_stream_rows(report.stream),
        ("time", _duration(report.seconds)),
        *_exchange_rows(report.exchange),
        *_failure_rows(report.failures),
        ("run folder", report.run_folder),
    ]
    return "\n".join(align_columns(rows, left=(0, 1)))


def _stream_rows(stream: StreamFigures | None) -> list[tuple[str, str]]:
    if stream is None:
        return []
    counts = {"left out": stream.left_out, "bad": stream.bad, "still waiting": stream.waiting}
    return [("records of the stream", ", ".join(f"{each:,} {name}" for name, each in counts.items()))]


def write_report(folder: Path, report: Report) -> None:
    """Write `report.json` and `report.txt`."""
    (folder / REPORT_NAME).write_text(json.dumps(asdict(report), indent=1) + "\n")
    (folder / "report.txt").write_text(format_report(report) + "\n")


def quality_rows(metrics: MetricValues | None, best_auc: float | None) -> list[tuple[str, str]]:
    """Rows of a table with the quality of predictions and the best AUC that any model can reach."""
    best = ("best AUC any model can reach", "unknown" if best_auc is None else f"{best_auc:.4f}")
    if metrics is None:
        return [("AUC", "not evaluated"), best]
    means = [(name, mean_text(mean, metrics.num_samples)) for name, mean in metrics.means.items()]
    if not metrics.is_of_clicks:
        return means
    named = {
        "AUC": metrics.auc,
        "log loss": metrics.log_loss,
        "normalized entropy": metrics.normalized_entropy,
        "calibration": metrics.calibration,
    }
    clicks = [
        (name, f"{UNDEFINED}: {metrics.note}" if value is None else f"{value:.4f}")
        for name, value in named.items()
    ]
    return [*clicks, best, *means]


def mean_text(mean: SampleMean, num_samples: int | None = None) -> str:
    """A mean as text, with the number of its samples if that is not `num_samples`."""
    if mean.value is None:
        return f"{UNDEFINED}: no sample has a value"
    of = "" if num_samples in {None, mean.num_samples} else f" (of {mean.num_samples:,} samples)"
    return f"{mean.value:.4f}{of}"


def _best_rows(best: BestReport | None) -> list[tuple[str, str]]:
    if best is None:
        return []
    kept = "none could be written" if best.value is None else f"{best.metric} {best.value:.4f}"
    where = "" if best.step is None else f" at step {best.step:,}, kept in {best.uri}"
    missed = "" if best.missed is None else f"; that of {best.missed:.4f} could not be written"
    stopped = [("stopped early", best.stopped_early)] if best.stopped_early else []
    return [("best state", f"{kept}{where}{missed}"), *stopped]


def _exchange_rows(exchange: ExchangeReport | None) -> list[tuple[str, str]]:
    if exchange is None:
        return []
    share = "" if exchange.share is None else f", {exchange.share:.1%} of a step"
    kept = "" if exchange.kept_share == 1 else f", {exchange.kept_share:.2%} of the values"
    text = f"{exchange.seconds * 1e3:,.1f} ms{share}; {exchange.sent_bytes / 1e6:,.2f} MB a rank{kept}"
    rows = [("exchange of dense gradients", f"{exchange.name}: {text}")]
    return [*rows, *(("  lost", str(loss)) for loss in exchange.losses)]


def _failure_rows(failures: FailureHistory | None) -> list[tuple[str, str]]:
    if failures is None:
        return []
    rows = [("recoveries", str(len(failures.recoveries)))]
    for recovery in failures.recoveries:
        dead = "; ".join(f"rank {each['rank']}: {_shorten(each['why'])}" for each in recovery["dead"])
        seconds = recovery["seconds"]
        phases = ", ".join(f"{phase} {seconds[phase]:.1f}" for phase in PHASES if phase in seconds)
        rows += [
            (f"  at step {recovery['step']:,}", f"{recovery['kind']}: {recovery['reason']}"),
            ("    ended", dead or "unknown"),
            ("    rows", _row_origins(recovery)),
            ("    seconds", f"{sum(seconds.values()):.1f} ({phases})"),
        ]
    pls = "not known" if failures.pls is None else f"{failures.pls:.6f}"
    rows += [("portion of lost samples (PLS)", pls), *_saves_rows(failures.saves)]
    return [*rows, ("mirror of rank 0's rows", str(failures.mirror))] if failures.mirror else rows


def _saves_rows(saves: SavesReport | None) -> list[tuple[str, str]]:
    if saves is None:
        return []
    counts = ((saves.num_bases, "of everything"), (saves.num_row_saves, "of rows"))
    text = ", ".join(f"{count:,} {what}" for count, what in counts if count)
    return [("newest saves", f"{text}; training waits {saves.blocked_s * 1e3:,.1f} ms for one")]


def _shorten(why: str) -> str:
    return why if len(why) <= WHY_WIDTH else f"{why[:WHY_WIDTH]} ..."


def _row_origins(recovery: Mapping[str, Any]) -> str:
    """Number of rows over all tables, by where they came from."""
    if not recovery["sources"]:
        return "initial values" if recovery["save_step"] is None else "all from the checkpoint"
    names = {
        "adopted": "stayed in memory",
        "moved": "moved",
        "mirrored": f"from mirrors of step {recovery.get('mirror_step')}",
        "lost": "from the checkpoint",
    }
    totals = {name: sum(source.get(name, 0) for source in recovery["sources"]) for name in names}
    return ", ".join(f"{total:,} {names[name]}" for name, total in totals.items() if total)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"
