"""Geometry of shards, files and transfers: ranges of rows and columns of a table, and their overlaps."""

from dataclasses import dataclass, replace

Interval = tuple[int, int]
"""Half-open range: begin, end."""


def common(one: Interval, other: Interval) -> Interval | None:
    """Intersection of two intervals; None if empty."""
    begin, end = max(one[0], other[0]), min(one[1], other[1])
    return (begin, end) if begin < end else None


def contains(outer: Interval, inner: Interval) -> bool:
    """Whether the inner interval lies in the outer one."""
    return outer[0] <= inner[0] and inner[1] <= outer[1]


@dataclass(frozen=True, kw_only=True, order=True)
class Extent:
    """A rectangle of rows x columns of a table; the extent of a shard is unique in a model."""

    table_fqn: str
    """Fully qualified name of the table."""
    table_shape: tuple[int, int]
    """Rows and columns of the whole table."""
    row_offset: int
    """Row id of the first row."""
    num_rows: int
    col_offset: int
    """The first column."""
    num_cols: int

    @classmethod
    def of_table(cls, table_fqn: str, table_shape: tuple[int, int]) -> "Extent":
        """Extent of a whole table."""
        rows, cols = table_shape
        shape = (rows, cols)  # a list, as in JSON, would not be hashable
        return cls(
            table_fqn=table_fqn, table_shape=shape, row_offset=0, num_rows=rows, col_offset=0, num_cols=cols
        )

    @property
    def rows(self) -> Interval:
        """Range of row ids."""
        return self.row_offset, self.row_offset + self.num_rows

    @property
    def cols(self) -> Interval:
        """Range of columns."""
        return self.col_offset, self.col_offset + self.num_cols

    @property
    def name(self) -> str:
        """Name of the shard with this extent: unique in a model, and valid as a path."""
        return f"{self.table_fqn}/r{self.row_offset}-c{self.col_offset}"

    def narrowed(self, rows: Interval, cols: Interval) -> "Extent":
        """Extent of other rows and columns of the same table."""
        return replace(
            self,
            row_offset=rows[0],
            num_rows=rows[1] - rows[0],
            col_offset=cols[0],
            num_cols=cols[1] - cols[0],
        )

    def overlap(self, other: "Extent") -> "Extent | None":
        """Intersection with another extent; None if empty, or of different tables."""
        if self.table_fqn != other.table_fqn:
            return None
        rows, cols = common(self.rows, other.rows), common(self.cols, other.cols)
        return self.narrowed(rows, cols) if rows and cols else None
