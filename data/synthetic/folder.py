"""The folder of a synthetic data set, which is complete or visibly unfinished.

During generation, its folder `.unfinished` holds the configuration, temporary files, and results of finished
files. A finished file is moved into place after a sync. The manifest is written last, and `.unfinished` is
removed.
"""

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import numpy as np

from data.dataset import MANIFEST_NAME, Part
from data.synthetic.config import SyntheticConfig
from data.synthetic.files import FilePlan, write_file
from data.synthetic.profile import TOP_COVERAGE
from data.synthetic.scores import Scores
from data.synthetic.source import Block

MAKER: Final = "data.synthetic"
FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
GENERATOR_VERSION: Final = 1
"""Raised whenever the same configuration would give other bytes."""

RAW_MANIFEST_NAME: Final = "synthetic.json"
"""Name of the manifest next to raw files, which no loader reads."""


class DatasetFolder:
    """The folder of one configuration's data set.

    Args:
        config: the data set.
        path: its folder, on a local disk; need not exist.
    """

    def __init__(self, config: SyntheticConfig, path: Path) -> None:
        self.path = path
        self.identity = {"maker": MAKER, "generator_version": GENERATOR_VERSION, **asdict(config)}
        self._config = config
        self._manifest = path / (MANIFEST_NAME if config.format == "parquet" else RAW_MANIFEST_NAME)
        self._work = path / ".unfinished"

    def provenance(self) -> dict[str, Any] | None:
        """Provenance of the finished data set; None if there is none yet.

        Raises:
            ValueError: the folder holds another data set, or this one is damaged.
        """
        with self._named_in_errors():
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
        self._check_identity(made_as)
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
        if disk.total and self._config.least_bytes > free:  # some file systems report no sizes
            raise ValueError(
                f"{self._config.days:,} days of {self._config.rows_per_day:,} rows take "
                f"{self._config.least_bytes / 1e9:,.1f} GB at least, and the disk of {self.path} has "
                f"{free / 1e9:,.1f} GB free: lower --days or --rows-per-day, or name another --out"
            )

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """Lock the folder for writing; it is new, or left unfinished by the same configuration.

        Raises:
            ValueError: the folder holds something else, or another process is writing it.
        """
        identity = self._work / "config.json"
        with self._named_in_errors():
            if identity.exists():
                self._check_identity(json.loads(identity.read_text()))
            elif self.path.exists() and any(file != self._work for file in self.path.iterdir()):
                raise ValueError(f"{self.path} is not empty and holds no data set; choose another folder")
            self._work.mkdir(parents=True, exist_ok=True)
            lock_file = (self._work / "lock").open("w")
        with lock_file as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise ValueError(f"another process is making {self.path} right now; wait for it") from error
            self._sweep()
            self._write(identity, json.dumps(self.identity, indent=1).encode())
            try:
                yield
            finally:
                self._sweep()

    def write(self, plan: FilePlan, blocks: Iterator[Block]) -> None:
        """Write one file of the data set atomically."""
        scores = Scores()
        unfinished = self._temporary(plan.path)
        write_file(unfinished, self._config, _scored(blocks, scores))
        with unfinished.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        num_bytes = unfinished.stat().st_size
        (self.path / plan.path).parent.mkdir(exist_ok=True)
        unfinished.replace(self.path / plan.path)
        unfinished = self._temporary(plan.path)
        with unfinished.open("wb") as file:
            np.savez(file, num_bytes=num_bytes, sha256=digest, **vars(scores))
        unfinished.replace(self._result(plan))

    def written(self, plan: FilePlan) -> tuple[Part, Scores] | None:
        """A finished file and the scores of its samples; None if it has to be made."""
        try:
            with np.load(self._result(plan)) as stored:
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

    def commit(self, manifest_json: str) -> None:
        """Write the manifest, which makes the data set exist."""
        self._write(self._manifest, manifest_json.encode())
        self.clean()

    def clean(self) -> None:
        """Remove the files of an unfinished data set."""
        shutil.rmtree(self._work, ignore_errors=True)

    @contextlib.contextmanager
    def _named_in_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno in FULL:
                raise
            raise ValueError(
                f"{self.path} cannot be made or read ({error.strerror}): name another folder by --out, or "
                "change its permissions"
            ) from error

    def _check_identity(self, made_as: dict[str, Any]) -> None:
        made_as = {
            "top_coverage": TOP_COVERAGE,
            **made_as,
        }  # absent in data sets of versions without this setting
        differ = [
            f"{key} is {made_as.get(key)!r} there and {self.identity.get(key)!r} now"
            for key in sorted(self.identity.keys() | made_as.keys())
            if made_as.get(key) != self.identity.get(key)
        ]
        if differ:
            raise ValueError(
                f"{self.path} belongs to another configuration: {'; '.join(differ)}. "
                "Choose another folder, or delete this one"
            )

    def _result(self, plan: FilePlan) -> Path:
        return self._work / (plan.path.replace("/", "_") + ".npz")

    def _temporary(self, name: str) -> Path:
        """Temporary path of this process, since a worker may briefly survive a killed parent."""
        return self._work / f"{name.replace('/', '_')}.{os.getpid()}.part"

    def _sweep(self) -> None:
        """Remove half-written files."""
        for unfinished in self._work.glob("*.part"):
            unfinished.unlink(missing_ok=True)

    def _write(self, path: Path, content: bytes) -> None:
        unfinished = self._temporary(path.name)
        with unfinished.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)


def _scored(blocks: Iterator[Block], scores: Scores) -> Iterator[Block]:
    """Yield the blocks and count their scores."""
    for block in blocks:
        scores.add(block.probabilities, block.labels)
        yield block
