"""The folder of a synthetic data set, which is complete or visibly unfinished.

During generation, its folder `.unfinished` holds the configuration and results of finished files. The
manifest is written last, and `.unfinished` is removed.
"""

import contextlib
import io
import json
import shutil
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import numpy as np

from data.dataset import MANIFEST_NAME, Part
from data.jobs.files import durable_file
from data.jobs.folder import begun, locked, named_in_errors, refuse_difference
from data.synthetic.config import SyntheticConfig
from data.synthetic.files import FilePlan, write_blocks
from data.synthetic.profile import TOP_COVERAGE
from data.synthetic.scores import Scores
from data.synthetic.source import Block

MAKER: Final = "data.synthetic"
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
        self.config = config
        self._manifest = path / (MANIFEST_NAME if config.format == "parquet" else RAW_MANIFEST_NAME)
        self._work = path / ".unfinished"

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

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """Lock the folder for writing; it is new, or left unfinished by the same configuration.

        Raises:
            ValueError: the folder holds something else, or another process is writing it.
        """
        with locked(self.path), begun(self.path, self._work, self.identity):
            yield

    def write(self, plan: FilePlan, blocks: Iterator[Block]) -> None:
        """Write one file of the data set."""
        scores = Scores()
        with durable_file(self.path / plan.path) as file:
            samples = _scored(blocks, scores)
            write_blocks(file, self.config, samples)  # type: ignore[arg-type]  # it has what writers need
        result = io.BytesIO()
        np.savez(result, num_bytes=file.num_bytes, sha256=file.sha256, **vars(scores))
        with durable_file(self._result(plan)) as stored:
            stored.write(result.getvalue())

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
        with durable_file(self._manifest) as file:
            file.write(manifest_json.encode())
        self.clean()

    def clean(self) -> None:
        """Remove the files of an unfinished data set."""
        shutil.rmtree(self._work, ignore_errors=True)

    def _result(self, plan: FilePlan) -> Path:
        return self._work / (plan.path.replace("/", "_") + ".npz")


def _scored(blocks: Iterator[Block], scores: Scores) -> Iterator[Block]:
    """Yield the blocks and count their scores."""
    for block in blocks:
        scores.add(block.probabilities, block.labels)
        yield block
