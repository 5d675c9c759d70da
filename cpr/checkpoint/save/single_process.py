"""Writes one full checkpoint from a single process without a process group, as `cpr rescue` does."""

import uuid
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from functools import partial
from typing import Final

from torch import Tensor

from cpr.checkpoint.catalog.chain import committed
from cpr.checkpoint.format.manifest import Manifest, Moment, save_folder
from cpr.checkpoint.format.part import RankPart, merge_tables
from cpr.checkpoint.format.row_file import RowBatch
from cpr.checkpoint.ownership.lock import DirectoryLock
from cpr.checkpoint.save.writer_thread import RankWriter
from cpr.checkpoint.storage.base import Storage
from cpr.extent import Extent

CHUNK_BYTES: Final = 8 * 2**20

Progress = Callable[[int], object]
"""Called with the bytes of table rows written since the last call."""


def write_base(
    storage: Storage,
    choose: Callable[[DirectoryLock], tuple[int, str]],
    write: Callable[[RankWriter], RankPart],
    *,
    moment: Moment,
    step: int,
    world_size: int,
) -> Manifest:
    """Take a checkpoint directory, write a base into it and commit it; after an error nothing counts.

    `choose` is called when the directory is owned: it returns the sequence and the run id of the save, or
    raises where the directory must not be written to. `write` writes rows and states, and finishes the
    writer. For `moment`, `step` and `world_size` see the manifest.

    Raises:
        LockedError: another live run owns the directory.
        CheckpointError: a file cannot be read or written.
    """
    lock = DirectoryLock(storage, uuid.uuid4().hex)
    lock.acquire(partial(committed, storage))
    try:
        sequence, run_id = choose(lock)
        folder = save_folder(sequence, lock.epoch)
        writer = RankWriter(storage, folder, "exact", with_ids=False)
        try:
            part = write(writer)
        except BaseException:
            writer.abandon()
            storage.delete(folder)
            raise
        manifest = Manifest(
            run_id=run_id,
            sequence=sequence,
            epoch=lock.epoch,
            kind="base",
            parent=None,
            base=sequence,
            moment=moment,
            step=step,
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            world_size=world_size,
            tables=merge_tables([part]),
            rows=tuple(part.rows),
            states=tuple(part.states),
        )
        lock.check()
        with storage.create(manifest.path) as sink:
            sink.write(memoryview(manifest.to_json()))
        lock.check()  # a newer owner may have listed the saves before this one was durable
    finally:
        lock.release()
    return manifest


def write_rows(
    writer: RankWriter,
    extent: Extent,
    first_row: int,
    columns: Mapping[str, Tensor],
    step: int,
    progress: Progress,
) -> None:
    """Write consecutive rows of a shard, weights and optimizer state `[n, ...]`, in chunks."""
    num_rows = columns["weights"].shape[0]
    rows_per_chunk = max(1, CHUNK_BYTES * num_rows // max(sum(each.nbytes for each in columns.values()), 1))
    for begin in range(0, num_rows, rows_per_chunk):
        rows = {name: values[begin : begin + rows_per_chunk] for name, values in columns.items()}
        writer.write(extent, RowBatch(first_row + begin, None, rows), step)
        progress(sum(values.nbytes for values in rows.values()))
