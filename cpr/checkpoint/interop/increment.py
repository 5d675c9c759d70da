"""Writes an increment: the rows that differ between two states of a run, for a follower of the older one.

A follower is a program, such as a server of predictions, that keeps the tables of a model and wants what has
changed since its copy. Rows of a dynamic table are known by their ids, those of other tables by their number.
Ids that a dynamic table no longer has are tombstones: the follower deletes them.

Both states are read, and their rows are compared bit for bit, because row saves alone do not tell enough: a
full save in between does not say which rows it has changed, and an id may have moved to a row that no row
save has held yet. Where only row saves lie between the states, also behind compactions, windows of rows that
none of them holds are not read.
"""

import json
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from cpr.checkpoint.catalog.chain import State
from cpr.checkpoint.format.manifest import ROW, Manifest
from cpr.checkpoint.interop.full_model import FullModel
from cpr.checkpoint.interop.to_parquet import ROW_FIELD, as_table, field_of, write_parts
from cpr.checkpoint.storage.base import Storage
from cpr.checkpoint.storage.local import sync_folder
from cpr.shards.row_ids import CANDIDATE, ID, LAST_SEEN, SIGHTINGS, is_dynamic, rows_of_ids

INCREMENT_FILE: Final = "cpr-increment.json"
"""JSON file of an increment with both steps and the counts of each table."""
INCREMENT_FORMAT: Final = "cpr-increment"
INCREMENT_VERSION: Final = 1
ROWS_FOLDER: Final = "rows"
TOMBSTONES_FOLDER: Final = "tombstones"
GROUP_IDS: Final = 2**20
"""Tombstones in a row group."""
_TOMBSTONES: Final = pa.schema([pa.field(ID, pa.int64(), nullable=False)])


@dataclass(frozen=True, kw_only=True)
class TableIncrement:
    """What an increment has of one table."""

    key: str
    """Column that a follower knows rows by: `id` for a dynamic table, else `row`."""
    rows: int
    """Rows to insert, or to replace whole."""
    tombstones: int
    """Ids to delete."""


def write_increment(
    storage: Storage,
    olders: Sequence[State],
    newer: State,
    states: Sequence[State],
    folder: Path,
    progress: Callable[[int], object],
    start: Callable[[int], object],
) -> Mapping[str, TableIncrement]:
    """Write what a follower that has one of `olders` needs to have `newer`.

    For each table, `rows/TABLE/` has the rows of `newer` that differ from an older state or are not in it,
    each once; for each dynamic table, `tombstones/TABLE/` has the ids that only an older state has. No id is
    in both. The memory is that of an export, and some 120 bytes for each row of the largest dynamic table.

    Args:
        storage: the checkpoint directory.
        olders: states that the follower may have, usually one: all of a training step.
        newer: state to arrive at.
        states: all states of the directory.
        folder: empty folder to write to.
        progress: called with the bytes of table rows compared since the last call.
        start: called with the total bytes of table rows.

    Returns:
        What was written, by fully qualified name of the table.

    Raises:
        ValueError: the tables of the states differ.
        CorruptFileError: one of the states is damaged.
    """
    for older in olders:
        _check_tables(older, newer)
    befores, after = [FullModel(storage, older) for older in olders], FullModel(storage, newer)
    start(after.num_bytes * len(befores))
    saves = [_saves_between(older, newer, states) for older in olders]
    written = {}
    for table_fqn in after.tables:
        starts = after.starts(table_fqn)
        compared = [
            _difference(before, after, table_fqn, _windows_of(between, table_fqn, starts), progress)
            for before, between in zip(befores, saves, strict=True)
        ]
        rows, gone = (torch.unique(torch.cat(each)) for each in zip(*compared, strict=True))
        schema = _schema(after, table_fqn)
        write_parts(folder / ROWS_FOLDER / table_fqn, schema, _chosen(after, table_fqn, rows, schema))
        key = schema.names[0]
        if key == ID:
            begins = range(0, len(gone), GROUP_IDS)
            groups = (as_table({ID: gone[begin : begin + GROUP_IDS]}, _TOMBSTONES) for begin in begins)
            write_parts(folder / TOMBSTONES_FOLDER / table_fqn, _TOMBSTONES, groups)
        written[table_fqn] = TableIncrement(key=key, rows=len(rows), tombstones=len(gone))
    _write_manifest(folder, olders, newer, written)
    return written


def _check_tables(older: State, newer: State) -> None:
    here, there = (
        {fqn: replace(table, counters={}) for fqn, table in state.newest.tables.items()}
        for state in (older, newer)
    )
    if changed := sorted(fqn for fqn in here.keys() | there.keys() if here.get(fqn) != there.get(fqn)):
        raise ValueError(
            f"{', '.join(changed)} changed in size or columns, or came or went, between steps {older.step} "
            f"and {newer.step}, which no increment can tell: make a full export, without --since"
        )


def _saves_between(older: State, newer: State, states: Sequence[State]) -> list[Manifest] | None:
    """The row saves that lead from one state to the other; None if a full save lies between them.

    The row saves that were merged into a base of `newer` count, while they are there.
    """
    known = {save.sequence: save for state in states for save in state.saves}
    path = list(newer.saves)
    later: list[Manifest] = []
    while older.sequence not in (save.sequence for save in path):
        base, *rest = path
        later = [*rest, *later]
        if not base.merged or not known.keys() >= set(base.merged):
            return None
        path = [known[sequence] for sequence in base.merged]
    at = [save.sequence for save in path].index(older.sequence)
    return [*path[at + 1 :], *later]


def _windows_of(saves: Sequence[Manifest] | None, table_fqn: str, starts: range) -> Collection[int]:
    """First rows of the windows with rows that the saves may hold; None: of all windows."""
    step = starts.step
    if saves is None:
        return starts
    return {
        place * step
        for save in saves
        for entry in save.rows_of(table_fqn)
        for chunk in entry.chunks
        for place in range(chunk.first_row // step, chunk.last_row // step + 1)
    }


def _difference(
    before: FullModel,
    after: FullModel,
    table_fqn: str,
    touched: Collection[int],
    progress: Callable[[int], object],
) -> tuple[Tensor, Tensor]:
    """Rows of `after` to write, and ids to delete from a dynamic table, int64.

    `touched` are the first rows of the windows that may differ.
    """
    columns = {column.name: column for column in after.tables[table_fqn]}
    compared = columns.keys() - {CANDIDATE, SIGHTINGS}  # which do not belong to the id of their row
    num_rows, row_bytes = columns["weights"].shape[0], sum(each.bytes_per_row for each in columns.values())
    has_ids, starts = is_dynamic(columns), after.starts(table_fqn)
    differs = torch.zeros(num_rows, dtype=torch.bool)
    holders = (ID, LAST_SEEN) if has_ids else ()
    olds, news = ({name: torch.empty(num_rows, dtype=columns[name].dtype) for name in holders} for _ in "ab")
    for first_row in starts:
        is_touched = first_row in touched
        here = slice(first_row, min(first_row + starts.step, num_rows))
        if is_touched or has_ids:
            old = before.window(table_fqn, first_row)
            new = after.window(table_fqn, first_row) if is_touched else old
            differs[here] = _differ(old, new, compared)
            for name in holders:
                olds[name][here], news[name][here] = old[name], new[name]
        progress((here.stop - here.start) * row_bytes)
    if not has_ids:
        return differs.nonzero().squeeze(1), torch.empty(0, dtype=torch.int64)
    held_before, held_after = (rows_of_ids(each[ID], each[LAST_SEEN]) for each in (olds, news))
    same = torch.zeros(num_rows, dtype=torch.bool)  # rows that hold the same id, with the same values
    same[held_before] = ~differs[held_before]
    gone = np.setdiff1d(olds[ID][held_before].numpy(), news[ID][held_after].numpy(), assume_unique=True)
    return held_after[~same[held_after]], torch.from_numpy(gone)


def _differ(old: Mapping[str, Tensor], new: Mapping[str, Tensor], names: Collection[str]) -> Tensor:
    """Whether each row differs in a bit, bool `[n]`: NaN equals itself, and 0 is not -0."""
    rows = [(_bits(old[name]), _bits(new[name])) for name in names]
    return torch.stack([(one != other).any(1) for one, other in rows]).any(0)


def _bits(column: Tensor) -> Tensor:
    return column.reshape(len(column), -1).view(torch.uint8)


def _schema(model: FullModel, table_fqn: str) -> pa.Schema:
    """The key first; rows of ids without their number, which is of no use outside of training."""
    fields = {column.name: field_of(column) for column in model.tables[table_fqn]}
    if not is_dynamic(fields):
        return pa.schema([ROW_FIELD, *fields.values()])
    rest = [field for name, field in fields.items() if name not in (ID, CANDIDATE, SIGHTINGS)]
    return pa.schema([fields[ID], *rest])


def _chosen(model: FullModel, table_fqn: str, rows: Tensor, schema: pa.Schema) -> Iterator[pa.Table]:
    """Row groups with some rows, ascending, of a table."""
    starts = model.starts(table_fqn)
    bounds = torch.searchsorted(rows, torch.tensor([*starts, starts.stop])).tolist()
    for first_row, begin, end in zip(starts, bounds, bounds[1:], strict=False):
        if begin < end:
            window, some = model.window(table_fqn, first_row), rows[begin:end]
            columns = {name: values[some - first_row] for name, values in window.items()}
            yield as_table({ROW: some, **columns}, schema)


def _write_manifest(
    folder: Path, olders: Sequence[State], newer: State, written: Mapping[str, TableIncrement]
) -> None:
    # a merged base has the rows of the newest save that it was made from
    sequences = {sequence for each in olders for sequence in (each.sequence, *each.newest.merged[-1:])}
    manifest = {
        "format": INCREMENT_FORMAT,
        "version": INCREMENT_VERSION,
        "run_id": newer.newest.run_id,
        "since": {"step": olders[0].step, "sequences": sorted(sequences)},
        "to": {"step": newer.step, "sequence": newer.sequence, "created": newer.newest.created},
        "tables": {fqn: asdict(table) for fqn, table in written.items()},
    }
    with (folder / INCREMENT_FILE).open("w") as file:
        json.dump(manifest, file, indent=1)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    sync_folder(folder)
