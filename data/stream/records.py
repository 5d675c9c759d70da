"""Makes checked rows of records: of encoded tables, and of raw rows as the data set's were made."""

from collections.abc import Collection
from dataclasses import replace
from typing import Final

import numpy as np
import polars as pl
import pyarrow as pa
from numpy.typing import NDArray

from data.dataset import DatasetManifest
from data.loader.decode import decode
from data.schema import Encoder
from data.schema.rows import read_rows
from data.stream.source import Checked

LONGEST_REASON: Final = 300


class RecordReader:
    """Reads records by the columns of a data set.

    Args:
        uri: of the data set.
        manifest: its manifest; raw rows can be read if it says how its own were made.
    """

    def __init__(self, uri: str, manifest: DatasetManifest) -> None:
        self.manifest = manifest
        self._uri = uri
        self._encoder: Encoder | None = None

    @property
    def encoder(self) -> Encoder:
        """Of raw rows.

        Raises:
            ValueError: the data set does not say how raw rows become its columns.
        """
        if self._encoder is None:
            self._encoder = Encoder.of_dataset(self._uri)
        return self._encoder

    def of_table(self, table: pa.Table, records: NDArray[np.int64], name: str) -> Checked:
        """Check encoded rows.

        Args:
            table: with the manifest's columns.
            records: numbers of its rows.
            name: of the file or topic, for messages.
        """
        bad: dict[int, str] = {}
        good = self._good(table.select(list(self.manifest.columns)), records, name, bad)
        left = records[~np.isin(records, list(bad))] if bad else records
        rows = None if good is None else decode(good, self.manifest, name)
        return Checked(rows=rows, records=left, bad=bad)

    def of_frame(self, frame: pl.DataFrame, records: NDArray[np.int64], name: str) -> Checked:
        """Encode and check raw rows.

        Args:
            frame: with the `raw_columns`.
            records: numbers of its rows.
            name: of the file or topic, for messages.

        Raises:
            ValueError: a column is missing, or the data set does not say how raw rows are encoded.
        """
        rows = read_rows(frame, self.encoder.schema, to_train=True)
        bad = {int(records[at]): reason for at, reason in rows.reasons.items()}
        table = self.encoder.encode_read(rows.good).select(self.manifest.columns).to_arrow()
        checked = self.of_table(table, np.delete(records, sorted(rows.reasons)), name)
        return replace(checked, bad={**bad, **checked.bad})

    @property
    def raw_columns(self) -> tuple[str, ...]:
        """Columns of raw rows, with the label."""
        return self.encoder.schema.columns

    def is_encoded(self, columns: Collection[str]) -> bool:
        """Whether rows with these columns are encoded already."""
        return set(self.manifest.columns) <= set(columns)

    def _good(
        self, table: pa.Table, records: NDArray[np.int64], name: str, bad: dict[int, str]
    ) -> pa.Table | None:
        """The rows that can be decoded, found by halving; the reasons of the others are added to `bad`."""
        if not table.num_rows:
            return None
        try:
            decode(table, self.manifest, name)
        except ValueError as error:
            if table.num_rows == 1:
                bad[int(records[0])] = str(error)[:LONGEST_REASON]
                return None
            middle = table.num_rows // 2
            halves = [(table[:middle], records[:middle]), (table[middle:], records[middle:])]
            good = [part for each, own in halves if (part := self._good(each, own, name, bad)) is not None]
            return pa.concat_tables(good) if good else None
        return table
