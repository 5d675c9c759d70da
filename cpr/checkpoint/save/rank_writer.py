"""Writes one rank's part of a save: its row files and state files."""

import os
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from typing import Any, Final

from cpr.checkpoint.format.manifest import StateFileEntry, TableEntry
from cpr.checkpoint.format.part import RankPart, column_entries
from cpr.checkpoint.format.row_file import RowFileWriter
from cpr.checkpoint.format.row_schema import RowBatch
from cpr.checkpoint.format.tree_file import write_state
from cpr.checkpoint.storage.base import Storage
from cpr.errors import SaveFailedError
from cpr.extent import Extent

NICENESS: Final = 10
"""Scheduling priority of background threads: higher values yield to other threads."""


def lower_priority() -> None:
    """Lower the scheduling priority of this thread, so that it yields to the threads of training."""
    with suppress(OSError, AttributeError):  # only Linux has priorities of threads
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)


class RankWriter:
    """Writes row files of one save one after the other, and its state files.

    While a file is written, a thread syncs the previous one: waiting for that takes as long as writing some
    more megabytes, for each table. `with_ids` says whether chosen rows are written (a row save) or all rows
    in order (a base).
    """

    def __init__(self, storage: Storage, folder: str, codec: str, with_ids: bool) -> None:
        self._storage = storage
        self._folder = folder
        self._codec = codec
        self._with_ids = with_ids
        self._part = RankPart()
        self._extent: Extent | None = None
        self._file = ExitStack()
        self._steps: list[int] = []
        self._closer = ThreadPoolExecutor(1, "checkpoint-closer", initializer=lower_priority)
        self._closing: Future[None] | None = None

    def write(self, extent: Extent, rows: RowBatch, step: int) -> None:
        """Append rows of a shard; all rows of one shard are written before those of the next shard."""
        if extent != self._extent:
            self._finish_file()
            self._open(extent, rows)
        self._writer.write(rows)
        self._steps.append(step)

    def write_state(self, tree: Any, rank: int | None) -> None:
        """Write a state file of a rank, or of all ranks (None); for `tree` see `format.tree_file`."""
        path = "state.arrow" if rank is None else f"state-rank{rank}.arrow"
        with self._storage.create(f"{self._folder}/{path}") as file:
            sink = write_state(file, tree)
        self._part.states.append(
            StateFileEntry(path=path, num_bytes=sink.num_bytes, digest=sink.digest(), rank=rank)
        )

    def finish(self, tables: dict[str, TableEntry]) -> RankPart:
        """Close the last file; returns the entries of all files, which are durable, and `tables`."""
        with self._closer:
            self._finish_file()
            self._wait_for_closed()
        self._part.tables = tables
        return self._part

    def abandon(self) -> None:
        """Close without finishing the open file, so that it does not appear."""
        error = SaveFailedError(f"{self._folder} was abandoned")
        with self._closer, suppress(Exception):  # the first error is reported, not this one
            self._file.__exit__(type(error), error, None)

    def _open(self, extent: Extent, rows: RowBatch) -> None:
        self._extent, self._steps, self._path = extent, [], f"{extent.name}.arrow"
        sink = self._file.enter_context(self._storage.create(f"{self._folder}/{self._path}"))
        self._writer = RowFileWriter(
            sink,
            shard=extent,
            columns=column_entries(rows.columns),  # the live shard may have other columns by now
            codec=self._codec,
            with_ids=self._with_ids,
        )

    def _finish_file(self) -> None:
        if self._extent is None:
            return
        entry = self._writer.finish(self._path, min(self._steps), max(self._steps))
        self._wait_for_closed()
        self._closing = self._closer.submit(self._file.pop_all().close)
        self._part.rows.append(entry)
        self._extent = None

    def _wait_for_closed(self) -> None:
        if self._closing is not None:
            self._closing.result()
