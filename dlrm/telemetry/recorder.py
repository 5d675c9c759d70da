"""The one object a training loop tells what happened; it decides what to measure, write and show.

Most of a step costs it two small copies and an addition on the device; every `log_every_steps` steps it
waits for the device, takes the running AUC, writes a line and moves the bar.
"""

import logging
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from time import monotonic
from typing import Any, Protocol, TextIO

import torch

from cpr.estimator.history import SaveCost
from cpr.recovery.run.report import Recovery
from dlrm.comm.feedback.residual import LostResiduals
from dlrm.comm.stats.figures import ExchangeFigures
from dlrm.launch.files import write_json
from dlrm.metrics import ChanceWatch, MetricValues, RunningAuc
from dlrm.telemetry.costs import Costs
from dlrm.telemetry.folder import circumstances
from dlrm.telemetry.learning_curve import CurvePoint
from dlrm.telemetry.progress import open_progress
from dlrm.telemetry.report import REPORT_NAME, FailureReport, Report, exchange_report, write_report
from dlrm.telemetry.silent import NoTelemetry
from dlrm.telemetry.sinks import HYPERPARAMETERS, Figures, Sink, event_writer, open_sinks

logger = logging.getLogger(__name__)


class Recorder(Protocol):
    """What `Telemetry` and `NoTelemetry` have in common."""

    def begin(self) -> None:
        """Tell that training begins, or goes on from the state that was loaded; once, before all else."""

    def step(
        self,
        *,
        step: int,
        samples: int,
        loss: torch.Tensor,
        logits: torch.Tensor,
        labels: torch.Tensor,
        learning_rates: Mapping[str, float],
    ) -> None:
        """Tell that a training step is done."""

    def exchange(self, figures: ExchangeFigures | None) -> None:
        """Tell what exchanging dense gradients took since this was last told; before the `step` that logs."""

    def costs(self, saves: Sequence[SaveCost], recoveries: Sequence[Recovery]) -> None:
        """Tell of newly committed saves, and of all recoveries of the run; for all ranks."""

    def evaluating(self) -> None:
        """Tell that another batch is evaluated."""

    def evaluation(self, *, step: int, samples: int, values: MetricValues) -> None:
        """Tell the result of an evaluation, right after it."""

    def finish(
        self, failures: FailureReport | None = None, losses: Sequence[LostResiduals] = ()
    ) -> Report | None:
        """Write the report of a run that reached its end, of what it went through, and gradients it lost."""

    def close(self) -> None:
        """Release everything; call it however the run ended."""

    def state_dict(self) -> dict[str, Any]:
        """What figures of later steps depend on."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with the figures of an earlier start of the same run."""


def open_telemetry(rank: int, folder: Path, **options: Any) -> Recorder:
    """`Telemetry(folder, **options)` on rank 0, silence on the others."""
    return Telemetry(folder, **options) if rank == 0 else NoTelemetry()


class Telemetry:
    """Records a run in its folder and shows its progress. For rank 0 only.

    Until `begin`, nothing in the folder changes: it may be that of a run which cannot go on in this way.

    Args:
        folder: the run folder; it exists.
        recipe: name of the recipe, for the report.
        config: the resolved configuration, JSON-able.
        total_samples: samples of the whole run, over all ranks.
        device: where losses, logits and labels live.
        log_every_steps: steps between two lines of metrics.
        best_auc: the AUC that no model can beat on this data; None where nobody knows.
        evaluated_batches: of rank 0 in an evaluation.
        stream: where the progress bar goes.
    """

    def __init__(
        self,
        folder: Path,
        *,
        recipe: str,
        config: Mapping[str, Any],
        total_samples: int,
        device: torch.device,
        log_every_steps: int,
        best_auc: float | None = None,
        evaluated_batches: int = 0,
        stream: TextIO = sys.stderr,
    ) -> None:
        self._folder = folder
        self._circumstances = {"config.json": config, "versions.json": circumstances()}
        self._recipe = recipe
        self._best_auc = best_auc
        self._log_every_steps = log_every_steps
        self._event_writer = event_writer()
        self._sinks: list[Sink] = []
        self._progress = open_progress(total_samples, evaluated_batches, stream)
        self._costs = Costs()
        self._running_auc = RunningAuc(device)
        self._watch = ChanceWatch()
        self._loss_sum = torch.zeros((), dtype=torch.float64, device=device)
        self._loss_steps = 0
        self._steps = 0
        self._first_sample = self._samples = self._logged_samples = 0
        self._curve: list[CurvePoint] = []
        self._values: MetricValues | None = None
        self._exchange: ExchangeFigures | None = None
        self._exchanges: list[ExchangeFigures] = []
        self._started = self._stepped = self._logged = monotonic()
        self._evaluation_s = 0.0

    def begin(self) -> None:
        """Write the circumstances, also as figures, and go on where the loaded state ends.

        What an earlier start wrote of later steps is taken back.

        Raises:
            OSError: they cannot be written, and there are none from an earlier start.
        """
        for name, content in self._circumstances.items():
            self._write_circumstances(self._folder / name, content)
        self._sinks = open_sinks(self._folder, self._steps, self._event_writer)
        self._write(HYPERPARAMETERS, self._steps, _flat(self._circumstances["config.json"]))

    def step(
        self,
        *,
        step: int,
        samples: int,
        loss: torch.Tensor,
        logits: torch.Tensor,
        labels: torch.Tensor,
        learning_rates: Mapping[str, float],
    ) -> None:
        """Tell that a training step is done.

        Args:
            step: steps done so far.
            samples: samples done so far, over all ranks.
            loss: mean loss of this rank's batch, a scalar; not waited for.
            logits: of this rank's batch, `[B]`.
            labels: of this rank's batch, 0 or 1, `[B]`.
            learning_rates: the current ones by name.
        """
        self._running_auc.update(logits, labels)
        self._loss_sum += loss.detach()
        self._loss_steps += 1
        self._steps, self._samples = step, samples
        self._stepped = monotonic()
        self._progress.advance(samples)
        if step % self._log_every_steps == 0:
            self._log(learning_rates)

    def exchange(self, figures: ExchangeFigures | None) -> None:
        """Tell what exchanging dense gradients took since this was last told; before the `step` that logs.

        Args:
            figures: of rank 0; None: there was nobody to exchange with.
        """
        self._exchange = figures
        if figures is not None:
            self._exchanges.append(figures)

    def costs(self, saves: Sequence[SaveCost], recoveries: Sequence[Recovery]) -> None:
        """Tell of newly committed saves, and of all recoveries of the run, oldest first."""
        for line in self._costs.lines(saves, recoveries):
            self._write(*line)

    def evaluating(self) -> None:
        """Tell that another batch is evaluated."""
        self._progress.evaluate()

    def evaluation(self, *, step: int, samples: int, values: MetricValues) -> None:
        """Tell the result of an evaluation, right after it; its time does not count as training."""
        self._progress.end_evaluation()
        now = monotonic()
        self._evaluation_s += now - self._stepped
        self._logged += now - self._stepped
        self._stepped = now
        self._values = values
        self._curve.append(CurvePoint(samples=samples, auc=values.auc, log_loss=values.log_loss))
        self._write(
            "evaluation",
            step,
            {
                "samples": samples,
                "seconds": now - self._started,
                "evaluated_samples": values.num_samples,
                "auc": values.auc,
                "log_loss": values.log_loss,
                "normalized_entropy": values.normalized_entropy,
                "calibration": values.calibration,
            },
        )
        logger.info("evaluation after %s samples: %s", f"{samples:,}", _short(values))

    def finish(self, failures: FailureReport | None = None, losses: Sequence[LostResiduals] = ()) -> Report:
        """Write `report.json`, `report.txt` and the curve, if there is room; return the report.

        A run that had ended, and of which nothing was trained since, keeps the report that it has.
        """
        trained_s = self._stepped - self._started - self._evaluation_s
        report = Report(
            recipe=self._recipe,
            run_folder=str(self._folder),
            metrics=self._values,
            best_auc=self._best_auc,
            steps=self._steps,
            samples=self._samples,
            seconds=monotonic() - self._started,
            samples_per_s=(self._samples - self._first_sample) / trained_s if trained_s > 0 else 0.0,
            failures=failures,
            exchange=exchange_report(self._exchanges, losses),
        )
        if self._samples == self._first_sample and (self._folder / REPORT_NAME).exists():
            logger.info("the run had ended before: %s stays as it is", self._folder / REPORT_NAME)
            return report
        try:
            write_report(self._folder, report, self._curve)
        except OSError as error:
            logger.warning("the report cannot be written into %s (%s)", self._folder, error)
        return report

    def close(self) -> None:
        """Close files and bar; call it however the run ended."""
        self._progress.close()
        for sink in self._sinks:
            sink.close()

    def state_dict(self) -> dict[str, Any]:
        """What figures of later steps depend on."""
        return {
            "steps": self._steps,
            "samples": self._samples,
            "loss_sum": self._loss_sum,
            "loss_steps": self._loss_steps,
            "running_auc": self._running_auc.state_dict(),
            "watch": self._watch.state_dict(),
            "curve": [asdict(point) for point in self._curve],
            "recoveries": self._costs.num_recoveries,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with the figures of an earlier start; before `begin`.

        The state may be that of a `NoTelemetry`, if rank 0 was lost: means that are under way begin anew.
        """
        self._steps = state["steps"]
        self._first_sample = self._samples = self._logged_samples = state["samples"]
        self._curve = [CurvePoint(**point) for point in state["curve"]]
        self._costs.num_recoveries = state.get("recoveries", 0)  # older runs have none
        if "running_auc" in state:
            self._loss_sum.copy_(state["loss_sum"])
            self._loss_steps = state["loss_steps"]
            self._running_auc.load_state_dict(state["running_auc"])
            self._watch.load_state_dict(state["watch"])
        self._progress.advance(self._samples)
        self._started = self._stepped = self._logged = monotonic()

    def _write_circumstances(self, path: Path, content: Mapping[str, Any]) -> None:
        try:
            write_json(path, content)
        except OSError as error:
            if not path.exists():  # nobody could resume the run
                raise OSError(
                    f"{path} cannot be written ({error}): free some space, or set train.run_folder"
                ) from error
            logger.warning("%s stays as an earlier start wrote it: it cannot be written (%s)", path, error)

    def _log(self, learning_rates: Mapping[str, float]) -> None:
        """Write and show what the steps since the last time gave."""
        loss = float(self._loss_sum) / max(
            self._loss_steps, 1
        )  # waits for the device, so that the time is right
        auc = self._running_auc.value()
        now = monotonic()
        samples_per_s = (self._samples - self._logged_samples) / max(now - self._logged, 1e-9)
        self._loss_sum.zero_()
        self._loss_steps = 0
        self._logged, self._logged_samples = now, self._samples
        self._write(
            "train",
            self._steps,
            {
                "samples": self._samples,
                "seconds": now - self._started,
                "loss": loss,
                "auc": auc,
                "samples_per_s": samples_per_s,
                "learning_rates": dict(learning_rates),
                **_exchange_figures(self._exchange),
            },
        )
        self._progress.show(loss, auc, samples_per_s)
        warning = self._watch.observe(self._samples, auc)
        if warning:
            logger.warning(warning)

    def _write(self, kind: str, step: int, figures: Figures) -> None:
        for sink in self._sinks:
            sink.write(kind, step, figures)


def _exchange_figures(figures: ExchangeFigures | None) -> Figures:
    """Of a line of metrics; none of a rank that is alone."""
    if figures is None:
        return {}
    energy = {} if figures.residual_energy is None else {"residual_energy": figures.residual_energy}
    return {
        "exchange_seconds": figures.seconds,
        "exchange_share": figures.share,
        "exchange_bytes": figures.sent_bytes,
        "kept_share": figures.kept_share,
        **energy,
    }


def _flat(config: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """Values by names such as `train.epochs`."""
    found: dict[str, Any] = {}
    for name, value in config.items():
        found |= (
            _flat(value, f"{before}{name}.") if isinstance(value, Mapping) else {f"{before}{name}": value}
        )
    return found


def _short(values: MetricValues) -> str:
    if values.auc is None or values.log_loss is None:
        return f"AUC not defined: {values.note}"
    return f"AUC {values.auc:.4f}, log loss {values.log_loss:.4f}"
