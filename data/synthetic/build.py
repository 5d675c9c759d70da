"""Generates a data set on disk with one or several processes; resumable.

The unit of work is a file, and finished files are kept. As every block has its own random stream, the bytes
of a file do not depend on the process that makes it.
"""

import contextlib
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, cast

from tqdm import tqdm

from data.criteo import CATEGORY_NAMES
from data.dataset import DatasetManifest, Feature
from data.synthetic.config import SyntheticConfig
from data.synthetic.files import FilePlan, plan_files
from data.synthetic.folder import FULL, MAKER, DatasetFolder
from data.synthetic.scores import Scores
from data.synthetic.source import Block, ClickSource

Progress = Callable[[int], object]


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
    with _full_disk_explained(folder), folder.opened():
        missing = [plan for plan in plans if folder.written(plan) is None]
        total = sum(plan.num_rows for plan in missing)
        with tqdm(total=total, unit="row", unit_scale=True, disable=None, desc=str(out)) as bar:
            if processes > 1 and len(missing) > 1:
                _make_in_processes(config, folder, missing, processes, bar.update)
            else:
                _make(config, folder, missing, bar.update)
        return _commit(config, folder, plans)


def is_finished(config: SyntheticConfig, out: str | Path) -> bool:
    """Whether `generate` would find nothing to do.

    Raises:
        ValueError: the folder holds something else, or is damaged.
    """
    return DatasetFolder(config, Path(out)).provenance() is not None


def _make(config: SyntheticConfig, folder: DatasetFolder, plans: list[FilePlan], progress: Progress) -> None:
    """Generate files in order, and report the samples of each block."""
    source = ClickSource(config)

    def blocks(plan: FilePlan) -> Iterator[Block]:
        for index in plan.blocks:
            yield source.block(plan.day, index)
            progress(plan.block_rows[index - plan.blocks[0]])

    for plan in plans:
        folder.write(plan, blocks(plan))


def _make_in_processes(
    config: SyntheticConfig,
    folder: DatasetFolder,
    plans: list[FilePlan],
    processes: int,
    progress: Progress,
) -> None:
    """Generate files in several processes, all of which end on any error."""
    context = multiprocessing.get_context("spawn")
    workers = {}
    try:
        for first in range(min(processes, len(plans))):
            receiver, sender = context.Pipe(duplex=False)
            arguments = (config, folder, plans[first::processes], sender)
            worker = context.Process(target=_work, args=arguments, daemon=True)
            worker.start()
            sender.close()
            workers[receiver] = worker
        listening = set(workers)
        while listening:
            for ready in wait(list(listening)):
                receiver = cast("Connection", ready)
                try:
                    message = receiver.recv()
                except EOFError:
                    listening.remove(receiver)
                    _check_exit(workers[receiver])
                    continue
                if isinstance(message, Exception):
                    raise message
                progress(message)
    finally:
        for receiver, worker in workers.items():
            worker.terminate()
            worker.join()
            receiver.close()


def _check_exit(worker: multiprocessing.process.BaseProcess) -> None:
    worker.join()
    if worker.exitcode:
        raise ChildProcessError(
            f"a worker process died (exit code {worker.exitcode}: killed, or out of memory). Run the same "
            "again to continue, with fewer processes if memory is short"
        )


def _work(config: SyntheticConfig, folder: DatasetFolder, plans: list[FilePlan], sender: Connection) -> None:
    """Main function of a worker process, which ends with its parent, as its next report fails."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    try:
        _make(config, folder, plans, sender.send)
    except BrokenPipeError:
        return
    except Exception as error:
        sender.send(error)


@contextlib.contextmanager
def _full_disk_explained(folder: DatasetFolder) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in FULL:
            raise
        raise OSError(
            error.errno,
            f"no room to write {folder.path} ({os.strerror(error.errno)}). Finished files are kept: "
            "free some space and run the same again",
        ) from error


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
