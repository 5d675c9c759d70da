"""Which rows and columns of a table a shard, a file or a transfer covers, and where two of them overlap."""

from dataclasses import dataclass, replace

Interval = tuple[int, int]
"""From the first to before the last."""


def common(one: Interval, other: Interval) -> Interval | None:
    """What is in both; None if nothing is."""
    begin, end = max(one[0], other[0]), min(one[1], other[1])
    return (begin, end) if begin < end else None


def contains(outer: Interval, inner: Interval) -> bool:
    """Whether all of one is in the other."""
    return outer[0] <= inner[0] and inner[1] <= outer[1]


@dataclass(frozen=True, kw_only=True, order=True)
class Extent:
    """Rows x columns of a table; of a shard, it tells the shard apart from all others of a model."""

    table_fqn: str
    """Fully qualified name of the table."""
    table_shape: tuple[int, int]
    """Rows and columns of the whole table."""
    row_offset: int
    """Row id of the first row."""
    num_rows: int
    col_offset: int
    """Column of the table that is the first."""
    num_cols: int

    @classmethod
    def of_table(cls, table_fqn: str, table_shape: tuple[int, int]) -> "Extent":
        """All of a table."""
        rows, cols = table_shape
        return cls(
            table_fqn=table_fqn,
            table_shape=(rows, cols),
            row_offset=0,
            num_rows=rows,
            col_offset=0,
            num_cols=cols,
        )

    @property
    def rows(self) -> Interval:
        """Row ids."""
        return self.row_offset, self.row_offset + self.num_rows

    @property
    def cols(self) -> Interval:
        """Columns of the table."""
        return self.col_offset, self.col_offset + self.num_cols

    @property
    def name(self) -> str:
        """Of the shard that has this extent: unique among those of a model, and fit for a path."""
        return f"{self.table_fqn}/r{self.row_offset}-c{self.col_offset}"

    def narrowed(self, rows: Interval, cols: Interval) -> "Extent":
        """Other rows and columns of the same table."""
        return replace(
            self,
            row_offset=rows[0],
            num_rows=rows[1] - rows[0],
            col_offset=cols[0],
            num_cols=cols[1] - cols[0],
        )

    def overlap(self, other: "Extent") -> "Extent | None":
        """What is in both; None if nothing is, or they are of different tables."""
        if self.table_fqn != other.table_fqn:
            return None
        rows, cols = common(self.rows, other.rows), common(self.cols, other.cols)
        return self.narrowed(rows, cols) if rows and cols else None
