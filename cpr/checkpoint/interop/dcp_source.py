"""Sorts what a directory of `torch.distributed.checkpoint` holds: tables, dense tensors, everything else.

An export of ours says itself what is what. In other directories tables are found by name, the tensors beside
them in the same state dict are dense ones, and the rest stays what it was, under its first key.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cpr.checkpoint.format.manifest import ColumnEntry, TableEntry
from cpr.checkpoint.interop.dcp_directory import DcpDirectory
from cpr.checkpoint.interop.dcp_tables import TABLE_PATTERNS, DcpTable, blocks_of, find_tables
from cpr.checkpoint.interop.full_model import NOTES_FILE, NOTES_FORMAT, NOTES_VERSION, table_columns
from cpr.checkpoint.interop.json_tree import flat_name, from_notes
from cpr.errors import CorruptFileError, MismatchError


@dataclass(frozen=True, kw_only=True)
class DcpSource:
    """What is to be imported."""

    directory: DcpDirectory
    tables: Sequence[DcpTable]
    step: int
    world_size: int
    trees: Mapping[int | None, Any]
    """State beside the tables by rank; None: the same for all ranks."""
    left_out: Sequence[str] = ()
    """Entries that have no place in a checkpoint."""

    @property
    def num_bytes(self) -> int:
        """Of all tables."""
        columns = [column for table in self.tables for column in table_columns(table.fqn, table.entry)]
        return sum(column.shape[0] * column.bytes_per_row for column in columns)


def open_source(folder: Path, patterns: Sequence[str] | None, step: int | None) -> DcpSource:
    """Look into a directory.

    Args:
        folder: that `torch.distributed.checkpoint.save` or `cpr export --to dcp` has written.
        patterns: shell patterns of the names of tables; None: what an export says, else TorchRec's names.
        step: training steps done; None: what an export says, else 0.

    Raises:
        ValueError: no tables are found, or they are of more than one model.
        CheckpointError: it cannot be read.
    """
    directory = DcpDirectory(folder)
    notes = folder / NOTES_FILE
    if patterns is None and notes.exists():
        return _exported(directory, notes, step)
    return _foreign(directory, patterns or TABLE_PATTERNS, step or 0)


def _exported(directory: DcpDirectory, path: Path, step: int | None) -> DcpSource:
    try:
        notes = json.loads(path.read_bytes())
        if (notes["format"], notes["version"]) != (NOTES_FORMAT, NOTES_VERSION):
            raise MismatchError(
                f"{path} is of format {notes['format']} {notes['version']}, which is not known here"
            )
        tables = [_exported_table(directory, fqn, entry) for fqn, entry in notes["tables"].items()]
        in_tables = {name for table in tables for name in table.names.values()}
        tensors = {name: directory.read(name) for name in directory.tensors if name not in in_tables}
        trees = {_rank(name): from_notes(tree, tensors) for name, tree in notes["state"].items()}
        source_step = notes["step"] if step is None else step
        if None in trees:
            trees[None] = {**trees[None], "steps_done": source_step}
        return DcpSource(
            directory=directory,
            tables=tables,
            step=source_step,
            world_size=notes["world_size"],
            trees=trees,
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CorruptFileError(f"{path} does not describe the export that it lies in ({error!r})") from error


def _rank(name: str) -> int | None:
    return None if name == "common" else int(name.removeprefix("rank"))


def _exported_table(directory: DcpDirectory, fqn: str, entry: Mapping[str, Any]) -> DcpTable:
    columns = {name: ColumnEntry(**column) for name, column in entry["columns"].items()}
    table = TableEntry(**{**entry, "columns": columns})
    names = {column.name: flat_name(column.path) for column in table_columns(fqn, table)}
    blocks = blocks_of(fqn, directory.tensors[names["weights"]])
    return DcpTable(fqn=fqn, entry=table, names=names, blocks=blocks)


def _foreign(directory: DcpDirectory, patterns: Sequence[str], step: int) -> DcpSource:
    tables, left_out = find_tables(directory, patterns)
    if not tables:
        some = ", ".join(sorted(directory.tensors)[:5]) or "nothing"
        raise ValueError(
            f"no table is called {' or '.join(patterns)}; there are {some}. Name them with --tables"
        )
    used = {name for table in tables for name in table.names.values()} | set(left_out)
    used |= {name for table in tables for name in table.counter_names}
    tree, unread = _rest(
        directory, sorted({*directory.tensors, *directory.values} - used), _home(directory, tables)
    )
    return DcpSource(
        directory=directory,
        tables=tables,
        step=step,
        world_size=1,
        trees={None: {"steps_done": step, **tree}},
        left_out=[*left_out, *unread],
    )


def _home(directory: DcpDirectory, tables: Iterable[DcpTable]) -> tuple[str | int, ...]:
    """Where the state dict of the model is in the nested state that was saved."""
    homes = sorted({directory.path(table.names["weights"])[:-1] for table in tables})
    if len(homes) > 1:
        raise ValueError(
            f"tables lie under {homes[0]} and {homes[1]}: choose those of one model with --tables"
        )
    return homes[0]


def _rest(
    directory: DcpDirectory, names: Iterable[str], home: tuple[str | int, ...]
) -> tuple[dict[str, Any], list[str]]:
    """Dense tensors and all other state; names of what cannot be read or has no place."""
    dense: dict[str, Any] = {}
    registered: dict[str | int, Any] = {}
    left_out = []
    for name in names:
        path = directory.path(name)
        if path[:-1] == home:
            if name in directory.tensors:
                dense[str(path[-1])] = directory.read(name)
            else:
                left_out.append(name)
            continue
        try:
            value = directory.read(name) if name in directory.tensors else directory.read_value(name)
        except CorruptFileError:
            if name in directory.tensors:
                raise
            left_out.append(name)  # an object of some class, which only its own program can read
            continue
        _put(registered, path, value)
    return {
        "dense": dense,
        "registered": {str(key): _lists(each) for key, each in registered.items()},
    }, left_out


def _put(tree: dict[str | int, Any], path: tuple[str | int, ...], value: Any) -> None:
    for key in path[:-1]:
        tree = tree.setdefault(key, {})
    tree[path[-1]] = value


def _lists(tree: Any) -> Any:
    """Nested dicts with those that number their values as lists again."""
    if not isinstance(tree, dict):
        return tree
    values = {key: _lists(value) for key, value in tree.items()}
    if values and all(isinstance(key, int) for key in values) and sorted(values) == list(range(len(values))):
        return [values[at] for at in range(len(values))]
    return values
