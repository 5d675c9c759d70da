"""Scores a data set with a trained model, on any number of ranks, and writes the scores in its order.

Ranks score runs of neighbouring rows; rank 0 collects their logits and appends them to a folder next to the
output (`unfinished`). At the end it reads label, day and kept columns again, row group by row group, and
writes them with the scores. Memory is bounded by a window of batches and a row group.
"""

import json
import logging
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from scipy.special import expit

from cpr.checkpoint.collectives import LONGEST_LOAD, RankGroup
from data.dataset import DatasetManifest, read_manifest
from data.jobs.display import ProgressDisplay
from data.jobs.files import durable_file
from data.loader import ParquetSource
from data.loader.source import columns_of_files
from dlrm.config.recipe import load_resumed
from dlrm.inference.opening import OpenedRun, Save, device_of, joined, open_run
from dlrm.inference.unfinished import IDENTITY_KEY, UnfinishedScores
from dlrm.launch.device import Ranks, of_rank_0

logger = logging.getLogger(__name__)

MADE: Final = ("score", "logit", "day")
"""Columns of the output that do not come from the data."""


@dataclass(frozen=True, kw_only=True)
class ScoreJob:
    """What to score, and where the scores go."""

    run: Path
    out: Path
    data_uri: str | None = None
    """None: the data of the run."""
    days: Sequence[int] = ()
    """Empty: all days."""
    save: Save = "newest"
    keep: Sequence[str] = ()
    """Columns of the data that are copied."""


def score(job: ScoreJob) -> None:
    """Score a data set, or continue where an earlier call was killed; all ranks call it.

    Raises:
        ValueError: a mistake of the user; says what to change.
        OSError: data cannot be read, or the disk is full.
        CheckpointError: no save can be read.
        FloatingPointError: the model gives NaN.
    """
    ranks = Ranks.from_environment()
    unfinished = UnfinishedScores(job.out)
    _, config = load_resumed(job.run)
    with joined(ranks, device_of(config, ranks)):
        columns, known, step = of_rank_0(lambda: _begin(job, job.data_uri or config.data.uri, unfinished))
        with ExitStack() as stack:
            try:
                opened = open_run(job.run, job.data_uri, job.days or "all", job.save, step=step, labels=False)
                run = stack.enter_context(opened)
            except ValueError as error:
                if step is None:
                    raise
                raise ValueError(
                    f"{error}. The scores that were begun are of step {step}: if that save is gone, remove "
                    f"{unfinished.folder} to begin again"
                ) from error
            identity = {**known, **_identity(run)}
            if of_rank_0(lambda: unfinished.is_finished(identity)):
                logger.info("%d scores are in %s already", run.manifest.num_rows, job.out)
                return
            of_rank_0(lambda: (stack.enter_context(unfinished.begun(identity)), None)[1])
            _score_rest(run, unfinished)
            if ranks.rank == 0:
                _write(run, unfinished, columns, identity)
                unfinished.finish()
                logger.info("%d scores are in %s", run.manifest.num_rows, job.out)


def _begin(
    job: ScoreJob, uri: str, unfinished: UnfinishedScores
) -> tuple[Sequence[str], Mapping[str, Any], int | None]:
    """Refuse what does not fit, before the model is loaded.

    Returns:
        Columns to copy, that part of the job's identity, and the step with which an earlier call has begun.
    """
    manifest = read_manifest(uri)
    days = manifest.on_days(job.days) if job.days else manifest
    known = {"run": str(job.run.resolve()), "days": list(days.days), "keep": list(job.keep)}
    return _copied(uri, days, job.keep), known, unfinished.step_begun(known)


def _identity(run: OpenedRun) -> dict[str, Any]:
    return {
        "run_id": run.state.newest.run_id,
        "step": run.state.step,
        "data": run.loader.state_dict()["parts_digest"],
    }


def _copied(uri: str, manifest: DatasetManifest, keep: Sequence[str]) -> Sequence[str]:
    """Columns of the data that the output gets: the label, if there is one, and those to keep."""
    there, label = columns_of_files(uri, manifest), manifest.label
    if unknown := [name for name in keep if name not in there]:
        raise ValueError(f"--keep: {uri} has no column {unknown[0]}; it has {', '.join(there)}")
    if taken := [name for name in keep if name in MADE]:
        raise ValueError(
            f"--keep: {taken[0]} is a column of the scores; rename that of the data, or leave it"
        )
    if label in MADE:
        logger.warning("the label %s is left out, as the scores have a column of that name", label)
    elif label in there:
        keep = [label, *keep]
    return list(dict.fromkeys(keep))


def _score_rest(run: OpenedRun, unfinished: UnfinishedScores) -> None:
    """Score all rows after those that are done."""
    done, position = of_rank_0(lambda: (unfinished.num_rows, unfinished.position))
    if position is not None:
        run.loader.load_state_dict(position)
    num_left, total = run.loader.steps_left, run.manifest.num_rows
    if not num_left:
        return
    config = run.loader.config
    num_full = (total - done) // (config.batch_size * run.ranks.world_size)
    group = RankGroup(LONGEST_LOAD)
    display = ProgressDisplay("scoring", total, done) if run.ranks.rank == 0 else None
    mine = []
    for number, batch in enumerate(run.loader, start=1):
        mine.append(run.logits(batch)[: batch.num_valid].cpu().numpy())
        # of such a run of batches each rank has neighbouring rows, after those of the rank before
        if number % config.window_batches and number not in {num_full, num_left}:
            continue
        pieces = group.gather_to_0(np.concatenate(mine))
        mine.clear()
        if pieces is not None and display is not None:
            logits = np.concatenate(pieces)
            _refuse_nan(logits, unfinished.num_rows)
            unfinished.append(logits, run.loader.state_dict(), last=number == num_left)
            display.update(unfinished.num_rows, len(logits))
    if display is not None:
        display.close()
    group.close()


def _refuse_nan(logits: "np.ndarray[Any, Any]", first_row: int) -> None:
    wrong = ~np.isfinite(logits)
    if wrong.any():
        raise FloatingPointError(
            f"the model gives {logits[wrong][0]} for row {first_row + int(wrong.argmax())} of the data: the "
            "run has diverged; score with an older save, or train again with lower learning rates"
        )


def _write(
    run: OpenedRun, unfinished: UnfinishedScores, columns: Sequence[str], identity: Mapping[str, Any]
) -> None:
    """Write the output, in the row groups of the data."""
    metadata = {IDENTITY_KEY: json.dumps(identity)}
    logits = np.memmap(unfinished.logits_path, np.float32, "r")
    source = ParquetSource(run.uri, run.manifest, columns=columns)
    writer, begin = None, 0
    with durable_file(unfinished.final_path) as file:
        for part in run.manifest.parts:
            for number, num_rows in enumerate(part.row_groups):
                own = logits[begin : begin + num_rows]
                table = _table(own, part.day, source.read(part, number) if columns else None)
                writer = writer or pq.ParquetWriter(file, table.schema.with_metadata(metadata))
                writer.write_table(table.cast(writer.schema))
                begin += num_rows
        if writer is not None:
            writer.close()
    source.close()


def _table(logits: "np.ndarray[Any, Any]", day: int, copied: pa.Table | None) -> pa.Table:
    columns = {
        "score": expit(logits.astype(np.float64)).astype(np.float32),
        "logit": logits,
        "day": np.full(len(logits), day, np.int32),
    }
    made = pa.table({name: columns[name] for name in MADE})
    if copied is not None:
        for name in copied.column_names:
            made = made.append_column(copied.schema.field(name), copied.column(name))
    return made
