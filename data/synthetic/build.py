"""Generates a data set on disk with one or several processes; resumable.

The unit of work is a file, and finished files are kept. As every block has its own random stream, the bytes
of a file do not depend on the process that makes it. During generation, the folder `.unfinished` holds the
configuration and results of finished files. The manifest is written last, and `.unfinished` is removed.
"""

import io
import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import numpy as np
from tqdm import tqdm

from data.criteo import CATEGORY_NAMES
from data.dataset import MANIFEST_NAME, DatasetManifest, Feature, Part
from data.jobs.files import durable_file
from data.jobs.folder import begun, locked, named_in_errors, refuse_difference
from data.jobs.tasks import local_workers
from data.synthetic.config import SyntheticConfig
from data.synthetic.files import FilePlan, plan_files, write_blocks
from data.synthetic.profile import TOP_COVERAGE
from data.synthetic.scores import Scores
from data.synthetic.source import Block, ClickSource

MAKER: Final = "data.synthetic"
GENERATOR_VERSION: Final = 1
"""Raised whenever the same configuration would give other bytes."""

RAW_MANIFEST_NAME: Final = "synthetic.json"
"""Name of the manifest next to raw files, which no loader reads."""


def generate(config: SyntheticConfig, out: str | Path, processes: int = 1) -> dict[str, Any]:
    """Generate a data set, or its missing files; a finished data set is left unchanged.

    Args:
        config: of the data set.
        out: its folder, on a local disk; made if absent.
        processes: worker processes; 1 works in this one. The bytes do not depend on it.

    Returns:
        The provenance that the manifest holds: `config`; `best_auc`, `best_auc_expected`,
        `best_log_loss` and `click_rate` of all days; and the same for each day under `days`.

    Raises:
        ValueError: the folder holds something else, is damaged or cannot be made, or the disk has no room for
            so many samples.
        OSError: the disk is full, or cannot be written.
    """
    folder = _Folder(config, Path(out))
    finished = folder.provenance()
    if finished is not None:
        shutil.rmtree(folder.work, ignore_errors=True)
        return finished
    folder.check_room()
    plans = plan_files(config)
    with locked(folder.path), begun(folder.path, folder.work.name, folder.identity):
        tasks = [_MakeFile(folder, plan) for plan in plans if folder.written(plan) is None]
        total = sum(task.plan.num_rows for task in tasks)
        with tqdm(total=total, unit="row", unit_scale=True, disable=None, desc=str(out)) as bar:
            if processes > 1 and len(tasks) > 1:
                with local_workers(min(processes, len(tasks)), __name__) as workers:
                    workers.run(tasks, lambda _, num_rows: bar.update(num_rows or 0) or True)
            else:
                for task in tasks:
                    task.run(bar.update)
        provenance = _commit(folder, plans)
    shutil.rmtree(folder.work, ignore_errors=True)
    return provenance


def is_finished(config: SyntheticConfig, out: str | Path) -> bool:
    """Whether `generate` would find nothing to do.

    Raises:
        ValueError: the folder holds something else, or is damaged.
    """
    return _Folder(config, Path(out)).provenance() is not None


class _Folder:
    """The folder of one configuration's data set.

    Args:
        config: the data set.
        path: its folder, on a local disk; need not exist.
    """

    def __init__(self, config: SyntheticConfig, path: Path) -> None:
        self.path = path
        self.identity = {"maker": MAKER, "generator_version": GENERATOR_VERSION, **asdict(config)}
        self.config = config
        self.manifest = path / (MANIFEST_NAME if config.format == "parquet" else RAW_MANIFEST_NAME)
        self.work = path / ".unfinished"

    def provenance(self) -> dict[str, Any] | None:
        """Provenance of the finished data set; None if there is none yet.

        Raises:
            ValueError: the folder holds another data set, or this one is damaged.
        """
        with named_in_errors(self.path):
            found = [name for name in (MANIFEST_NAME, RAW_MANIFEST_NAME) if (self.path / name).exists()]
        if not found:
            return None
        try:
            manifest = json.loads((self.path / found[0]).read_text())
            provenance, parts = dict(manifest["provenance"]), manifest["parts"]
            made_as = dict(provenance["config"])
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{MAKER} did not make the data set in {self.path}; choose another folder"
            ) from error
        # absent in data sets of versions without this setting
        refuse_difference(self.path, {"top_coverage": TOP_COVERAGE, **made_as}, self.identity)
        for part in parts:
            file = self.path / part["path"]
            if not file.exists() or file.stat().st_size != part["num_bytes"]:
                raise ValueError(f"{file} is missing or has changed; delete {self.path} and make it again")
        return provenance

    def check_room(self) -> None:
        """Raise an error at the start if the data set cannot fit on the disk.

        Raises:
            ValueError: the disk is too small; the message has the needed and the free space.
        """
        there = next(
            folder for folder in (self.path.absolute(), *self.path.absolute().parents) if folder.exists()
        )
        disk = shutil.disk_usage(there)
        free = disk.free + sum(file.stat().st_size for file in self.path.rglob("*"))
        if disk.total and self.config.least_bytes > free:  # some file systems report no sizes
            raise ValueError(
                f"{self.config.days:,} days of {self.config.rows_per_day:,} rows take "
                f"{self.config.least_bytes / 1e9:,.1f} GB at least, and the disk of {self.path} has "
                f"{free / 1e9:,.1f} GB free: lower --days or --rows-per-day, or name another --out"
            )

    def written(self, plan: FilePlan) -> tuple[Part, Scores] | None:
        """A finished file and the scores of its samples; None if it has to be made."""
        try:
            with np.load(self.result(plan)) as stored:
                result = dict(stored)
            num_bytes = (self.path / plan.path).stat().st_size
        except FileNotFoundError:
            return None
        if num_bytes != result["num_bytes"]:
            return None
        part = Part(
            path=plan.path,
            day=plan.day,
            num_rows=plan.num_rows,
            row_groups=plan.block_rows,
            num_bytes=num_bytes,
            sha256=str(result["sha256"]),
        )
        return part, Scores(result["bins"], result["log_loss"])

    def result(self, plan: FilePlan) -> Path:
        """Where the results of a finished file are noted."""
        return self.work / (plan.path.replace("/", "_") + ".npz")


@dataclass(frozen=True)
class _MakeFile:
    """Task that generates one file, and reports the samples of each block."""

    folder: _Folder
    plan: FilePlan

    def run(self, report: Callable[[int], object]) -> None:
        scores = Scores()
        with durable_file(self.folder.path / self.plan.path) as file:
            blocks = self._blocks(scores, report)
            write_blocks(file, self.folder.config, blocks)  # type: ignore[arg-type]  # it has what writers need
        result = io.BytesIO()
        np.savez(result, num_bytes=file.num_bytes, sha256=file.sha256, **vars(scores))
        with durable_file(self.folder.result(self.plan)) as stored:
            stored.write(result.getvalue())

    def _blocks(self, scores: Scores, report: Callable[[int], object]) -> Iterator[Block]:
        source = _source(self.folder.config)
        for index in self.plan.blocks:
            block = source.block(self.plan.day, index)
            scores.add(block.probabilities, block.labels)
            yield block
            report(len(block))


@lru_cache(maxsize=1)
def _source(config: SyntheticConfig) -> ClickSource:
    """The source of all files of a process."""
    return ClickSource(config)


def _commit(folder: _Folder, plans: list[FilePlan]) -> dict[str, Any]:
    """Write the manifest of all files."""
    results = [result for plan in plans if (result := folder.written(plan)) is not None]
    assert len(results) == len(plans), "a file that was just written is gone"
    days: dict[int, Scores] = {}
    for part, scores in results:
        days[part.day] = days.get(part.day, Scores()) + scores
    provenance = {
        "maker": MAKER,
        "config": folder.identity,
        **sum(days.values(), Scores()).summary(),
        "days": {str(day): scores.summary() for day, scores in days.items()},
    }
    tables = zip(CATEGORY_NAMES, folder.config.table_rows, strict=True)
    manifest = DatasetManifest(
        features=tuple(Feature(name=name, rows=rows) for name, rows in tables),
        parts=tuple(part for part, _ in results),
        provenance=provenance,
    )
    with durable_file(folder.manifest) as file:
        file.write(manifest.to_json().encode())
    return provenance
