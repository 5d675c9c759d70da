"""Verification: reads every byte of saved files again, compares it with the digests, and decodes it.

Chunks are verified in the same pass as the file that they are in, so that damage is named by its rows.
Everything that a load would refuse is found here, too: content that is not what its manifest says, and rows
that are in no file.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import xxhash

from cpr.checkpoint.catalog.chain import Rejected, State, is_committed, own_states
from cpr.checkpoint.format.manifest import ChunkEntry, FileEntry, Manifest, RowFileEntry, StateFileEntry
from cpr.checkpoint.format.row_file import decode_chunk
from cpr.checkpoint.format.tree_file import decode_state
from cpr.checkpoint.ownership.records import damaged_records
from cpr.checkpoint.storage.base import Storage
from cpr.errors import CheckpointError, CorruptFileError
from cpr.extent import Extent

READERS: Final = 4
READ_BYTES: Final = 8 * 2**20
"""Memory of each reader, in bytes; more if a chunk or a state file is larger."""

Progress = Callable[[int], object]


@dataclass(frozen=True)
class BadFile:
    """A file that differs from what was saved, or cannot be read."""

    sequence: int
    path: str
    """Relative to the checkpoint directory."""
    cause: str
    is_damaged: bool = True
    """False: the storage failed, which says nothing about the file itself."""


@dataclass(frozen=True)
class Verification:
    """Result of verifying a whole directory."""

    states: list[State]
    """All states according to the manifests, newest first."""
    bad: list[BadFile]
    damaged_owners: list[str]
    """Faults in records of owners, which list the saves that count."""
    rejected: list[Rejected]
    """Saves that their manifests alone rule out."""
    num_files: int
    num_bytes: int

    @property
    def newest(self) -> State | None:
        """The newest state without a bad file."""
        damaged = {file.sequence for file in self.bad}
        return next(
            (state for state in self.states if damaged.isdisjoint(save.sequence for save in state.saves)),
            None,
        )

    @property
    def is_fine(self) -> bool:
        """Whether nothing is damaged; unfinished saves are no damage."""
        return (
            not self.bad
            and not self.damaged_owners
            and all(rejected.unfinished for rejected in self.rejected)
        )


def verify(
    storage: Storage, progress: Progress | None = None, start: Callable[[int], object] | None = None
) -> Verification:
    """Read all files of all committed saves; in a directory in use, those that are not deleted meanwhile.

    `start` is called once with the total of bytes to read, `progress` with the bytes read since its last
    call, from several threads.
    """
    states, rejected = own_states(storage)
    saves = {save.sequence: save for state in states for save in state.saves}
    files = [(save, entry) for _, save in sorted(saves.items()) for entry in save.files]
    num_bytes = sum(entry.num_bytes for _, entry in files)
    if start is not None:
        start(num_bytes)
    bad = [file for save in saves.values() for file in _bad_manifests(save)]
    bad += _bad_files(storage, files, progress)
    # A live run deletes old saves meanwhile: files that went together with their manifest are not missing.
    gone = {
        sequence
        for sequence in {file.sequence for file in bad}
        if not is_committed(storage, saves[sequence].folder)
    }
    return Verification(
        [state for state in states if gone.isdisjoint(save.sequence for save in state.saves)],
        [file for file in bad if file.sequence not in gone],
        damaged_records(storage),
        rejected,
        len(files),
        num_bytes,
    )


def verify_files(storage: Storage, manifest: Manifest, entries: Sequence[FileEntry]) -> None:
    """Read some files of a save and compare them with their digests.

    Raises:
        CorruptFileError: a file is damaged; names the first one, and how many more there are.
        CheckpointError: the storage fails; no file is known to be damaged.
    """
    bad = list(_bad_files(storage, [(manifest, entry) for entry in entries], None))
    if damaged := [file for file in bad if file.is_damaged]:
        raise CorruptFileError(_first_of(damaged))
    if bad:
        raise CheckpointError(_first_of(bad))


def _first_of(bad: Sequence[BadFile]) -> str:
    more = f" (and {len(bad) - 1} more of this save)" if len(bad) > 1 else ""
    return f"{bad[0].cause}{more}"


def _bad_manifests(save: Manifest) -> Iterator[BadFile]:
    try:
        check_tables(save)
    except CorruptFileError as error:
        yield BadFile(save.sequence, save.path, str(error))
    if all(entry.rank is not None for entry in save.states):
        yield BadFile(save.sequence, save.path, f"{save.path} names no state file that all ranks share")


def _bad_files(
    storage: Storage, files: Iterable[tuple[Manifest, FileEntry]], progress: Progress | None
) -> Iterator[BadFile]:
    def check(file: tuple[Manifest, FileEntry]) -> BadFile | None:
        save, entry = file
        path = f"{save.folder}/{entry.path}"
        try:
            _check_file(storage, save, entry, progress)
        except CheckpointError as error:
            return BadFile(save.sequence, path, str(error), isinstance(error, CorruptFileError))
        return None

    with ThreadPoolExecutor(READERS, thread_name_prefix="cpr-verify") as pool:
        yield from (bad for bad in pool.map(check, files) if bad is not None)


class _Span(NamedTuple):
    begin: int
    end: int
    chunk: ChunkEntry | None


def _check_file(storage: Storage, save: Manifest, entry: FileEntry, progress: Progress | None) -> None:
    path = f"{save.folder}/{entry.path}"
    found = storage.size(path)
    if found != entry.num_bytes:
        raise CorruptFileError(
            f"{path} has {found} bytes, the manifest says {entry.num_bytes}: it was cut off or written again"
        )
    # A chunk is read in one piece, because it is decoded, and so is a state file.
    at_once = found if isinstance(entry, StateFileEntry) else min(READ_BYTES, found)
    at_once = max([1, at_once, *(span.end - span.begin for span in _spans(entry) if span.chunk is not None)])
    buffer = np.empty(at_once, dtype=np.uint8).data
    whole = xxhash.xxh3_128()
    for span in _spans(entry):
        for begin in range(span.begin, span.end, at_once):
            piece = buffer[: min(at_once, span.end - begin)]
            storage.read_into(path, begin, piece)
            whole.update(piece)
            if progress is not None:
                progress(piece.nbytes)
            if span.chunk is not None:
                assert isinstance(entry, RowFileEntry)
                decode_chunk(path, entry, span.chunk, piece)
    if whole.hexdigest() != entry.digest:
        raise CorruptFileError(f"{path} differs from its digest: bits changed since it was saved")
    if isinstance(entry, StateFileEntry):
        decode_state(buffer[:found], path, save, entry.rank)


def _spans(entry: FileEntry) -> Iterator[_Span]:
    """The spans of a file in order: its chunks, and the bytes before, between and after them."""
    end = 0
    chunks = entry.chunks if isinstance(entry, RowFileEntry) else ()
    for chunk in sorted(chunks, key=lambda chunk: chunk.offset):
        yield _Span(end, chunk.offset, None)
        end = chunk.offset + chunk.length
        yield _Span(chunk.offset, end, chunk)
    yield _Span(end, entry.num_bytes, None)


def check_tables(save: Manifest) -> None:
    """Refuse a save from which some table could not be fully loaded.

    Raises:
        CorruptFileError: a base lacks some rows of a table, or a row is in two files of the save.
    """
    for table_fqn, table in save.tables.items():
        check_cover(save, Extent.of_table(table_fqn, (table.rows, table.cols)))


def check_cover(save: Manifest, whole: Extent) -> None:
    """As `check_tables`, for a part of one table."""
    parts = [part for entry in save.rows_of(whole.table_fqn) if (part := entry.extent.overlap(whole))]
    rows = np.unique([extent.rows for extent in (whole, *parts)])
    cols = np.unique([extent.cols for extent in (whole, *parts)])
    counts = np.zeros((len(rows) - 1, len(cols) - 1), dtype=np.int32)
    for part in parts:
        cells = np.searchsorted(rows, part.rows), np.searchsorted(cols, part.cols)
        counts[slice(*cells[0]), slice(*cells[1])] += 1
    fewest = 1 if save.kind == "base" else 0
    for row, col in np.argwhere((counts < fewest) | (counts > 1))[:1]:
        where = (
            f"rows {rows[row]} to {rows[row + 1] - 1}, columns {cols[col]} to {cols[col + 1] - 1} of table "
            f"{whole.table_fqn}"
        )
        path = save.path
        if counts[row, col]:
            raise CorruptFileError(f"{path} has {where} in two files, and cannot say which is right")
        raise CorruptFileError(
            f"{path} is a base without {where}: the save is incomplete; load an older state, or save a new "
            "base with all workers"
        )
