"""Saves a whole model at once, for a process that trains nothing: an import, or a rescue of memory."""

import uuid
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from functools import partial
from typing import Final

from torch import Tensor

from cpr.checkpoint.catalog.chain import committed
from cpr.checkpoint.format.manifest import Manifest, Moment, save_folder
from cpr.checkpoint.format.part import Part, merge_tables
from cpr.checkpoint.format.rows import Rows
from cpr.checkpoint.ownership.lock import DirectoryLock
from cpr.checkpoint.save.rank_writer import PartWriter
from cpr.checkpoint.storage.base import Storage
from cpr.extent import Extent

CHUNK_BYTES: Final = 8 * 2**20
"""Of rows that can be read alone later."""

Progress = Callable[[int], object]
"""Called with the bytes of table rows written since the last call."""


def write_base(
    storage: Storage,
    choose: Callable[[DirectoryLock], tuple[int, str]],
    write: Callable[[PartWriter], Part],
    *,
    moment: Moment,
    step: int,
    world_size: int,
) -> Manifest:
    """Take a checkpoint directory, write one base into it and commit it; after an error nothing counts.

    Args:
        storage: of the directory.
        choose: called when the directory is owned; gives the number of the save and the run that it is of, or
            raises where the directory must not be written to.
        write: writes rows and states, and finishes the writer.
        moment: see the manifest.
        step: training steps done.
        world_size: ranks that the states are of.

    Raises:
        LockedError: a run that is alive writes there.
        CheckpointError: something cannot be read or written.
    """
    lock = DirectoryLock(storage, uuid.uuid4().hex)
    lock.acquire(partial(committed, storage))
    try:
        sequence, run_id = choose(lock)
        folder = save_folder(sequence, lock.epoch)
        writer = PartWriter(storage, folder, "exact", with_ids=False)
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
        lock.check()  # a newer owner may not have found it: then it does not count
    finally:
        lock.release()
    return manifest


def write_rows(
    writer: PartWriter,
    extent: Extent,
    first_row: int,
    columns: Mapping[str, Tensor],
    step: int,
    progress: Progress,
) -> None:
    """Write rows that lie one after the other, in chunks.

    Args:
        writer: of the save.
        extent: of the shard that they are of.
        first_row: id of the first row.
        columns: weights and optimizer state, `[n, ...]`.
        step: that they are of.
        progress: see `Progress`.
    """
    num_rows = columns["weights"].shape[0]
    at_once = max(1, CHUNK_BYTES * num_rows // max(sum(each.nbytes for each in columns.values()), 1))
    for begin in range(0, num_rows, at_once):
        rows = {name: values[begin : begin + at_once] for name, values in columns.items()}
        writer.write(extent, Rows(first_row + begin, None, rows), step)
        progress(sum(values.nbytes for values in rows.values()))
