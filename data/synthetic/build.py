"""Generates a data set on disk with one or several processes; resumable.

The unit of work is a file, and finished files are kept. As every block has its own random stream, the bytes
of a file do not depend on the process that makes it.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from tqdm import tqdm

from data.criteo import CATEGORY_NAMES
from data.dataset import DatasetManifest, Feature
from data.jobs.pool import WorkerPool
from data.synthetic.config import SyntheticConfig
from data.synthetic.files import FilePlan, plan_files
from data.synthetic.folder import MAKER, DatasetFolder
from data.synthetic.scores import Scores
from data.synthetic.source import Block, ClickSource


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
    folder = DatasetFolder(config, Path(out))
    finished = folder.provenance()
    if finished is not None:
        folder.clean()
        return finished
    folder.check_room()
    plans = plan_files(config)
    with folder.opened():
        tasks = [_MakeFile(folder, plan) for plan in plans if folder.written(plan) is None]
        total = sum(task.plan.num_rows for task in tasks)
        with tqdm(total=total, unit="row", unit_scale=True, disable=None, desc=str(out)) as bar:
            if processes > 1 and len(tasks) > 1:
                with WorkerPool(min(processes, len(tasks)), __name__) as pool:
                    pool.run(tasks, lambda _, num_rows: bar.update(num_rows or 0) or True)
            else:
                for task in tasks:
                    task.run(bar.update)
        return _commit(config, folder, plans)


def is_finished(config: SyntheticConfig, out: str | Path) -> bool:
    """Whether `generate` would find nothing to do.

    Raises:
        ValueError: the folder holds something else, or is damaged.
    """
    return DatasetFolder(config, Path(out)).provenance() is not None


@dataclass(frozen=True)
class _MakeFile:
    """Task that generates one file, and reports the samples of each block."""

    folder: DatasetFolder
    plan: FilePlan

    def run(self, report: Callable[[int], object]) -> None:
        self.folder.write(self.plan, self._blocks(report))

    def _blocks(self, report: Callable[[int], object]) -> Iterator[Block]:
        source = _source(self.folder.config)
        for index in self.plan.blocks:
            block = source.block(self.plan.day, index)
            yield block
            report(len(block))


@lru_cache(maxsize=1)
def _source(config: SyntheticConfig) -> ClickSource:
    """The source of all files of a process."""
    return ClickSource(config)


def _commit(config: SyntheticConfig, folder: DatasetFolder, plans: list[FilePlan]) -> dict[str, Any]:
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
    tables = zip(CATEGORY_NAMES, config.table_rows, strict=True)
    manifest = DatasetManifest(
        features=tuple(Feature(name=name, rows=rows) for name, rows in tables),
        parts=tuple(part for part, _ in results),
        provenance=provenance,
    )
    folder.commit(manifest.to_json())
    return provenance
