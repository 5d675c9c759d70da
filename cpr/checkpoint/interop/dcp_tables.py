"""Finds tables and their optimizer states among the entries of a `torch.distributed.checkpoint` directory.

TorchRec calls the weights of a table `<fqn>.weight` and a state of its fused optimizer
`state.<fqn>.weight.<table>.<state>`; ordinary optimizers leave out `<table>.`. Both may lie under keys that
the user chose, such as `model` and `optimizer`.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import groupby
from typing import Final

from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorStorageMetadata

from cpr.checkpoint.format.manifest import ColumnEntry, TableEntry
from cpr.checkpoint.interop.dcp_directory import DcpDirectory
from cpr.extent import Extent, Interval

TABLE_PATTERNS: Final = ("*.embedding_bags.*.weight", "*.embeddings.*.weight")
"""Names of tables in TorchRec's `EmbeddingBagCollection` and `EmbeddingCollection`."""
FIRST_STATE: Final = "momentum1"
"""What TorchRec calls the first state of any fused optimizer."""


@dataclass(frozen=True)
class Block:
    """Rows of a table that lie one after the other in pieces of the same columns."""

    extent: Extent
    pieces: tuple[int, ...]
    """Rows of each piece."""


@dataclass(frozen=True, kw_only=True)
class DcpTable:
    """Where the columns of a table are in a directory."""

    fqn: str
    entry: TableEntry
    names: Mapping[str, str]
    """Names in the directory, by column."""
    blocks: tuple[Block, ...]
    counter_names: Sequence[str] = ()
    """Names in the directory of the counters in `entry`."""

    def state_offset(self, column: str, piece: Extent, directory: DcpDirectory) -> int:
        """What is to be added to a row to find its value of a column that has one number a row.

        Of a table that is split by columns TorchRec saves one such state after the other.
        """
        if directory.tensors[self.names[column]].size[0] == self.entry.rows:
            return 0
        splits = sorted({block.extent.col_offset for block in self.blocks})
        return splits.index(piece.col_offset) * self.entry.rows


def find_tables(directory: DcpDirectory, patterns: Sequence[str]) -> tuple[list[DcpTable], list[str]]:
    """Tables by the names of their weights, and the entries of their optimizers that cannot be used.

    Args:
        directory: where to look.
        patterns: shell patterns for names of 2-D entries; `*.` at the beginning also stands for nothing.

    Raises:
        ValueError: two tables have the same name.
    """
    named = [
        name
        for name, tensor in sorted(directory.tensors.items())
        if len(tensor.size) == 2 and any(_matches(name, pattern) for pattern in patterns)
    ]
    owners = {str(directory.path(name)[-1]): name for name in named}
    if len(owners) < len(named):
        twins = sorted(set(named) - set(owners.values()))
        raise ValueError(f"{twins[0]} has a namesake: choose the tables of one model with --tables")
    states: dict[str, dict[str, str]] = {name: {} for name in named}
    for name in sorted(directory.tensors):
        found = _state_of(name, owners)
        if found is not None:
            owner, state = found
            states[owner][state] = name
            states.pop(name, None)  # a pattern as wide as `*` names states, too
    tables, left_out = [], []
    for name, own_states in states.items():
        table, unused = _table(name, own_states, directory)
        tables.append(table)
        left_out += unused
    return tables, left_out


def _matches(name: str, pattern: str) -> bool:
    return fnmatchcase(name, pattern) or fnmatchcase(f".{name}", pattern)


def _state_of(name: str, owners: Mapping[str, str]) -> tuple[str, str] | None:
    """The table, and the state of its optimizer, that an entry belongs to; None if it is no such state."""
    dotted = f".{name}"
    parameters = [each for each in owners if f".{each}." in dotted]
    if not parameters:
        return None
    parameter = max(parameters, key=len)
    short_name = parameter.removesuffix(".weight").rpartition(".")[2]
    state = dotted.rpartition(f".{parameter}.")[2]
    return owners[parameter], state.removeprefix(f"{short_name}.")


def _table(name: str, states: Mapping[str, str], directory: DcpDirectory) -> tuple[DcpTable, list[str]]:
    weights = directory.tensors[name]
    rows, cols = weights.size
    fqn = str(directory.path(name)[-1]).removesuffix(".weight")
    blocks = blocks_of(fqn, weights)
    names, columns = {"weights": name}, {"weights": _column(weights, per_row=False)}
    counters: dict[str, int | float] = {}
    counter_names, left_out = [], []
    col_splits = len({block.extent.col_offset for block in blocks})
    row_splits = len({block.extent.row_offset for block in blocks})
    for state, entry_name in states.items():
        entry = directory.tensors[entry_name]
        per_row = [(rows,), (rows, 1)] + ([(rows * col_splits,)] if row_splits == 1 else [])
        size = tuple(entry.size)
        if size == (rows, cols) or size in per_row:
            column = _state_name(state, states)
            names[column], columns[column] = entry_name, _column(entry, per_row=size != (rows, cols))
        elif entry.size.numel() in {1, len(weights.chunks)}:  # one number a table, or a piece of it
            counters[state] = directory.read(entry_name).reshape(-1)[0].item()
            counter_names.append(entry_name)
        else:
            left_out.append(entry_name)
    table = DcpTable(
        fqn=fqn,
        entry=TableEntry(rows=rows, cols=cols, columns=columns, counters=counters),
        names=names,
        blocks=blocks,
        counter_names=counter_names,
    )
    return table, left_out


def _column(tensor: TensorStorageMetadata, per_row: bool) -> ColumnEntry:
    return ColumnEntry(dtype=str(tensor.properties.dtype).removeprefix("torch."), per_row=per_row)


def _state_name(state: str, all_states: Mapping[str, str]) -> str:
    """PyTorch's name of a state; TorchRec calls the first one `momentum1` whatever it is."""
    if state != FIRST_STATE:
        return state
    return "exp_avg" if "exp_avg_sq" in all_states else "sum"


def blocks_of(table_fqn: str, tensor: TensorStorageMetadata) -> tuple[Block, ...]:
    """The pieces of a tensor `[rows, cols]` as few blocks."""
    rows, cols = tensor.size
    table = Extent.of_table(table_fqn, (rows, cols))
    return tuple(_blocks(table, tensor.chunks))


def _blocks(table: Extent, pieces: Sequence[ChunkStorageMetadata]) -> Iterator[Block]:
    def columns(piece: ChunkStorageMetadata) -> Interval:
        return piece.offsets[1], piece.offsets[1] + piece.sizes[1]

    in_order = sorted(pieces, key=lambda piece: (columns(piece), piece.offsets[0]))
    for cols, group in groupby(in_order, key=columns):
        run: list[ChunkStorageMetadata] = []
        for piece in group:
            if run and run[-1].offsets[0] + run[-1].sizes[0] != piece.offsets[0]:
                yield _block(table, run, cols)
                run = []
            run.append(piece)
        yield _block(table, run, cols)


def _block(table: Extent, run: Sequence[ChunkStorageMetadata], cols: Interval) -> Block:
    rows = run[0].offsets[0], run[-1].offsets[0] + run[-1].sizes[0]
    return Block(table.narrowed(rows, cols), tuple(piece.sizes[0] for piece in run))
