"""The scores of a data set while it is being scored: a folder next to the output that survives a kill.

The folder belongs to one run, save and data set. Logits of finished rows are appended to a file; the position
after them is written atomically, and whatever was appended later is cut off when the job continues.
"""

import json
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, Self

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from cpr.checkpoint.storage.local import sync_folder
from data.jobs.files import durable_file
from data.jobs.folder import begun, locked, refuse_difference

POSITION_EVERY_S: Final = 0.5
"""Seconds between two positions; what was scored after the last one is scored again after a kill."""
FLOAT_BYTES: Final = 4
IDENTITY_KEY: Final = b"dlrm.predict"
"""Key in the output's metadata: the run, save and data set that the scores belong to, in JSON."""


class UnfinishedScores:
    """Logits of the first rows of a data set, and the position of the loader after them."""

    def __init__(self, out: Path) -> None:
        self.out = out.absolute()
        self.folder = self.out.with_name(f"{out.name}.unfinished")
        self._state = self.folder / "state"
        self.num_rows = 0
        self.position: Any = None
        """Of the loader; None: at the beginning."""
        self._written_s = time.monotonic()

    def step_begun(self, known: Mapping[str, Any]) -> int | None:
        """Training step of the save with which an earlier call has begun; None if nothing is unfinished.

        Args:
            known: what is known of the job's identity before a model is loaded.

        Raises:
            ValueError: the folder or the output is there already, and is not of this job.
        """
        path = self._state / "identity.json"
        is_begun = path.exists()
        if not is_begun and not self.out.exists():
            return None
        there = json.loads(path.read_text()) if is_begun else self._finished()
        if not there:
            raise ValueError(f"{self.out} exists; remove it, or choose another --out")
        place = self.folder if is_begun else self.out
        refuse_difference(place, {key: there.get(key) for key in known}, known)
        return int(there["step"]) if is_begun else None

    def is_finished(self, identity: Mapping[str, Any]) -> bool:
        """Whether the output is there, as a call leaves it that was killed at its very end.

        Raises:
            ValueError: the output is there, and is of another run, save or data set.
        """
        if self._state.exists() or not self.out.exists():
            return False
        refuse_difference(self.out, self._finished(), identity)
        return True

    def _finished(self) -> Mapping[str, Any]:
        """What the scores of the output belong to; empty if it is another file."""
        try:
            metadata = pq.read_schema(self.out).metadata or {}
        except (pa.ArrowInvalid, OSError):
            return {}
        found: Mapping[str, Any] = json.loads(metadata.get(IDENTITY_KEY, b"{}"))
        return found

    @contextmanager
    def begun(self, identity: Mapping[str, Any]) -> Iterator[Self]:
        """Begin or continue; the folder is locked within the block, and stays if the block raises.

        Raises:
            ValueError: the folder belongs to another run, save or data set, or to a running process.
            OSError: the disk is full.
        """
        with locked(self.folder), begun(self.folder, self._state.name, identity):
            try:
                path = self._state / "position.json"
                if path.exists():
                    found = json.loads(path.read_text())
                    self.num_rows, self.position = found["num_rows"], found["position"]
                with self.logits_path.open("ab") as logits:
                    logits.truncate(self.num_rows * FLOAT_BYTES)
                yield self
            finally:
                if self.position is None:
                    shutil.rmtree(self.folder)

    @property
    def logits_path(self) -> Path:
        """File of float32 logits."""
        return self._state / "logits"

    @property
    def final_path(self) -> Path:
        """Where the output is made before it is renamed."""
        return self._state / "final"

    def append(self, logits: NDArray[np.float32], position: Any, *, last: bool) -> None:
        """Add the logits of the next rows; they last from the next position on, the `last` ones at once."""
        with self.logits_path.open("ab") as file:
            file.write(logits.tobytes())
            self.num_rows += len(logits)
            if last or time.monotonic() - self._written_s >= POSITION_EVERY_S:
                file.flush()
                os.fsync(file.fileno())
                self._write(position)

    def finish(self) -> None:
        """Give the finished output its name, and remove the folder."""
        self.final_path.replace(self.out)
        sync_folder(self.out.parent)
        shutil.rmtree(self.folder)

    def _write(self, position: Any) -> None:
        with durable_file(self._state / "position.json") as file:
            file.write(json.dumps({"num_rows": self.num_rows, "position": position}).encode())
        self.position, self._written_s = position, time.monotonic()
