"""Making a data set on disk: several processes, resumable, complete or not there at all.

While a data set is being made, everything unfinished lives in its folder `.unfinished`: the
configuration, temporary files, and the scores of each finished file. A file is moved into place
when it is whole and on disk. The manifest comes last; then `.unfinished` goes. Made again with the
same configuration, a data set goes on where it stopped.
"""

import contextlib
import errno
import fcntl
import hashlib
import json
import multiprocessing
import os
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import numpy as np
from tqdm import tqdm

from data.criteo import CATEGORY_NAMES
from data.dataset import MANIFEST_NAME, DatasetManifest, Feature, Part
from data.synthetic.config import SyntheticConfig
from data.synthetic.files import FilePlan, plan_files, write_file
from data.synthetic.scores import Scores
from data.synthetic.source import Block, ClickSource

MAKER: Final = "data.synthetic"
GENERATOR_VERSION: Final = 1
"""Raised whenever the same configuration would give other bytes."""

RAW_MANIFEST_NAME: Final = "synthetic.json"
"""Takes the manifest's place beside raw files, which no loader reads."""

UNFINISHED: Final = ".unfinished"
FULL: Final = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def generate(config: SyntheticConfig, out: str | Path, processes: int = 1) -> dict[str, Any]:
    """Make the data set, or what is missing of it, or nothing if it is there.

    Args:
        config: which data set.
        out: its folder, on a local disk; made if absent.
        processes: worker processes; 1 works in this one. The bytes do not depend on it.

    Returns:
        The provenance that the manifest holds: `config`, `best_auc`, `best_log_loss`, `days` ...

    Raises:
        ValueError: the folder holds something else, or is damaged.
        OSError: the disk is full, or cannot be written.
    """
    folder = Path(out)
    finished = _finished(config, folder)
    if finished is not None:
        return finished
    work = _open_work(config, folder)
    with _locked(work, folder), _full_disk_explained(folder):
        plans = plan_files(config)
        _make_files(config, folder, [plan for plan in plans if _result(work, plan) is None], processes)
        provenance = _commit(config, folder, plans)
    return provenance


def is_finished(config: SyntheticConfig, out: str | Path) -> bool:
    """Whether `generate` would find nothing to do.

    Raises:
        ValueError: the folder holds something else, or is damaged.
    """
    return _finished(config, Path(out)) is not None


def _identity(config: SyntheticConfig) -> dict[str, Any]:
    return {"maker": MAKER, "generator_version": GENERATOR_VERSION, **asdict(config)}


def _finished(config: SyntheticConfig, folder: Path) -> dict[str, Any] | None:
    """Provenance of the finished data set in `folder`, if there is one."""
    for name in (MANIFEST_NAME, RAW_MANIFEST_NAME):
        if not (folder / name).exists():
            continue
        try:
            manifest = json.loads((folder / name).read_text())
            provenance, parts = manifest["provenance"], manifest["parts"]
            made_as = provenance["config"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{folder} holds a {name} that {MAKER} did not make; choose another folder"
            ) from error
        _check_same(config, made_as, folder)
        for part in parts:
            path = folder / part["path"]
            if not path.exists() or path.stat().st_size != part["num_bytes"]:
                raise ValueError(f"{path} is missing or has changed; delete {folder} and make it again")
        shutil.rmtree(folder / UNFINISHED, ignore_errors=True)
        return dict(provenance)
    return None


def _check_same(config: SyntheticConfig, made_as: dict[str, Any], folder: Path) -> None:
    wanted = _identity(config)
    differ = [
        f"{key} is {made_as.get(key)!r} there and {wanted.get(key)!r} now"
        for key in sorted(wanted.keys() | made_as.keys())
        if made_as.get(key) != wanted.get(key)
    ]
    if differ:
        raise ValueError(
            f"{folder} belongs to another configuration: {'; '.join(differ)}. "
            "Choose another folder, or delete this one"
        )


def _open_work(config: SyntheticConfig, folder: Path) -> Path:
    """The folder's `.unfinished`, new or left by a run of the same configuration."""
    work = folder / UNFINISHED
    identity = work / "config.json"
    if identity.exists():
        _check_same(config, json.loads(identity.read_text()), folder)
        return work
    if folder.exists() and any(path.name != UNFINISHED for path in folder.iterdir()):
        raise ValueError(f"{folder} is not empty and holds no data set; choose another folder")
    work.mkdir(parents=True, exist_ok=True)
    _write_text(work, identity, json.dumps(_identity(config), indent=1) + "\n")
    return work


@contextlib.contextmanager
def _locked(work: Path, folder: Path) -> Iterator[None]:
    with (work / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError(f"another process is making {folder} right now; wait for it") from error
        yield


@contextlib.contextmanager
def _full_disk_explained(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in FULL:
            raise
        raise OSError(
            error.errno,
            f"no room to write {folder} ({os.strerror(error.errno)}). Finished files are kept: "
            "free some space and run the same again",
        ) from error


def _make_files(config: SyntheticConfig, folder: Path, plans: list[FilePlan], processes: int) -> None:
    """Make the files of `plans`, showing progress on a terminal."""
    total = sum(plan.num_rows for plan in plans)
    with tqdm(total=total, unit="row", unit_scale=True, disable=None, desc=f"making {folder}") as bar:
        if processes == 1 or len(plans) < 2:
            worker = _Worker(config, folder)
            for plan in plans:
                bar.update(worker.make(plan))
            return
        with ProcessPoolExecutor(
            min(processes, len(plans)),
            mp_context=multiprocessing.get_context("spawn"),
            initializer=_start_worker,
            initargs=(config, folder),
        ) as pool:
            try:
                for done in as_completed([pool.submit(_make_in_worker, plan) for plan in plans]):
                    bar.update(done.result())
            except BrokenProcessPool as error:
                raise ChildProcessError(
                    "a worker process died (killed, or out of memory); run the same again to go on, "
                    "with fewer processes if memory is short"
                ) from error
            finally:
                pool.shutdown(cancel_futures=True)


class _Worker:
    """Makes files of one data set."""

    def __init__(self, config: SyntheticConfig, folder: Path) -> None:
        self._config, self._folder = config, folder
        self._source = ClickSource(config)

    def make(self, plan: FilePlan) -> int:
        """Make one file; returns its samples."""
        work, path = self._folder / UNFINISHED, self._folder / plan.path
        scores = Scores()
        unfinished = work / _flat(plan, ".part")
        write_file(unfinished, self._config, self._blocks(plan, scores))
        with unfinished.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        num_bytes = unfinished.stat().st_size
        path.parent.mkdir(exist_ok=True)
        unfinished.replace(path)
        result = work / _flat(plan, ".scores.npz")
        temporary = work / _flat(plan, ".scores.part")
        with temporary.open("wb") as file:
            np.savez(file, num_bytes=num_bytes, sha256=digest, **vars(scores))
        temporary.replace(result)
        return plan.num_rows

    def _blocks(self, plan: FilePlan, scores: Scores) -> Iterator[Block]:
        for index in plan.blocks:
            block = self._source.block(plan.day, index)
            scores.add(block.probabilities, block.labels)
            yield block


_worker: _Worker


def _start_worker(config: SyntheticConfig, folder: Path) -> None:
    global _worker  # noqa: PLW0603  # one worker a process: the pool offers no other place for it
    _worker = _Worker(config, folder)
    threading.Thread(target=_die_with_parent, daemon=True).start()


def _die_with_parent() -> None:
    """A pool's worker does not notice that its parent was killed: it would wait for work forever."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _make_in_worker(plan: FilePlan) -> int:
    return _worker.make(plan)


def _flat(plan: FilePlan, suffix: str) -> str:
    return plan.path.replace("/", "_") + suffix


def _result(work: Path, plan: FilePlan) -> tuple[Part, Scores] | None:
    """What is known of a finished file; None if it has to be made."""
    try:
        with np.load(work / _flat(plan, ".scores.npz")) as stored:
            num_bytes, digest = int(stored["num_bytes"]), str(stored["sha256"])
            scores = Scores(**{name: stored[name] for name in vars(Scores())})
        if (work.parent / plan.path).stat().st_size != num_bytes:
            return None
    except FileNotFoundError:
        return None
    part = Part(
        path=plan.path,
        day=plan.day,
        num_rows=plan.num_rows,
        row_groups=plan.block_rows,
        num_bytes=num_bytes,
        sha256=digest,
    )
    return part, scores


def _commit(config: SyntheticConfig, folder: Path, plans: list[FilePlan]) -> dict[str, Any]:
    """Write the manifest: from here on the data set exists."""
    work = folder / UNFINISHED
    results = [result for plan in plans if (result := _result(work, plan)) is not None]
    assert len(results) == len(plans)
    by_day: dict[int, Scores] = {}
    for part, scores in results:
        by_day[part.day] = by_day.get(part.day, Scores()) + scores
    provenance = {
        "maker": MAKER,
        "config": _identity(config),
        **sum(by_day.values(), Scores()).summary(),
        "days": {str(day): scores.summary() for day, scores in by_day.items()},
    }
    features = zip(CATEGORY_NAMES, config.table_rows, strict=True)
    manifest = DatasetManifest(
        features=tuple(Feature(name=name, rows=rows) for name, rows in features),
        parts=tuple(part for part, _ in results),
        provenance=provenance,
    )
    name = MANIFEST_NAME if config.format == "parquet" else RAW_MANIFEST_NAME
    _write_text(work, folder / name, manifest.to_json())
    shutil.rmtree(work)
    return provenance


def _write_text(work: Path, path: Path, text: str) -> None:
    temporary = work / (path.name + ".part")
    with temporary.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
