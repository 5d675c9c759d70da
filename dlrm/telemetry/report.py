"""The final report of a run: a text table, the same as JSON, and the learning curve."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from cpr.humanize import align_columns
from cpr.recovery.run.report import PHASES
from dlrm.comm.feedback import LostResiduals
from dlrm.comm.stats import ExchangeFigures
from dlrm.metrics import MetricValues

if TYPE_CHECKING:
    from matplotlib.axes import Axes

REPORT_NAME: Final = "report.json"
UNDEFINED: Final = "not defined"
WHY_WIDTH: Final = 60
"""Characters of a worker's error shown in the table; the log and `report.json` have all of it."""


@dataclass(frozen=True, kw_only=True)
class CurvePoint:
    """One evaluation on the learning curve."""

    samples: int
    """Training samples done before the evaluation."""
    auc: float | None
    log_loss: float | None


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


def format_report(report: Report) -> str:
    """Format the report as an aligned text table, without a final newline."""
    best = "unknown for real data" if report.best_auc is None else f"{report.best_auc:.4f}"
    rows = [
        *_quality_rows(report.metrics),
        ("best AUC any model can reach", best),
        ("training samples/s", f"{report.samples_per_s:,.0f}"),
        ("steps", f"{report.steps:,}"),
        ("training samples", f"{report.samples:,}"),
        ("time", _duration(report.seconds)),
        *_exchange_rows(report.exchange),
        *_failure_rows(report.failures),
        ("run folder", report.run_folder),
    ]
    return "\n".join(align_columns(rows, left=(0, 1)))


def write_report(folder: Path, report: Report, curve: Sequence[CurvePoint]) -> None:
    """Write `report.json`, `report.txt` and, after an evaluation, `learning_curve.png`."""
    (folder / REPORT_NAME).write_text(json.dumps(asdict(report), indent=1) + "\n")
    (folder / "report.txt").write_text(format_report(report) + "\n")
    if curve:
        draw_learning_curve(folder / "learning_curve.png", curve, report.best_auc, report.recipe)


def draw_learning_curve(path: Path, curve: Sequence[CurvePoint], best_auc: float | None, title: str) -> None:
    """Draw AUC and log loss of all evaluations, and the best AUC if known, into the picture file `path`."""
    from matplotlib.figure import Figure  # noqa: PLC0415  # slow to import, and needed once at the end

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    _draw(left, "AUC on the test days", [(point.samples, point.auc) for point in curve])
    _draw(right, "log loss on the test days", [(point.samples, point.log_loss) for point in curve])
    if best_auc is not None:
        label = f"best any model can reach: {best_auc:.4f}"
        left.axhline(best_auc, color="black", linestyle="--", linewidth=1, label=label)
        left.legend(loc="lower right")
    figure.suptitle(title)
    figure.savefig(path, dpi=150)


def _draw(axes: "Axes", label: str, points: Sequence[tuple[int, float | None]]) -> None:
    defined = [(samples, value) for samples, value in points if value is not None]
    axes.plot([samples for samples, _ in defined], [value for _, value in defined], marker="o", markersize=3)
    axes.set_xlabel("training samples")
    axes.set_ylabel(label)
    axes.grid(alpha=0.3)


def _quality_rows(metrics: MetricValues | None) -> list[tuple[str, str]]:
    if metrics is None:
        return [("AUC", "not evaluated")]
    named = {
        "AUC": metrics.auc,
        "log loss": metrics.log_loss,
        "normalized entropy": metrics.normalized_entropy,
        "calibration": metrics.calibration,
    }
    return [
        (name, f"{UNDEFINED}: {metrics.note}" if value is None else f"{value:.4f}")
        for name, value in named.items()
    ]


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
    return [*rows, ("portion of lost samples (PLS)", pls), *_saves_rows(failures.saves)]


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
    names = {"adopted": "stayed in memory", "moved": "moved", "lost": "from the checkpoint"}
    totals = {name: sum(source[name] for source in recovery["sources"]) for name in names}
    return ", ".join(f"{total:,} {names[name]}" for name, total in totals.items() if total)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"
