"""The end of a run: the table that a person reads, the same as JSON, and the learning curve."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from cpr.recovery.run.phases import PHASES
from dlrm.comm.feedback.residual import LostResiduals
from dlrm.comm.stats.figures import ExchangeFigures
from dlrm.metrics import MetricValues
from dlrm.telemetry.learning_curve import CurvePoint, draw_learning_curve

REPORT_NAME: Final = "report.json"
UNDEFINED: Final = "not defined"
WHY_WIDTH: Final = 60
"""Characters of the reason why a worker ended; the log and `report.json` have it whole."""


@dataclass(frozen=True, kw_only=True)
class SavesReport:
    """What saving cost, over the newest saves of the run."""

    num_bases: int
    """Saves of everything."""
    num_row_saves: int
    """Saves of the rows that deserved it most."""
    blocked_s: float
    """That training has waited for one of them, the median; if there were row saves, for those."""


@dataclass(frozen=True, kw_only=True)
class FailureReport:
    """What a run went through and what it cost."""

    recoveries: tuple[Mapping[str, Any], ...]
    """Each restart of the workers, as `cpr.recovery.run.report.Recovery` tells it: who died and why, which
    rows came from where, seconds by phase."""
    pls: float | None
    """Portion of lost samples (CPR paper), in total; None where it is not known."""
    saves: SavesReport | None = None
    """None where there was none."""


@dataclass(frozen=True, kw_only=True)
class ExchangeReport:
    """What the exchange of dense gradients took, as rank 0 saw it, and what it lost."""

    name: str
    """How it was done in the end."""
    seconds: float
    """That a step has waited for it, on average, slower ranks included."""
    share: float | None
    """Of the step; None: not known."""
    sent_bytes: float
    """That a rank has sent to others in a step, on average."""
    kept_share: float
    """Of the gradient's values that it has sent, on average."""
    losses: tuple[LostResiduals, ...]
    """Gradients that workers took along before they were sent."""


def exchange_report(
    figures: Sequence[ExchangeFigures], losses: Sequence[LostResiduals]
) -> ExchangeReport | None:
    """From figures of all parts of a run; None if there was nobody to exchange with."""
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
    """What a finished run has to say."""

    recipe: str
    """Name of the recipe."""
    run_folder: str
    """Where everything about the run is."""
    metrics: MetricValues | None
    """The last evaluation on the test days; None if there was none."""
    best_auc: float | None
    """The AUC that no model can beat on this data; None where nobody knows (real data)."""
    steps: int
    """Training steps done."""
    samples: int
    """Training samples done, over all ranks."""
    seconds: float
    """Wall-clock time of the run, evaluations included."""
    samples_per_s: float
    """Training samples a second over all ranks, evaluations left out."""
    failures: FailureReport | None = None
    """None where the run had no partial recovery."""
    exchange: ExchangeReport | None = None
    """None where one rank trained alone, or too few steps for figures."""


def format_report(report: Report) -> str:
    """The report as an aligned table of plain text, without a final newline."""
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
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)


def write_report(folder: Path, report: Report, curve: Sequence[CurvePoint]) -> None:
    """Write `report.json`, `report.txt` and, where there was an evaluation, `learning_curve.png`."""
    (folder / REPORT_NAME).write_text(json.dumps(asdict(report), indent=1) + "\n")
    (folder / "report.txt").write_text(format_report(report) + "\n")
    if curve:
        draw_learning_curve(folder / "learning_curve.png", curve, report.best_auc, report.recipe)


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
    told = f"{exchange.seconds * 1e3:,.1f} ms{share}; {exchange.sent_bytes / 1e6:,.2f} MB a rank{kept}"
    rows = [("exchange of dense gradients", f"{exchange.name}: {told}")]
    return [*rows, *(("  lost", str(loss)) for loss in exchange.losses)]


def _failure_rows(failures: FailureReport | None) -> list[tuple[str, str]]:
    if failures is None:
        return []
    rows = [("recoveries", str(len(failures.recoveries)))]
    for recovery in failures.recoveries:
        dead = "; ".join(f"rank {each['rank']}: {_first_words(each['why'])}" for each in recovery["dead"])
        seconds = recovery["seconds"]
        phases = ", ".join(f"{phase} {seconds[phase]:.1f}" for phase in PHASES if phase in seconds)
        whole = sum(seconds.values())
        rows += [
            (f"  at step {recovery['step']:,}", f"{recovery['kind']}: {recovery['reason']}"),
            ("    ended", dead or "nobody knows who"),
            ("    rows", _row_origins(recovery)),
            ("    seconds", f"{whole:.1f} ({phases})"),
        ]
    pls = "not known" if failures.pls is None else f"{failures.pls:.6f}"
    return [*rows, ("portion of lost samples (PLS)", pls), *_saves_rows(failures.saves)]


def _saves_rows(saves: SavesReport | None) -> list[tuple[str, str]]:
    if saves is None:
        return []
    counts = ((saves.num_bases, "of everything"), (saves.num_row_saves, "of rows"))
    told = ", ".join(f"{count:,} {what}" for count, what in counts if count)
    return [("newest saves", f"{told}; training waits {saves.blocked_s * 1e3:,.1f} ms for one")]


def _first_words(why: str) -> str:
    return why if len(why) <= WHY_WIDTH else f"{why[:WHY_WIDTH]} ..."


def _row_origins(recovery: Mapping[str, Any]) -> str:
    """Rows of all tables together, by where they came from."""
    if not recovery["sources"]:
        return "initial values" if recovery["save_step"] is None else "all from the checkpoint"
    names = {"adopted": "stayed in memory", "moved": "moved", "lost": "from the checkpoint"}
    totals = {name: sum(source[name] for source in recovery["sources"]) for name in names}
    return ", ".join(f"{total:,} {names[name]}" for name, total in totals.items() if total)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"
