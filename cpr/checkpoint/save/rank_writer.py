"""One rank's part of a save: its row files and its state file, on their way to the storage."""

from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from typing import Any

from cpr.checkpoint.format.manifest import (
    StateFileEntry,
    TableEntry,
)
from cpr.checkpoint.format.part import Part, column_entries
from cpr.checkpoint.format.row_file import RowFileWriter
from cpr.checkpoint.format.rows import Rows
from cpr.checkpoint.format.tree_file import write_state
from cpr.checkpoint.save.niceness import give_way
from cpr.checkpoint.storage.base import Storage
from cpr.checkpoint.storage.sinks import HashingSink
from cpr.errors import SaveFailedError
from cpr.extent import Extent


class PartWriter:
    """Writes pieces as they come, one file after the other.

    While a file is written, the one before is made durable by a thread: to wait for that takes as long as to
    write some more megabytes, for each table.

    Args:
        storage: of the checkpoint.
        folder: of the save, relative to the storage.
        codec: of the weights.
        with_ids: whether pieces hold chosen rows (a row save) or all rows in order (a base).
    """

    def __init__(self, storage: Storage, folder: str, codec: str, with_ids: bool) -> None:
        self._storage = storage
        self._folder = folder
        self._codec = codec
        self._with_ids = with_ids
        self._part = Part()
        self._extent: Extent | None = None
        self._file = ExitStack()
        self._steps: list[int] = []
        self._closer = ThreadPoolExecutor(1, "checkpoint-closer", initializer=give_way)
        self._closing: Future[None] | None = None

    def write(self, extent: Extent, rows: Rows, step: int) -> None:
        """Append rows of a shard; those of one shard come one after the other.

        Args:
            extent: of the shard.
            rows: some of its rows.
            step: training steps done when they were copied.
        """
        if extent != self._extent:
            self._finish_file()
            self._open(extent, rows)
        self._writer.write(rows)
        self._steps.append(step)

    def write_state(self, tree: Any, rank: int | None) -> None:
        """Write everything that is no table row.

        Args:
            tree: see `cpr.checkpoint.format.tree_file`.
            rank: whose it is; None: of all ranks.
        """
        path = "state.arrow" if rank is None else f"state-rank{rank}.arrow"
        with self._storage.create(f"{self._folder}/{path}") as file:
            sink = HashingSink(file)
            write_state(sink, tree)
        self._part.states.append(
            StateFileEntry(path=path, num_bytes=sink.num_bytes, digest=sink.digest(), rank=rank)
        )

    def finish(self, tables: dict[str, TableEntry]) -> Part:
        """Close the last file; what was written, all of it durable, and the tables of this rank's shards."""
        with self._closer:
            self._finish_file()
            self._wait_for_closed()
        self._part.tables = tables
        return self._part

    def abandon(self) -> None:
        """Leave the open file without finishing it, so that it does not appear."""
        error = SaveFailedError(f"{self._folder} was abandoned")
        with self._closer, suppress(Exception):  # what went wrong first is what people hear of
            self._file.__exit__(type(error), error, None)

    def _open(self, extent: Extent, rows: Rows) -> None:
        self._extent, self._steps, self._path = extent, [], f"{extent.name}.arrow"
        sink = self._file.enter_context(self._storage.create(f"{self._folder}/{self._path}"))
        self._writer = RowFileWriter(
            sink,
            shard=extent,
            columns=column_entries(rows.columns),  # those of the live shard may be others by now
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
