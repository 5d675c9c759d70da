"""Whether a failure in the middle of training leaves everything as it must: rows of `experiments.recovery`.

Checked against what the workers wrote down (`experiments.recovery.exactness_worker`).
"""

import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import numpy as np

from cpr.faults import AtStep, KillWorker, Plan
from data.loader import DataLoader
from data.synthetic import SyntheticConfig, generate
from dlrm.launch.device import Ranks
from experiments.harness.launch import torchrun
from experiments.harness.record import Row
from experiments.recovery.exactness_worker import ExactnessJob, digest, inputs_of

Arrays = Mapping[str, np.ndarray[Any, Any]]

VICTIM: Final = 1
DATASET: Final = SyntheticConfig(
    scale=1e-4, days=2, rows_per_day=4000, rows_per_block=500, rows_per_file=1000
)
CASES: Final = tuple((world_size, wipe) for world_size in (2, 4) for wipe in (False, True))


def case_name(world_size: int, wipe: bool) -> str:
    """Of a case, for its row."""
    return f"exactness, {world_size} workers, {'memory lost' if wipe else 'memory intact'}"


def check_case(scratch: Path, world_size: int, wipe: bool) -> Row:
    """Run one case and count what is not as it must be.

    Args:
        scratch: emptied first.
        world_size: number of workers.
        wipe: whether the killed worker's memory is lost, too.
    """
    shutil.rmtree(scratch, ignore_errors=True)
    notes = scratch / "notes"
    notes.mkdir(parents=True)
    generate(DATASET, scratch / "dataset")
    job = ExactnessJob(
        folder=str(notes.absolute()),
        plan=str((scratch / "faults.json").absolute()),
        overrides=(
            f"data.uri={(scratch / 'dataset').absolute()}",
            "data.global_batch_size=64",
            "data.window_batches=4",
            "train.precision=fp32",
            "train.device=cpu",
        ),
    )
    event = AtStep(step=job.killed_after_step, kind=KillWorker(wipe=wipe), target=VICTIM)
    Path(job.plan).write_text(json.dumps(Plan(schedules=(event,)).to_json()))
    torchrun(
        "experiments.recovery.exactness_worker",
        [json.dumps(asdict(job))],
        processes=world_size,
        threads=1,
        restarts=1,
    )
    return {
        "world_size": world_size,
        "wipe": wipe,
        **_count_rows(notes, world_size, VICTIM if wipe else None),
        **_count_batches(job, notes, world_size),
    }


def _count_rows(notes: Path, world_size: int, robbed: int | None) -> Row:
    """Rows that are not what they were, and not what was saved where they were lost."""
    touched = _touched(notes, world_size)
    counts = {"rows_kept": 0, "rows_kept_wrong": 0, "rows_restored": 0, "rows_restored_wrong": 0}
    dense_wrong = 0
    for rank in range(world_size):
        before, after = _load(notes / f"before-{rank}.npz"), _load(notes / f"begin1-{rank}.npz")
        saved = _load(notes / f"saved-{rank}.npz")
        for name, now in after.items():
            if name.startswith("dense/"):
                dense_wrong += int(not np.array_equal(now, before[name]))
                continue
            is_lost = rank == robbed and not _is_replicated(name, notes, world_size)
            wrong = np.any((now != (saved if is_lost else before)[name]).reshape(len(now), -1), axis=1)
            what = "rows_restored" if is_lost else "rows_kept"
            if not is_lost:
                wrong[touched[_table(name)]] = False  # they may have changed in the interrupted step
            counts[what] += len(now)
            counts[f"{what}_wrong"] += int(wrong.sum())
    return {**counts, "dense_wrong": dense_wrong}


def _count_batches(job: ExactnessJob, notes: Path, world_size: int) -> Row:
    """Batches that were trained on twice, or left out without having been interrupted, over all ranks."""
    twice = left_out = 0
    for rank in range(world_size):
        ranks = Ranks(rank=rank, local_rank=rank, world_size=world_size)
        expected = _digests(inputs_of(job, ranks).loader, job.steps + 1)
        interrupted = expected.pop(job.killed_after_step)
        lines = (notes / f"finished-{rank}.jsonl").read_text().splitlines()
        finished = [json.loads(line)["digest"] for line in lines]
        twice += len(finished) - len(set(finished)) + finished.count(interrupted)
        left_out += len(set(expected) - set(finished))
    return {"batches_twice": twice, "batches_left_out": left_out}


def _digests(loader: DataLoader, steps: int) -> list[str]:
    found = [digest(batch) for batch, _ in zip(loader, range(steps), strict=False)]
    loader.close()
    return found


def _touched(notes: Path, world_size: int) -> dict[str, np.ndarray[Any, Any]]:
    """Ids of the interrupted step over all ranks, by table."""
    each = [_load(notes / f"ids-{rank}.npz") for rank in range(world_size)]
    return {name: np.unique(np.concatenate([ids[name] for ids in each])) for name in each[0]}


def _is_replicated(name: str, notes: Path, world_size: int) -> bool:
    """Whether all ranks have this column: a table that is data-parallel comes from a survivor."""
    return all(name in _load(notes / f"before-{rank}.npz") for rank in range(world_size))


def _table(name: str) -> str:
    """The feature whose table a column belongs to."""
    return name.split("/", maxsplit=1)[0].rsplit(".", maxsplit=1)[-1]


def _load(path: Path) -> Arrays:
    with np.load(path) as file:
        return {name: file[name] for name in file.files}
