"""Where every row of every new shard comes from: a plan, from what is held and what is needed.

The plan is made by every rank from the same lists, so that all know who sends what to whom, in which order.
A row that is held in pieces (a table that was split by columns) is put together from them, if all are there;
a row of which some columns are gone counts as lost, so that a row and its optimizer state stay of one moment.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

from cpr.extent import Extent, Interval, common, contains
from cpr.recovery.run.report import RowOrigin, ShardLoss


@dataclass(frozen=True, kw_only=True)
class Held:
    """A shard in memory that outlived its worker."""

    rank: int
    """Which worker of the new generation holds it."""
    index: int
    """Its number among what that worker holds."""
    extent: Extent
    step: int
    """Training steps that its worker had finished."""
    generation: int
    """In which the memory was completed."""


@dataclass(frozen=True, kw_only=True)
class Needed:
    """A shard of the new generation."""

    rank: int
    extent: Extent
    bytes_per_row: int
    adopted: bool = False
    """It lives in memory that was taken over as it is."""


@dataclass(frozen=True)
class Piece:
    """Columns of a band, in one shard that somebody holds."""

    rank: int
    index: int
    cols: Interval
    """Of the table."""


@dataclass(frozen=True)
class Band:
    """Rows of a new shard that come from the same place."""

    rows: Interval
    """Of the table."""
    pieces: tuple[Piece, ...]
    """Every column of the shard once, in order; none: the rows are lost."""

    @property
    def num_rows(self) -> int:
        """Rows in it."""
        return self.rows[1] - self.rows[0]


@dataclass(frozen=True)
class ShardSources:
    """Where the rows of one new shard come from."""

    needed: Needed
    bands: tuple[Band, ...]
    """Every row of the shard once, in order; none where the shard is adopted."""

    @property
    def moved_rows(self) -> int:
        """Rows that are copied from memory that somebody holds."""
        return sum(band.num_rows for band in self.bands if band.pieces)

    @property
    def lost_rows(self) -> int:
        """Rows that nobody holds."""
        return sum(band.num_rows for band in self.bands if not band.pieces)

    @property
    def lost_ranges(self) -> list[Interval]:
        """Those rows."""
        return [band.rows for band in self.bands if not band.pieces]

    @property
    def lost_bytes(self) -> int:
        """Of them, with their optimizer state."""
        return self.lost_rows * self.needed.bytes_per_row


def plan_sources(needed: Sequence[Needed], held: Sequence[Held]) -> list[ShardSources]:
    """Find a source for every row, in the order of `needed`.

    Where several hold the same rows, the newest generation is preferred, then the most steps, then whoever
    needs them itself, then the lowest rank.

    Args:
        needed: the shards of all ranks.
        held: what all ranks hold, of this run and this model; its order does not matter.
    """
    by_table: dict[str, list[Held]] = {}
    for each in held:
        by_table.setdefault(each.extent.table_fqn, []).append(each)
    return [_sources(each, by_table.get(each.extent.table_fqn, [])) for each in needed]


def lost_share(sources: Sequence[ShardSources]) -> float:
    """The share of the bytes of all shards that nobody holds; 0 without shards."""
    total = sum(each.needed.extent.num_rows * each.needed.bytes_per_row for each in sources)
    return sum(each.lost_bytes for each in sources) / total if total else 0.0


def lost_share_by_rank(sources: Sequence[ShardSources]) -> dict[int, float]:
    """The same for the shards of each rank that needs some that nobody holds."""
    by_rank: dict[int, list[ShardSources]] = {}
    for each in sources:
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
        Band(interval, _pieces(interval, cols, candidates)) for interval in pairwise(sorted({*rows, *edges}))
    )
    return ShardSources(needed, tuple(_joined(bands)))


def _pieces(rows: Interval, cols: Interval, candidates: Sequence[Held]) -> tuple[Piece, ...]:
    """Who gives which columns of rows that nobody holds in part; nothing if some column is gone."""
    missing = [cols]
    pieces: list[Piece] = []
    for each in candidates:
        if not contains(each.extent.rows, rows):
            continue
        still: list[Interval] = []
        for gap in missing:
            found = common(gap, each.extent.cols)
            if found is None:
                still.append(gap)
                continue
            pieces.append(Piece(each.rank, each.index, found))
            still += [part for part in ((gap[0], found[0]), (found[1], gap[1])) if part[0] < part[1]]
        missing = still
        if not missing:
            return tuple(sorted(pieces, key=lambda piece: piece.cols))
    return ()


def _joined(bands: Iterator[Band]) -> Iterator[Band]:
    """Neighbours with the same sources become one."""
    for pieces, alike in groupby(bands, key=lambda band: band.pieces):
        group = list(alike)
        yield Band((group[0].rows[0], group[-1].rows[1]), pieces)


def origins(sources: list[ShardSources]) -> tuple[RowOrigin, ...]:
    """Rows by origin, for each table."""
    counts: dict[str, list[int]] = {}
    for each in sources:
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
    sources: list[ShardSources], samples: int, pls: float | None, expected: float | None
) -> tuple[ShardLoss, ...]:
    """What each shard has lost.

    Args:
        sources: of all shards.
        samples: trained between the save and the failure.
        pls: added by the failure; None: not known.
        expected: of such a failure; None: not known.
    """
    lost_bytes = sum(each.lost_bytes for each in sources)
    return tuple(
        ShardLoss(
            rank=each.needed.rank,
            table_fqn=each.needed.extent.table_fqn,
            num_rows=each.lost_rows,
            samples=samples,
            pls=None if pls is None else pls * each.lost_bytes / lost_bytes,
            pls_expected=None if expected is None else expected * each.lost_bytes / lost_bytes,
        )
        for each in sources
        if each.lost_rows
    )
