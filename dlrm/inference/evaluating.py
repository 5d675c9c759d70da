"""Evaluates a trained run: the figures of its report on any days, by slice, and calibration."""

import json
import logging
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Final

from torch import Tensor

from cpr.humanize import align_columns
from data.batch import Batch
from data.dataset import DatasetManifest, read_manifest
from data.jobs.display import ProgressDisplay
from dlrm.config.dataset import best_auc, split_days
from dlrm.config.recipe import load_resumed
from dlrm.inference.opening import OpenedRun, Save, open_run
from dlrm.inference.slicing import VALUES, ByFrequency, ByValue, Slicing, count_ids, names_of_ids
from dlrm.metrics import CalibrationBin, MetricValues, Reliability, SlicedMetrics, calibration_error
from dlrm.telemetry.report import quality_rows
from dlrm.training.encoding import refuse_other_encoding
from dlrm.training.evaluation import evaluate

FREQUENCY: Final = "frequency"
"""What `--by` takes besides features: how often training has seen a sample's ids."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class EvaluationJob:
    """What to evaluate."""

    run: Path
    data_uri: str | None = None
    """None: the data of the run."""
    days: Sequence[int] = ()
    """Empty: the test days of the run, or all days of other data."""
    save: Save = "newest"
    by: Sequence[str] = ()
    """Slices: names of features, `frequency`, or `frequency:FEATURE`."""


@dataclass(frozen=True, kw_only=True)
class Slice:
    """Metrics of the samples of one slice."""

    name: str
    metrics: MetricValues


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Results of an evaluation, over all ranks."""

    run: str
    step: int
    """Training step of the save."""
    data: str
    days: Sequence[int]
    metrics: MetricValues
    best_auc: float | None
    """The AUC that no model can beat on these days; None if unknown, as for real data."""
    slices: dict[str, list[Slice]]
    """By what `--by` names; without empty slices."""
    calibration: list[CalibrationBin]
    """By ascending prediction."""

    @property
    def calibration_error(self) -> float | None:
        """Mean distance of predicted and observed share of clicks, over bins."""
        return calibration_error(self.calibration)

    def to_json(self) -> str:
        """All results as JSON."""
        return json.dumps({**asdict(self), "calibration_error": self.calibration_error}, indent=1) + "\n"


class _Observer:
    """Collects calibration and slices of the samples, and shows the progress on rank 0."""

    def __init__(self, run: OpenedRun, slicings: Sequence[Slicing]) -> None:
        self._slices = [(slicing, SlicedMetrics(len(slicing.names), run.device)) for slicing in slicings]
        self._reliability = Reliability(run.device)
        self._num_rows, self._num_done = run.manifest.num_rows, 0
        self._rows_per_step = run.loader.config.batch_size * run.ranks.world_size
        self._display = ProgressDisplay("evaluation", self._num_rows, 0) if run.ranks.rank == 0 else None

    def before_batch(self) -> None:
        """Show the progress."""
        before, self._num_done = self._num_done, min(self._num_done + self._rows_per_step, self._num_rows)
        if self._display is not None:
            self._display.update(before, self._num_done - before)

    def close(self) -> None:
        """End the display of the progress."""
        if self._display is not None:
            self._display.update(self._num_done, 0)
            self._display.close()

    def observe(self, batch: Batch, logits: Tensor | None) -> None:
        """Add a batch.

        Raises:
            ValueError: the model gives no logits, and slices are wanted.
        """
        if logits is None:
            if self._slices:
                raise ValueError("this model gives no logits, and so no metrics by slice: leave --by out")
            return
        real = slice(batch.num_valid)
        self._reliability.update(logits[real], batch.labels[real])
        for slicing, metrics in self._slices:
            metrics.update(*slicing.assign(batch), logits, batch.labels)

    def calibration(self) -> list[CalibrationBin]:
        """Bins over all ranks; a collective."""
        return self._reliability.compute()

    def slices(self) -> dict[str, list[Slice]]:
        """Slices over all ranks that have samples; a collective."""
        return {
            slicing.title: [
                Slice(name=name, metrics=values)
                for name, values in zip(slicing.names, metrics.compute(), strict=True)
                if values.num_samples
            ]
            for slicing, metrics in self._slices
        }


def evaluate_run(job: EvaluationJob) -> Evaluation:
    """Evaluate a save of a run; all ranks call it, and get the same result.

    Raises:
        ValueError: a mistake of the user; says what to change.
        OSError: data cannot be read.
        CheckpointError: no save can be read.
        FloatingPointError: the model gives NaN.
    """
    _, config = load_resumed(job.run)
    _check_slices(job.by, read_manifest(job.data_uri or config.data.uri))
    with open_run(job.run, job.data_uri, job.days or "test", job.save) as run:
        if run.uri == run.config.data.uri:
            _warn_of_training_days(run)
        with closing(_Observer(run, _slicings(job.by, run))) as observer:
            values = evaluate(run.model, run.loader, run.device, observer.before_batch, observer.observe)
        return Evaluation(
            run=str(job.run),
            step=run.state.step,
            data=run.uri,
            days=run.manifest.days,
            metrics=values,
            best_auc=best_auc(run.manifest),
            slices=observer.slices(),
            calibration=observer.calibration(),
        )


def _check_slices(by: Sequence[str], manifest: DatasetManifest) -> None:
    bounded = [feature.name for feature in manifest.features if feature.rows]
    for each in by:
        name = each.removeprefix(f"{FREQUENCY}:")
        if each == FREQUENCY:
            if not bounded:
                raise ValueError(
                    f"--by {each} counts ids in tables, and all features have raw ids: leave it out"
                )
        elif name not in bounded:
            raw = any(feature.name == name for feature in manifest.features)
            why = "has raw ids, any 64-bit integers" if raw else "is no feature of the data"
            raise ValueError(f"--by {each}: {name} {why}; choose {FREQUENCY} or some of {', '.join(bounded)}")


def _warn_of_training_days(run: OpenedRun) -> None:
    """Warn that samples were trained on, which makes every model look better than it is."""
    trained, _ = split_days(run.config, read_manifest(run.config.data.uri))
    both = sorted(set(trained) & set(run.manifest.days))
    if both and run.ranks.rank == 0:
        logger.warning("days %s were trained on: on new data the model is worse than this", both)


def _slicings(by: Sequence[str], run: OpenedRun) -> list[Slicing]:
    """Prepare the ways of slicing; a collective, which reads the ids of the days at most once."""
    of_frequency = {each: _features(each, run.manifest) for each in by if each.partition(":")[0] == FREQUENCY}
    of_values = [each for each in by if each not in of_frequency]
    seen = _count_trained(sorted(set(chain(*of_frequency.values()))), run) if of_frequency else {}
    present = count_ids(run.uri, run.manifest, of_values, run.device) if of_values else {}

    def make(each: str) -> Slicing:
        if each in of_frequency:
            return ByFrequency(each, {name: seen[name] for name in of_frequency[each]})
        times, ids = present[each].topk(min(VALUES, len(present[each])))
        return ByValue(
            each, present[each], names_of_ids(run.uri, run.manifest, each, ids[times > 0].tolist())
        )

    return [make(each) for each in by]


def _features(by: str, manifest: DatasetManifest) -> list[str]:
    """Features of `frequency` or `frequency:FEATURE`."""
    _, colon, name = by.partition(":")
    return [name] if colon else [feature.name for feature in manifest.features if feature.rows]


def _count_trained(features: Sequence[str], run: OpenedRun) -> dict[str, Tensor]:
    """How often the training days hold each id of some features; a collective."""
    data = run.config.data
    if run.config.stream.uri:
        raise ValueError(
            f"--by {FREQUENCY} counts ids of the training days, and the run was trained on a stream: leave "
            "it out"
        )
    manifest = read_manifest(data.uri)
    refuse_other_encoding(run.folder, manifest, data.uri)
    trained = manifest.on_days(split_days(run.config, manifest)[0])
    if run.ranks.rank == 0:
        logger.info("counting the ids of %s training samples", f"{trained.num_rows:,}")
    return count_ids(data.uri, trained, features, run.device)


def format_evaluation(result: Evaluation) -> str:
    """Format the results as aligned text tables, without a final newline."""
    values, error = result.metrics, result.calibration_error
    rows = [
        *quality_rows(values, result.best_auc),
        *([("AUC is exact to", f"{values.auc_error_bound:.1g}")] if values.auc_error_bound else []),
        *([] if error is None else [("calibration error", f"{error:.4f}")]),
        ("samples", f"{values.num_samples:,}"),
        *([] if values.num_clicks is None else [("clicks", f"{values.num_clicks:,}")]),
        ("days", ", ".join(map(str, result.days))),
        ("data", result.data),
        ("save", f"step {result.step:,} of {result.run}"),
    ]
    tables = ["\n".join(align_columns(rows, left=(0, 1)))]
    tables += [_slice_table(title, slices) for title, slices in result.slices.items()]
    return "\n\n".join(tables)


def _slice_table(title: str, slices: Sequence[Slice]) -> str:
    def figure(value: float | None) -> str:
        return "-" if value is None else f"{value:.4f}"

    rows = [(title, "samples", "clicks", "AUC", "log loss", "calibration")]
    for each in slices:
        values = each.metrics
        figures = (figure(values.auc), figure(values.log_loss), figure(values.calibration))
        rows.append((each.name, f"{values.num_samples:,}", f"{values.num_clicks or 0:,}", *figures))
    return "\n".join(align_columns(rows, left=(0,)))
