"""The background half of saving: one thread per rank that writes staged rows to files and commits saves.

All ranks run the same saves in the same order. Each rank writes its own files, then rank 0 gathers the
outcomes and commits the manifest if no rank failed: a failure on any rank fails the save on all. `RankWriter`
writes one rank's part of a save: its row files and state files.
"""

import logging
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from datetime import UTC, datetime
from typing import Any, Final

import torch

from cpr.checkpoint.catalog.committer import Committer
from cpr.checkpoint.collectives import RankGroup
from cpr.checkpoint.format.manifest import (
    Kind,
    Manifest,
    Moment,
    Parent,
    StateFileEntry,
    TableEntry,
    save_folder,
)
from cpr.checkpoint.format.part import RankPart, column_entries, merge_tables
from cpr.checkpoint.format.row_file import RowBatch, RowFileWriter
from cpr.checkpoint.format.tree_file import write_state
from cpr.checkpoint.save.snapshot import StagedRows
from cpr.checkpoint.save.staging import StagingPool
from cpr.checkpoint.state.model_state import CapturedState
from cpr.checkpoint.storage.base import Storage
from cpr.checkpoint.storage.local import MAX_BLOCKS
from cpr.errors import (
    CheckpointError,
    SaveFailedError,
    SaveGivenUpError,
    SaveRefusedError,
    SupersededError,
)
from cpr.extent import Extent

CLOSED_AT_ONCE: Final = MAX_BLOCKS - 1
"""Files that are synced while the next one is written; with more, a file would have no block to gather in."""
NICENESS: Final = 10
"""Scheduling priority of background threads: higher values yield to other threads."""


def lower_priority() -> None:
    """Lower the scheduling priority of this thread, so that it yields to the threads of training."""
    with suppress(OSError, AttributeError):  # only Linux has priorities of threads
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)


class RankWriter:
    """Writes row files of one save one after the other, and its state files.

    While a file is written, threads sync those before it: waiting for one takes as long as writing some more
    megabytes, and file systems finish several at once as fast as one. `with_ids` says whether chosen rows are
    written (a row save) or all rows in order (a base).
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
        self._closer = ThreadPoolExecutor(CLOSED_AT_ONCE, "checkpoint-closer", initializer=lower_priority)
        self._closing: deque[Future[None]] = deque()

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
            self._wait_until_closing(0)
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
        self._wait_until_closing(CLOSED_AT_ONCE - 1)
        self._closing.append(self._closer.submit(self._file.pop_all().close))
        self._part.rows.append(entry)
        self._extent = None

    def _wait_until_closing(self, count: int) -> None:
        """Wait until at most `count` files are being closed."""
        while len(self._closing) > count:
            self._closing.popleft().result()


logger = logging.getLogger(__name__)


class Save:
    """A running or finished save: the queue between staging and writing, and the outcome."""

    def __init__(self, kind: Kind, moment: Moment, codec: str, *, is_gentle: bool = False) -> None:
        self.kind, self.moment, self.codec = kind, moment, codec
        self.blocked_s = 0.0
        """Seconds that training on this rank has waited for the save: in calls of the checkpointer and before
        updates of rows that were still to be copied."""
        self.longest_blocked_s = 0.0
        """Maximum of `blocked_s` over all ranks when the save was committed; 0 before."""
        self.seconds: float | None = None
        """Seconds from the call until the commit; None before, and if the save failed."""
        self.manifest: Manifest | None = None
        """The committed manifest; None before the commit, and if the save failed."""
        self.error: SaveFailedError | None = None
        """Why the save, or compaction and retention after it, failed."""
        self.is_out_of_time = False
        self.is_refused = False
        """Whether a newer run owns the directory."""
        self.is_excused = False
        """Whether a failure need not be raised in training: the save was given up, or that was reported."""
        self.hurry = threading.Event()
        """Set when the save is to be written at full speed: at once, or, if it `is_gentle`, as soon as
        training waits for it. Until then the writer rests after each piece as long as the piece took."""
        if not is_gentle:
            self.hurry.set()
        self.broken = threading.Event()
        """Set when writing on this rank has failed, so that copying may stop."""
        self._began = time.perf_counter()
        self._settled = threading.Event()
        self._over = threading.Event()
        self.items: queue.SimpleQueue[StagedRows | CapturedState | str] = queue.SimpleQueue()
        """What to write: rows, then the state that ends them, or the problem for which the save fails."""

    @property
    def done(self) -> bool:
        """Whether the save is committed or has failed."""
        return self._settled.is_set()

    @property
    def outcome(self) -> bool | SaveFailedError:
        """Whether this rank knows that the save is committed, or the error that it failed with."""
        if self.manifest is None and self.error is not None and not self.is_excused:
            return self.error
        return self.manifest is not None

    @property
    def is_over(self) -> bool:
        """Whether compaction and retention after the save are finished, too."""
        return self._over.is_set()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until `done`; returns `done`."""
        return self._settled.wait(timeout_s)

    def wait_until_over(self, timeout_s: float | None = None) -> bool:
        """Wait until `is_over`; returns `is_over`."""
        return self._over.wait(timeout_s)

    def commit(self, manifest: Manifest, longest_blocked_s: float) -> None:
        """Note that the save is committed."""
        self.seconds = time.perf_counter() - self._began
        self.longest_blocked_s = longest_blocked_s
        self.manifest = manifest
        self._settled.set()

    def finish(self, error: SaveFailedError | None) -> None:
        """Note the end of the save, with an error if the save or the work after it failed."""
        self.is_excused |= isinstance(error, SaveGivenUpError)
        self.error = error
        self._settled.set()
        self._over.set()


class WriterThread:
    """Runs saves one after the other in a background thread, which alone uses the group and the committer."""

    def __init__(self, storage: Storage, pool: StagingPool, group: RankGroup, committer: Committer) -> None:
        self._storage, self._pool, self._group, self._committer = storage, pool, group, committer
        self._queue: queue.SimpleQueue[Save | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="checkpoint-writer", daemon=True)
        self._thread.start()

    def start(self, save: Save) -> None:
        """Start a save; its rows follow in `Save.items`."""
        self._queue.put(save)

    def close(self, timeout_s: float | None = None) -> bool:
        """Finish the started saves, then end the thread; returns whether it ended in time."""
        self._queue.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        lower_priority()
        while (save := self._queue.get()) is not None:
            failure: SaveFailedError | None = None
            try:
                self._commit(save)
                self._committer.clean_up()
            except SaveGivenUpError as error:
                failure = error
                if self._group.rank == 0:
                    logger.info("%s", error)
            except SaveFailedError as error:
                failure = SaveRefusedError(str(error)) if save.is_refused else error
            except Exception as error:  # any error must reach the training thread
                failure = SaveFailedError(
                    f"a save could not be finished ({describe(error)}); look at the log of all ranks"
                )
            save.finish(failure)

    def _commit(self, save: Save) -> None:
        began = time.perf_counter()
        manifest, longest_blocked_s = self._save(save)
        save.commit(manifest, longest_blocked_s)
        if self._group.rank == 0:
            logger.info(
                "saved %s %d: %.1f MB at step %d in %.2f s",
                manifest.kind,
                manifest.sequence,
                manifest.num_bytes / 1e6,
                manifest.step,
                time.perf_counter() - began,
            )

    def _save(self, save: Save) -> tuple[Manifest, float]:
        """Write and commit a save; returns as `Committer.commit`."""
        sequence = self._committer.next_sequence
        problem = None
        try:
            self._committer.check_lock()
        except Exception as error:
            problem = describe(error)
            # The rows still have to be taken from the queue, so that their buffers are released.
            save.is_refused = isinstance(error, SupersededError)
            save.broken.set()
        folder = save_folder(sequence, self._committer.epoch)
        writer = RankWriter(self._storage, folder, save.codec, with_ids=save.kind == "rows")
        states, problem = self._write_all(save, writer, problem)
        part = RankPart()
        if states is not None and problem is None:
            try:
                part = writer.finish(states.tables)
            except Exception as error:
                problem = describe(error)
        chain = self._committer.chain

        def manifest_of(parts: Sequence[RankPart]) -> Manifest:
            newest = chain[-1] if save.kind == "rows" else None
            return Manifest(
                run_id=self._committer.run_id,
                sequence=sequence,
                epoch=self._committer.epoch,
                kind=save.kind,
                parent=Parent(sequence=newest.sequence, digest=newest.file_digest) if newest else None,
                base=chain[0].sequence if newest else sequence,
                moment=save.moment,
                step=states.step if states else 0,
                created=datetime.now(UTC).isoformat(timespec="seconds"),
                world_size=self._group.world_size,
                tables=merge_tables(parts),
                rows=tuple(entry for part in parts for entry in part.rows),
                states=tuple(entry for part in parts for entry in part.states),
            )

        return self._committer.commit(
            sequence, save.kind, part, problem, manifest_of, save.blocked_s, save.is_out_of_time
        )

    def _write_all(
        self, save: Save, writer: RankWriter, problem: str | None
    ) -> tuple[CapturedState | None, str | None]:
        """Write all queued items; drains the queue even after an error, so that every buffer is released.

        Returns the states that ended the queue, if it was not cancelled, and the problem, if there is one.
        """
        while True:
            item, pause_s = save.items.get(), 0.0
            if isinstance(item, str):
                writer.abandon()
                return None, problem or item
            try:
                if problem is None:
                    if isinstance(item, StagedRows):
                        began = time.perf_counter()
                        writer.write(item.shard.extent, item.rows, item.step)
                        pause_s = time.perf_counter() - began
                        continue
                    if item.common is not None:
                        writer.write_state(item.common, None)
                    if item.own is not None:
                        writer.write_state(item.own, self._group.rank)
            except Exception as error:
                problem = describe(error)
                save.broken.set()
                writer.abandon()
            finally:
                if isinstance(item, StagedRows):
                    self._pool.release(item.buffer)
                    save.hurry.wait(pause_s)
            if isinstance(item, CapturedState):
                return item, problem


def is_crowded() -> bool:
    """Whether the threads of training take all cores that the workers of this node may run on.

    Writing then slows training down, whoever writes: `dd` at the speed of the disk took a third of the two
    cores of a virtual machine. At half the speed it takes half as much at a time.
    """
    workers = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return torch.get_num_threads() * workers >= len(os.sched_getaffinity(0))


def describe(error: BaseException) -> str:
    """Text of an error for the message of a `SaveFailedError`."""
    if isinstance(error, CheckpointError):
        return str(error)
    return f"{type(error).__name__}: {error}"
