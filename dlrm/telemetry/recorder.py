"""The object that the training loop reports to: `Telemetry` on rank 0, a silent `Recorder` elsewhere.

A step costs rank 0 two small device copies and an addition. Every `log_every_steps` steps it waits for the
device, computes the running AUC, writes a line of metrics and moves the progress bar.
"""

import logging
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from time import monotonic, perf_counter
from typing import Any, Final, TextIO

import torch

from cpr.checkpoint.storage.local import LocalStorage
from cpr.estimator.history import RunHistory, SaveCost, SaveEvent
from cpr.humanize import count_text
from cpr.mirror.config import MirrorFigures
from cpr.recovery.run.report import Recovery
from cpr.report.page import PAGE_NAME, write_page
from cpr.report.records import read_folder
from data.dataset import DatasetManifest
from data.stream.loader import StreamFigures
from dlrm.comm.feedback import LostResiduals
from dlrm.comm.stats import ExchangeFigures
from dlrm.launch.files import write_json
from dlrm.metrics import WORSE_THAN_MEAN, ChanceWatch, MetricValues, RunningAuc
from dlrm.telemetry.folder import DATA_NAME, circumstances
from dlrm.telemetry.progress import TrainingProgress
from dlrm.telemetry.report import (
    REPORT_NAME,
    BestReport,
    FailureHistory,
    Report,
    exchange_report,
    mean_text,
    write_report,
)
from dlrm.telemetry.scaling import ScalingFigures
from dlrm.telemetry.sinks import HYPERPARAMETERS, Figures, Sink, event_writer, open_sinks

END: Final = "end"
"""Kind of the line that says why training has ended."""
REASON_WIDTH: Final = 1000
"""Characters of an error in a line of metrics."""

logger = logging.getLogger(__name__)


class Recorder:
    """Counts how far a run is and writes nothing: the telemetry of every rank but 0.

    All ranks keep these counts, so that a run whose rank 0 was lost can continue its metrics.
    """

    def __init__(self) -> None:
        self._steps = self._samples = self._num_recoveries = 0

    def begin(self) -> None:
        """Called once when training starts or resumes, after the state was loaded."""

    def step(
        self,
        *,
        step: int,
        samples: int,
        loss: torch.Tensor,
        logits: torch.Tensor | None,
        labels: torch.Tensor,
        learning_rates: Mapping[str, float],
    ) -> None:
        """Record a training step.

        Args:
            step: steps done so far.
            samples: samples done so far, over all ranks.
            loss: mean over the samples of all ranks, a scalar; not waited for.
            logits: of this rank's batch, `[B]`, of a stream perhaps `[0]`; None if the model has none.
            labels: of this rank's batch, 0 or 1, of the same shape.
            learning_rates: the current ones by name.
        """
        self._steps, self._samples = step, samples

    def log_rest(self) -> None:
        """Log the steps since the last line; called when training ends, before the state is saved."""

    def lap(self, part: str) -> None:
        """Count the time since the last call, or since an evaluation, as that part of a step.

        The parts are those of `cpr.report.page.STEP_PARTS`.
        """

    def resized(self, step: int, sizes: Sequence[int], seconds: Sequence[float]) -> None:
        """Record that each rank has batches of another size after a step.

        Args:
            step: after which.
            sizes: samples by rank.
            seconds: in which each rank worked in a step, on average, with the sizes before.
        """

    def streamed(self, step: int, figures: StreamFigures) -> None:
        """Record how the stream of the data was doing before a step."""

    def progressive(self, step: int, samples: int, values: MetricValues) -> None:
        """Record the quality of the predictions before training, of the steps since the last call."""

    def exchange(self, figures: ExchangeFigures | None) -> None:
        """Record the cost of the dense-gradient exchange since the last call; None with one rank.

        Called before the `step` that logs it.
        """

    def mirror(self, figures: MirrorFigures | None) -> None:
        """Record what the mirror of this rank's rows has cost, and its age; None without mirrors.

        Called before the `step` that logs it.
        """

    def scaling(self, figures: ScalingFigures) -> None:
        """Record what `train.measure_scaling` has measured; called after the `step` that logs."""

    def costs(self, saves: Sequence[SaveCost | SaveEvent], recoveries: Sequence[Recovery]) -> None:
        """Record saves newly committed, begun or failed, and all recoveries of the run, oldest first."""
        self._num_recoveries = len(recoveries)

    def evaluating(self) -> None:
        """Called before each batch of an evaluation."""

    def evaluation(self, *, step: int, samples: int, values: MetricValues) -> None:
        """Record the result of an evaluation, right after it."""

    def finish(
        self,
        failures: FailureHistory | None = None,
        losses: Sequence[LostResiduals] = (),
        best: BestReport | None = None,
    ) -> Report | None:
        """Write and return the report of a run that reached its end; None on ranks other than 0."""
        return None

    def failed(self, error: BaseException) -> None:
        """Record the error or signal that ended training; before `close`."""

    def close(self) -> None:
        """Release files and the progress bar, however the run ended."""

    def write_page(self, history: RunHistory | None) -> None:
        """Write the run's page with this history of its saves and failures; after `close`."""

    def discard_unbegun(self) -> None:
        """Remove the folder of a run that was refused before `begin`; after `close`."""

    def state_dict(self) -> dict[str, Any]:
        """The counts that later metrics depend on."""
        return {
            "steps": self._steps,
            "samples": self._samples,
            "recoveries": self._num_recoveries,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume the counts of an earlier start of the same run; before `begin`."""
        self._steps, self._samples = state["steps"], state["samples"]
        self._num_recoveries = state.get("recoveries", 0)  # older runs have none


def open_telemetry(rank: int, folder: Path, **options: Any) -> Recorder:
    """`Telemetry(folder, **options)` on rank 0, a silent `Recorder` on the others."""
    return Telemetry(folder, **options) if rank == 0 else Recorder()


class Telemetry(Recorder):
    """Writes a run's metrics and report into its folder and shows its progress; for rank 0.

    The folder stays unchanged until `begin`: a resume that is refused must not damage the run that it names.

    Args:
        folder: existing run folder.
        recipe: name of the recipe, for the report.
        config: the resolved configuration, JSON-able.
        data: the manifest of the data.
        total_samples: samples of the whole run, over all ranks; None: unknown.
        device: of losses, logits and labels.
        log_every_steps: steps between two lines of metrics.
        best_auc: the AUC that no model can beat on this data; None if unknown.
        evaluated_batches: batches of rank 0 in one evaluation.
        stream: for the progress bar.
    """

    def __init__(
        self,
        folder: Path,
        *,
        recipe: str,
        config: Mapping[str, Any],
        data: DatasetManifest,
        total_samples: int | None,
        device: torch.device,
        log_every_steps: int,
        best_auc: float | None = None,
        evaluated_batches: int = 0,
        stream: TextIO = sys.stderr,
    ) -> None:
        super().__init__()
        self._folder = folder
        self._circumstances = {
            "config.json": config,
            "versions.json": circumstances(),
            DATA_NAME: asdict(replace(data, parts=())),
        }
        self._recipe = recipe
        self._best_auc = best_auc
        self._log_every_steps = log_every_steps
        self._event_writer = event_writer()
        self._sinks: list[Sink] = []
        self._progress = TrainingProgress(total_samples, evaluated_batches, stream)
        self._running_auc = RunningAuc(device)
        self._watch = ChanceWatch()
        self._is_worse_than_mean = False
        """Whether the last evaluation was worse than predicting the mean, which is logged when it begins."""
        self._loss_sum = torch.zeros((), dtype=torch.float64, device=device)
        self._loss_steps = 0
        self._learning_rates: Mapping[str, float] = {}
        self._has_logits = True
        self._first_sample = self._logged_samples = 0
        self._values: MetricValues | None = None
        self._exchange: ExchangeFigures | None = None
        self._exchanges: list[ExchangeFigures] = []
        self._mirror: MirrorFigures | None = None
        self._stream: StreamFigures | None = None
        self._started = self._stepped = self._logged = monotonic()
        self._evaluation_s = 0.0
        self._lap_seconds: dict[str, float] = {}
        self._lap_steps = 0
        self._lapped = perf_counter()

    def begin(self) -> None:
        """Write configuration, versions and manifest, and open the metrics files at the loaded step.

        Lines that an earlier start wrote for later steps are removed.

        Raises:
            OSError: configuration or versions cannot be written, and no earlier start has written them.
        """
        for name, content in self._circumstances.items():
            self._write_circumstances(self._folder / name, content)
        self._sinks = open_sinks(self._folder, self._steps, self._event_writer)
        self._write(HYPERPARAMETERS, self._steps, _flat(self._circumstances["config.json"]))
        self._lapped = perf_counter()

    def step(
        self,
        *,
        step: int,
        samples: int,
        loss: torch.Tensor,
        logits: torch.Tensor | None,
        labels: torch.Tensor,
        learning_rates: Mapping[str, float],
    ) -> None:
        """Record a training step, and log every `log_every_steps` steps."""
        self._has_logits = logits is not None
        if logits is not None and labels.numel():
            self._running_auc.update(logits, labels)
        self._loss_sum += loss.detach()
        self._loss_steps += 1
        self._lap_steps += 1
        self._steps, self._samples = step, samples
        self._stepped = monotonic()
        self._learning_rates = learning_rates
        self._progress.advance(samples)
        if step % self._log_every_steps == 0:
            self._log()

    def log_rest(self) -> None:
        """Log the steps since the last line, if any."""
        if self._samples > self._logged_samples:
            self._exchange = self._mirror = None  # those of the last line
            self._log()

    def lap(self, part: str) -> None:
        """Count the time since the last call, or since an evaluation, as that part of a step."""
        before, self._lapped = self._lapped, perf_counter()
        self._lap_seconds[part] = self._lap_seconds.get(part, 0.0) + self._lapped - before

    def resized(self, step: int, sizes: Sequence[int], seconds: Sequence[float]) -> None:
        """Write a line with the sizes, and seconds that led to them."""
        figures: dict[str, float] = {f"rank_{rank}": size for rank, size in enumerate(sizes)}
        self._write(
            "batch_sizes", step, figures | {f"seconds_{rank}": each for rank, each in enumerate(seconds)}
        )

    def streamed(self, step: int, figures: StreamFigures) -> None:
        """Write a line with the figures, of which the last are part of the report."""
        self._stream = figures
        self._write("stream", step, asdict(figures))

    def progressive(self, step: int, samples: int, values: MetricValues) -> None:
        """Write and log the metrics of a window."""
        figures = {"samples": samples, "window_samples": values.num_samples, **_quality_figures(values)}
        self._write("progressive", step, figures)
        logger.info(
            "before they were trained, the last %s samples: %s", f"{values.num_samples:,}", _short(values)
        )

    def exchange(self, figures: ExchangeFigures | None) -> None:
        """Record the cost of the dense-gradient exchange since the last call; None with one rank."""
        self._exchange = figures
        if figures is not None:
            self._exchanges.append(figures)

    def mirror(self, figures: MirrorFigures | None) -> None:
        """Record the age of the mirror of rank 0's rows; None without mirrors."""
        self._mirror = figures

    def scaling(self, figures: ScalingFigures) -> None:
        """Write a line, which `cpr plan --workers` reads."""
        self._write("scaling", self._steps, _scaling_figures(figures))

    def costs(self, saves: Sequence[SaveCost | SaveEvent], recoveries: Sequence[Recovery]) -> None:
        """Write a line for each cost or event of a save, and each recovery that has none yet."""
        for save in saves:
            kind, figures = _save_line(save)
            self._write(kind, save.step, figures)
        # a restarted run lists all recoveries again, and those before its saved state have their line
        for number in range(self._num_recoveries, len(recoveries)):
            self._write(
                "recovery", recoveries[number].step, _recovery_figures(number + 1, recoveries[number])
            )
        super().costs(saves, recoveries)

    def evaluating(self) -> None:
        """Move the progress bar of the evaluation."""
        self._progress.evaluate()

    def evaluation(self, *, step: int, samples: int, values: MetricValues) -> None:
        """Record the result of an evaluation, right after it; its time does not count as training."""
        self._progress.end_evaluation()
        now = monotonic()
        self._evaluation_s += now - self._stepped
        self._logged += now - self._stepped
        self._stepped = now
        self._lapped = perf_counter()
        self._values = values
        self._write(
            "evaluation",
            step,
            {
                "samples": samples,
                "seconds": now - self._started,
                "evaluated_samples": values.num_samples,
                **_quality_figures(values),
                **({} if self._best_auc is None else {"best_auc": self._best_auc}),
            },
        )
        logger.info("evaluation after %s samples: %s", f"{samples:,}", _short(values))
        loss, entropy = values.log_loss, values.normalized_entropy
        was_worse, self._is_worse_than_mean = self._is_worse_than_mean, entropy is not None and entropy > 1.0
        if loss is not None and entropy is not None and entropy > 1.0 and not was_worse:
            logger.warning(
                "the log loss %.4f is worse than that of always predicting the share of clicks (%.4f). %s",
                loss,
                loss / entropy,
                WORSE_THAN_MEAN,
            )

    def finish(
        self,
        failures: FailureHistory | None = None,
        losses: Sequence[LostResiduals] = (),
        best: BestReport | None = None,
    ) -> Report:
        """Write `report.json` and `report.txt`, and return the report.

        A full disk costs a warning. A finished run that trained nothing more keeps its old report.
        """
        self._write(END, self._steps, {"reason": "finished"})
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
            best=best,
            stream=self._stream,
        )
        if self._samples == self._first_sample and (self._folder / REPORT_NAME).exists():
            logger.info("the run had ended before: %s stays as it is", self._folder / REPORT_NAME)
            return report
        try:
            write_report(self._folder, report)
        except OSError as error:
            logger.warning("the report cannot be written into %s (%s)", self._folder, error)
        return report

    def failed(self, error: BaseException) -> None:
        """Record the error or signal that ended training; before `close`."""
        name = f"{type(error).__name__}: " if isinstance(error, Exception) else ""
        self._write(END, self._steps, {"reason": f"{name}{error}"[:REASON_WIDTH]})

    def close(self) -> None:
        """Close the metrics files and the progress bar."""
        self._progress.close()
        for sink in self._sinks:
            sink.close()

    def write_page(self, history: RunHistory | None) -> None:
        """Write `report.html`; a page that cannot be written costs a warning."""
        if not self._sinks:
            return
        try:
            write_page(read_folder(self._folder, history), LocalStorage(self._folder))
        except Exception as error:  # a mistake in a picture must not end a run of days as failed
            logger.warning("%s cannot be written (%s); `cpr report RUN` does it later", PAGE_NAME, error)

    def discard_unbegun(self) -> None:
        """Remove the folder of a run that was refused before its first `begin`; after `close`."""
        if not any((self._folder / name).exists() for name in self._circumstances):
            shutil.rmtree(self._folder, ignore_errors=True)

    def state_dict(self) -> dict[str, Any]:
        """The counts, and the running means that the next line of metrics continues."""
        return {
            **super().state_dict(),
            "loss_sum": self._loss_sum,
            "loss_steps": self._loss_steps,
            "running_auc": self._running_auc.state_dict(),
            "watch": self._watch.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume the counts and means; without means if the state is another rank's `Recorder`."""
        super().load_state_dict(state)
        self._first_sample = self._logged_samples = self._samples
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
            if not path.exists():  # without it, the run could never be resumed
                raise OSError(
                    f"{path} cannot be written ({error}): free some space, or set train.run_folder"
                ) from error
            logger.warning("%s stays as an earlier start wrote it: it cannot be written (%s)", path, error)

    def _log(self) -> None:
        """Write and show the means over the steps since the last line."""
        # reading the loss waits for the device, so the clock is read after it
        loss = float(self._loss_sum) / max(self._loss_steps, 1)
        auc = self._running_auc.value()
        now = monotonic()
        steps = max(self._lap_steps, 1)
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
                **({"auc": auc} if self._has_logits else {}),
                "samples_per_s": samples_per_s,
                "learning_rates": dict(self._learning_rates),
                **_exchange_figures(self._exchange),
                "step_seconds": {part: each / steps for part, each in self._lap_seconds.items()},
            },
        )
        self._lap_seconds.clear()
        self._lap_steps = 0
        ranking = f", AUC {'--' if auc is None else f'{auc:.4f}'}" if self._has_logits else ""
        mirror = ""
        if self._mirror is not None and self._mirror.moments:
            self._write("mirror", self._steps, {"age_steps": self._mirror.age})
            mirror = f", mirror {count_text(self._mirror.age, 'step')} old"
        self._progress.show(f"loss {loss:.4f}{ranking}{mirror}", samples_per_s)
        if self._has_logits and (warning := self._watch.observe(self._samples, auc)):
            logger.warning(warning)

    def _write(self, kind: str, step: int, figures: Figures) -> None:
        for sink in self._sinks:
            sink.write(kind, step, figures)


def _save_line(save: SaveCost | SaveEvent) -> tuple[str, Figures]:
    if isinstance(save, SaveCost):
        figures = {"bytes": save.num_bytes, "seconds": save.seconds, "wait_seconds": save.blocked_s}
        return "save", {save.kind: figures}
    if save.failure:
        return "save_failed", {"reason": save.failure[:REASON_WIDTH]}
    return "save_begun", {"wait_seconds": save.blocked_s}


def _recovery_figures(number: int, recovery: Recovery) -> Figures:
    return {
        "recoveries": number,
        "how": recovery.kind,
        "seconds": sum(recovery.seconds.values()),
        "phases": dict(recovery.seconds),
        "lost_share": recovery.lost_share,
        "pls_added": recovery.pls_added,
        "pls": recovery.pls_total,
    }


def _exchange_figures(figures: ExchangeFigures | None) -> Figures:
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


def _scaling_figures(figures: ScalingFigures) -> Figures:
    found: dict[str, Any] = {
        "workers": figures.workers,
        "global_batch": figures.global_batch,
        "dense_bytes": figures.dense_bytes,
    }
    if figures.link is not None:
        found |= {"link_latency_s": figures.link.latency_s, "link_bytes_per_s": figures.link.bytes_per_s}
    if figures.pooled_bytes is not None:
        found["pooled_bytes"] = figures.pooled_bytes
    if (noise := figures.noise) is not None:
        names = ("steps", "local", "averaged", "trace", "squared_norm", "scale", "gamma")
        found["noise"] = {name: getattr(noise, name) for name in names}
    return found


def _flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Configuration values by dotted name, such as `train.epochs`."""
    found: dict[str, Any] = {}
    for name, value in config.items():
        key = f"{prefix}{name}"
        found |= _flat(value, f"{key}.") if isinstance(value, Mapping) else {key: value}
    return found


def _quality_figures(values: MetricValues) -> Figures:
    names = ("auc", "log_loss", "normalized_entropy", "calibration") if values.is_of_clicks else ()
    means = {name: mean.value for name, mean in values.means.items()}
    return {**{name: getattr(values, name) for name in names}, **({"metrics": means} if means else {})}


def _short(values: MetricValues) -> str:
    texts = []
    if values.is_of_clicks and (values.auc is None or values.log_loss is None):
        texts = [f"AUC not defined: {values.note}"]
    elif values.is_of_clicks:
        texts = [f"AUC {values.auc:.4f}", f"log loss {values.log_loss:.4f}"]
    return ", ".join([*texts, *(f"{name} {mean_text(mean)}" for name, mean in values.means.items())])
