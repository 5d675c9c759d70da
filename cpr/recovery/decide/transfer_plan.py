"""Plan of where every row of every new shard comes from.

Every rank makes the plan from the same lists, so that all know who sends which rows to whom, in which order.
A row whose columns are held by several workers (a table split by columns) is put together if all its columns
are left. If some are gone the row counts as lost, so that a row and its optimizer state stay of one moment.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

from cpr.extent import Extent, Interval, common, contains
from cpr.recovery.run.report import RowOrigin, ShardLoss


@dataclass(frozen=True, kw_only=True)
class Held:
    """A shard in surviving memory."""

    rank: int
    """Worker of the new generation that holds the shard."""
    index: int
    """Number of the shard among those of this worker."""
    extent: Extent
    step: int
    """Training steps that the old worker had finished."""
    generation: int
    """Generation that completed the memory."""


@dataclass(frozen=True, kw_only=True)
class Needed:
    """A shard of the new generation."""

    rank: int
    extent: Extent
    bytes_per_row: int
    adopted: bool = False
    """Whether the shard lives, unchanged, in memory that was taken over."""


@dataclass(frozen=True)
class Source:
    """Columns of a band in one held shard."""

    rank: int
    index: int
    cols: Interval
    """Columns of the table."""


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
class ShardSources:
    """Where the rows of one new shard come from."""

    needed: Needed
    bands: tuple[Band, ...]
    """Every row of the shard once, in order; empty where the shard is adopted."""

    @property
    def moved_rows(self) -> int:
        """Number of rows that are copied from held shards."""
        return sum(band.num_rows for band in self.bands if band.sources)

    @property
    def lost_rows(self) -> int:
        """Number of rows that no worker holds."""
        return sum(band.num_rows for band in self.bands if not band.sources)

    @property
    def lost_ranges(self) -> list[Interval]:
        """Row intervals that no worker holds."""
        return [band.rows for band in self.bands if not band.sources]

    @property
    def lost_bytes(self) -> int:
        """Bytes of lost rows, optimizer state included."""
        return self.lost_rows * self.needed.bytes_per_row


def plan_sources(needed: Sequence[Needed], held: Sequence[Held]) -> list[ShardSources]:
    """Find a source for every row, in the order of `needed`.

    Among several holders of a row, the newest generation wins, then the most steps, then the worker that
    needs the row, then the lowest rank. All holders must be of this run and this model; their order does not
    matter.
    """
    by_table: dict[str, list[Held]] = {}
    for each in held:
        by_table.setdefault(each.extent.table_fqn, []).append(each)
    return [_sources(each, by_table.get(each.extent.table_fqn, [])) for each in needed]


def lost_share(plan: Sequence[ShardSources]) -> float:
    """Share of the bytes of all shards that no worker holds; 0 without shards."""
    total = sum(each.needed.extent.num_rows * each.needed.bytes_per_row for each in plan)
    return sum(each.lost_bytes for each in plan) / total if total else 0.0


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
        key=lambda each: (-each.generation, -each.step, each.rank != needed.rank, each.rank, each.index),
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
            sources.append(Source(each.rank, each.index, found))
            still += [part for part in ((gap[0], found[0]), (found[1], gap[1])) if part[0] < part[1]]
        missing = still
        if not missing:
            return tuple(sorted(sources, key=lambda source: source.cols))
    return ()


def _joined(bands: Iterator[Band]) -> Iterator[Band]:
    """Join neighbours with the same sources."""
    for sources, alike in groupby(bands, key=lambda band: band.sources):
        group = list(alike)
        yield Band((group[0].rows[0], group[-1].rows[1]), sources)


def origins(plan: Sequence[ShardSources]) -> tuple[RowOrigin, ...]:
    """Count rows by origin, for each table."""
    counts: dict[str, list[int]] = {}
    for each in plan:
        extent = each.needed.extent
        count = counts.setdefault(extent.table_fqn, [0, 0, 0])
        count[0] += extent.num_rows if each.needed.adopted else 0
        count[1] += each.moved_rows
        count[2] += each.lost_rows
    return tuple(
        RowOrigin(table_fqn=name, adopted=adopted, moved=moved, lost=lost)
        for name, (adopted, moved, lost) in sorted(counts.items())
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
