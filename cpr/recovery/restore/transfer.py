"""Transfer of rows from surviving memory into new shards: the plan, and its execution in bounded messages.

Every rank makes the plan from the same lists. All walk through it in the same order, and each takes part
where it is the source or the target, so that no two wait for each other.

A row whose columns are held by several workers (a table split by columns) is put together if all its columns
are left. If some are gone the row counts as lost, so that a row and its optimizer state stay of one moment.
Rows in a mirror of chosen rows (`mirror.rows`) lie anywhere in a shard. The others of such a shard come from
the checkpoint: so the whole shard does, and the mirrored rows are put over it.

Optimizer state with one number a row follows the same rules as when it comes from a checkpoint
(`cpr.checkpoint.load.shard_loader`).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from typing import Final

import torch
from torch import Tensor

from cpr.checkpoint.collectives import RankGroup
from cpr.checkpoint.format.row_file import RowBatch
from cpr.checkpoint.load.shard_loader import Target
from cpr.extent import Extent, Interval, common, contains
from cpr.mirror.pieces import NUMBERS
from cpr.recovery.decide.assessment import Held, Needed
from cpr.recovery.decide.inventory import ChosenSlots
from cpr.recovery.run.report import RowOrigin, ShardLoss
from cpr.shards.shard import TableShard, bytes_per_row

MESSAGE_BYTES: Final = 4 * 2**20
"""Largest message, unless a single row is larger: fits in a processor's cache, with what it is copied to."""
Columns = Mapping[str, Tensor]


@dataclass(frozen=True)
class Source:
    """Columns of a band in one held shard."""

    rank: int
    index: int
    cols: Interval
    """Columns of the table."""
    is_mirror: bool = False
    """Whether the shard is in a mirror."""


@dataclass(frozen=True)
class Band:
    """Rows of a new shard that come from the same held shards."""

    rows: Interval
    """Rows of the table."""
    sources: tuple[Source, ...]
    """Every column of the shard once, in order; empty: the rows are lost."""

    @property
    def num_rows(self) -> int:
        """Number of rows."""
        return self.rows[1] - self.rows[0]


@dataclass(frozen=True)
class ChosenSource:
    """A mirror of chosen rows of which some are needed."""

    rank: int
    index: int
    num_rows: int
    """Needed rows in it."""


@dataclass(frozen=True)
class ShardSources:
    """Where the rows of one new shard come from."""

    needed: Needed
    bands: tuple[Band, ...]
    """Every row of the shard once, in order; empty where the shard is adopted."""
    chosen: tuple[ChosenSource, ...] = ()
    """Mirrors that hold some of the rows in bands without sources, each row once at most."""

    @property
    def moved_rows(self) -> int:
        """Number of rows that are copied from held shards."""
        return sum(band.num_rows for band in self.bands if band.sources) + self.chosen_rows

    @property
    def mirrored_rows(self) -> int:
        """Number of rows that are copied, some of their columns at least, from mirrors."""
        bands = [band for band in self.bands if any(each.is_mirror for each in band.sources)]
        return sum(band.num_rows for band in bands) + self.chosen_rows

    @property
    def chosen_rows(self) -> int:
        """Number of rows that are copied from mirrors of chosen rows."""
        return sum(each.num_rows for each in self.chosen)

    @property
    def lost_rows(self) -> int:
        """Number of rows that no worker holds."""
        return sum(end - begin for begin, end in self.lost_ranges) - self.chosen_rows

    @property
    def lost_ranges(self) -> list[Interval]:
        """Row intervals that no worker holds, except for rows that `chosen` has."""
        return [band.rows for band in self.bands if not band.sources]

    @property
    def lost_bytes(self) -> int:
        """Bytes of lost rows, optimizer state included."""
        return self.lost_rows * self.needed.bytes_per_row


def plan_sources(needed: Sequence[Needed], held: Sequence[Held]) -> list[ShardSources]:
    """Find a source for every row, in the order of `needed`.

    Among several holders of a row, live memory wins over mirrors, then the newest generation, then the most
    steps, then the worker that needs the row, then the lowest rank. All holders must be of this run and this
    model; their order does not matter.
    """
    by_table: dict[str, list[Held]] = {}
    for each in held:
        by_table.setdefault(each.extent.table_fqn, []).append(each)
    return [_sources(each, by_table.get(each.extent.table_fqn, [])) for each in needed]


def with_chosen(
    group: RankGroup,
    plan: Sequence[ShardSources],
    held: Sequence[Held],
    slots: Mapping[int, ChosenSlots],
) -> Sequence[ShardSources]:
    """Add mirrors of chosen rows to a plan; all ranks call it, and get the same.

    A mirror is used for shards with the same columns of the table.

    Args:
        group: all ranks.
        plan: from `plan_sources`.
        held: mirrors of chosen rows, the same on all ranks.
        slots: of those that this rank holds, by `Held.index`.
    """
    if not held:
        return plan
    found = [
        (number, ChosenSource(each.rank, each.index, num_rows))
        for number, sources in enumerate(plan)
        for each in held
        if each.rank == group.rank and _has_columns(each.extent, sources.needed.extent)
        if (num_rows := int(_chosen_in(slots[each.index], sources.lost_ranges).sum()))
    ]
    by_number: dict[int, list[ChosenSource]] = {}
    for number, source in (pair for pairs in group.gather(found) for pair in pairs):
        by_number.setdefault(number, []).append(source)
    return [replace(sources, chosen=tuple(by_number.get(number, ()))) for number, sources in enumerate(plan)]


def _has_columns(held: Extent, needed: Extent) -> bool:
    return (held.table_fqn, held.table_shape, held.cols) == (
        needed.table_fqn,
        needed.table_shape,
        needed.cols,
    )


def _chosen_in(slots: ChosenSlots, ranges: Sequence[Interval]) -> Tensor:
    """Which of the rows of a mirror lie in some intervals: bool `[n]`."""
    is_in = torch.zeros(slots.rows.numel(), dtype=torch.bool)
    for interval in ranges:
        begin, end = torch.searchsorted(slots.rows, torch.tensor(interval)).tolist()
        is_in[begin:end] = True
    return is_in


def lost_share(plan: Sequence[ShardSources], *, with_mirrored: bool = False) -> float:
    """Share of the bytes of all shards that no worker holds, or holds only in a mirror; 0 without shards."""
    total = sum(each.needed.extent.num_rows * each.needed.bytes_per_row for each in plan)
    mirrored = sum(each.mirrored_rows * each.needed.bytes_per_row for each in plan if with_mirrored)
    return (sum(each.lost_bytes for each in plan) + mirrored) / total if total else 0.0


def lost_share_by_rank(plan: Sequence[ShardSources]) -> dict[int, float]:
    """Share of its own shards' bytes that each rank lost; ranks that lost nothing are absent."""
    by_rank: dict[int, list[ShardSources]] = {}
    for each in plan:
        by_rank.setdefault(each.needed.rank, []).append(each)
    shares = {rank: lost_share(group) for rank, group in by_rank.items()}
    return {rank: share for rank, share in shares.items() if share}


def _sources(needed: Needed, held: Sequence[Held]) -> ShardSources:
    if needed.adopted:
        return ShardSources(needed, ())
    extent = needed.extent
    candidates = sorted(
        (each for each in held if each.extent.table_shape == extent.table_shape),
        key=lambda each: (
            *(each.is_mirror, -each.generation, -each.step),
            *(each.rank != needed.rank, each.rank, each.index),
        ),
    )
    rows, cols = extent.rows, extent.cols
    edges = {
        edge
        for each in candidates
        for edge in each.extent.rows
        if rows[0] < edge < rows[1] and common(each.extent.cols, cols)
    }
    bands = (
        Band(interval, _columns_of(interval, cols, candidates))
        for interval in pairwise(sorted({*rows, *edges}))
    )
    return ShardSources(needed, tuple(_joined(bands)))


def _columns_of(rows: Interval, cols: Interval, candidates: Sequence[Held]) -> tuple[Source, ...]:
    """Which shard gives which columns of these rows; empty if some column is gone.

    Each candidate holds all of these rows or none, because bands end at the edges of candidates.
    """
    missing = [cols]
    sources: list[Source] = []
    for each in candidates:
        if not contains(each.extent.rows, rows):
            continue
        still: list[Interval] = []
        for gap in missing:
            found = common(gap, each.extent.cols)
            if found is None:
                still.append(gap)
                continue
            sources.append(Source(each.rank, each.index, found, each.is_mirror))
            still += [part for part in ((gap[0], found[0]), (found[1], gap[1])) if part[0] < part[1]]
        missing = still
        if not missing:
            return tuple(sorted(sources, key=lambda source: source.cols))
    return ()


def _joined(bands: Iterator[Band]) -> Iterator[Band]:
    """Merge adjacent bands of rows that have the same sources."""
    for sources, alike in groupby(bands, key=lambda band: band.sources):
        group = list(alike)
        yield Band((group[0].rows[0], group[-1].rows[1]), sources)


def origins(plan: Sequence[ShardSources]) -> tuple[RowOrigin, ...]:
    """Count, for each table, the rows that stay in place, or come from memory, mirrors or the checkpoint."""
    counts: dict[str, list[int]] = {}
    for each in plan:
        extent = each.needed.extent
        count = counts.setdefault(extent.table_fqn, [0, 0, 0, 0])
        count[0] += extent.num_rows if each.needed.adopted else 0
        count[1] += each.moved_rows - each.mirrored_rows
        count[2] += each.mirrored_rows
        count[3] += each.lost_rows
    return tuple(
        RowOrigin(table_fqn=name, adopted=adopted, moved=moved, mirrored=mirrored, lost=lost)
        for name, (adopted, moved, mirrored, lost) in sorted(counts.items())
    )


def losses(
    plan: Sequence[ShardSources], samples: int, pls: float | None, expected: float | None
) -> tuple[ShardLoss, ...]:
    """Divide the cost of a failure among the shards that lost rows."""
    lost_bytes = sum(each.lost_bytes for each in plan)
    return tuple(
        ShardLoss(
            rank=each.needed.rank,
            table_fqn=each.needed.extent.table_fqn,
            num_rows=each.lost_rows,
            samples=samples,
            pls=None if pls is None else pls * each.lost_bytes / lost_bytes,
            pls_expected=None if expected is None else expected * each.lost_bytes / lost_bytes,
        )
        for each in plan
        if each.lost_rows
    )


class RowTransfer:
    """This rank's part in a transfer plan.

    Args:
        group: all ranks.
        shards: of this rank in the new model.
        held: columns of what this rank holds, `[num_rows, ...]` on the CPU, in the order of `Held.index`.
        extents: of `held`.
        slots: of those that hold only chosen rows, by number.
    """

    def __init__(
        self,
        group: RankGroup,
        shards: Sequence[TableShard],
        held: Sequence[Columns],
        extents: Sequence[Extent],
        slots: Mapping[int, ChosenSlots],
    ) -> None:
        self._group, self._slots = group, slots
        self._shards = {shard.extent: shard for shard in shards}
        self._held = list(zip(held, extents, strict=True))
        self._bytes = 0
        self._message = torch.empty(0, dtype=torch.uint8)
        """One for all, as the first touch of memory takes longer than to send it."""

    @torch.no_grad()
    def move(self, plan: Sequence[ShardSources]) -> int:
        """Carry out a plan, the same on all ranks; returns the bytes copied into shards of this rank."""
        for sources in plan:
            extent = sources.needed.extent
            mine = None
            if sources.needed.rank == self._group.rank:
                mine = self._shards[extent]
                mine.flush()
            for band in sources.bands:
                if band.sources:
                    self._move_band(sources.needed.rank, mine, extent, band)
            if mine is not None:
                mine.invalidate()
        return self._bytes

    @torch.no_grad()
    def move_chosen(self, plan: Sequence[ShardSources]) -> int:
        """Put rows from mirrors of chosen rows over those of the checkpoint; returns as `move`."""
        for sources in plan:
            extent = sources.needed.extent
            mine = self._shards[extent] if sources.needed.rank == self._group.rank else None
            if mine is not None and sources.chosen:
                mine.flush()
            target = Target(mine, [extent]) if mine is not None else None
            for source in sources.chosen:
                self._move_chosen(source, sources, target)
            if mine is not None and sources.chosen:
                mine.invalidate()
        return self._bytes

    def _move_chosen(self, source: ChosenSource, sources: ShardSources, target: Target | None) -> None:
        extent = sources.needed.extent
        if source.rank == self._group.rank:
            slots, (held, _) = self._slots[source.index], self._held[source.index]
            is_in = _chosen_in(slots, sources.lost_ranges)
            rows, places = slots.rows[is_in], slots.slots[is_in]
            for begin, end in _blocks((0, source.num_rows), 8 + _row_bytes(held)):
                columns = {name: column[places[begin:end]] for name, column in held.items()}
                if target is not None:
                    self._lay(target, extent, rows[begin:end], columns)
                else:
                    self._group.send(self._packed({NUMBERS: rows[begin:end], **columns}), sources.needed.rank)
        elif target is not None:
            like = {NUMBERS: torch.empty(0, dtype=torch.int64), **target.shard.columns}
            for begin, end in _blocks((0, source.num_rows), _row_bytes(like)):
                columns = self._received(like, end - begin, source.rank)
                self._lay(target, extent, columns.pop(NUMBERS), columns)

    def _move_band(self, rank: int, mine: TableShard | None, extent: Extent, band: Band) -> None:
        parts = [extent.narrowed(band.rows, source.cols) for source in band.sources]
        target = Target(mine.narrow(*band.rows), parts) if mine is not None else None
        for source, part in zip(band.sources, parts, strict=True):
            if source.rank == rank:
                if target is not None:
                    self._lay(target, part, band.rows[0], self._columns(source, band.rows))
            elif target is not None:
                self._receive(target, source, part)
            elif source.rank == self._group.rank:
                self._send(rank, source, band.rows)
        if target is not None:
            target.finish()

    def _send(self, rank: int, source: Source, rows: Interval) -> None:
        for block in _blocks(rows, _row_bytes(self._columns(source, rows))):
            self._group.send(self._packed(self._columns(source, block)), rank)

    def _receive(self, target: Target, source: Source, part: Extent) -> None:
        like = {
            name: column[:, : part.num_cols] if column.dim() == 2 else column
            for name, column in target.shard.columns.items()
        }
        for begin, end in _blocks(part.rows, _row_bytes(like)):
            self._lay(target, part, begin, self._received(like, end - begin, source.rank))

    def _received(self, like: Columns, num_rows: int, rank: int) -> dict[str, Tensor]:
        """Receive so many rows of columns like these; they are valid until the next message."""
        data = self._room(num_rows * _row_bytes(like))
        self._group.receive(data, rank)
        columns, first = {}, 0
        for name, column in sorted(like.items()):
            last = first + num_rows * bytes_per_row(column)
            flat = data[first:last]
            if first % column.element_size():
                flat = flat.clone()  # aligned
            columns[name] = flat.view(column.dtype).view(num_rows, *column.shape[1:])
            first = last
        return columns

    def _packed(self, columns: Columns) -> Tensor:
        """Rows as a message, valid until the next one."""
        parts = [columns[name].contiguous().view(-1).view(torch.uint8) for name in sorted(columns)]
        data = self._room(sum(part.numel() for part in parts))
        torch.cat(parts, out=data)
        return data

    def _room(self, num_bytes: int) -> Tensor:
        """Memory of a message, uint8 `[num_bytes]`."""
        if self._message.numel() < num_bytes:
            self._message = torch.empty(num_bytes, dtype=torch.uint8)
        return self._message[:num_bytes]

    def _lay(self, target: Target, part: Extent, rows: int | Tensor, columns: Columns) -> None:
        """Write rows, by the first of them or by their ids."""
        first, ids = (rows, None) if isinstance(rows, int) else (int(rows[0]), rows)
        target.write(RowBatch(first, ids, dict(columns)), part)
        self._bytes += sum(column.nbytes for column in columns.values())

    def _columns(self, source: Source, rows: Interval) -> Columns:
        """Views of what this rank holds."""
        held, extent = self._held[source.index]
        here = slice(rows[0] - extent.row_offset, rows[1] - extent.row_offset)
        cols = slice(source.cols[0] - extent.col_offset, source.cols[1] - extent.col_offset)
        return {
            name: column[here, cols] if column.dim() == 2 else column[here] for name, column in held.items()
        }


def _row_bytes(columns: Columns) -> int:
    return sum(bytes_per_row(column) for column in columns.values())


def _blocks(rows: Interval, row_bytes: int) -> Iterator[Interval]:
    step = max(1, MESSAGE_BYTES // row_bytes)
    for begin in range(rows[0], rows[1], step):
        yield begin, min(begin + step, rows[1])
