"""Makes checked rows of records: of encoded tables, and of raw rows as the data set's were made."""

from dataclasses import replace
from typing import Final

import numpy as np
import polars as pl
import pyarrow as pa
from numpy.typing import NDArray

from data.criteo import COLUMN_NAMES
from data.dataset import DatasetManifest
from data.loader.columns import Rows
from data.loader.decode import DecodeError, decode
from data.prepare.parse.columns import vet
from data.prepare.parse.lines import BadLine
from data.schema import Encoder
from data.schema.rows import read_rows
from data.stream.source import Checked

LONGEST_REASON: Final = 300
_CRITEO_SCHEMA: Final = dict.fromkeys(COLUMN_NAMES, pl.String)


class RecordReader:
    """Reads records by the columns of a data set.

    Args:
        uri: of the data set.
        manifest: its manifest.
        is_encoded: whether records have the data set's own columns, with ids; else they are raw rows, and the
            data set says how its own were made of such.

    Raises:
        ValueError: it does not say so.
    """

    def __init__(self, uri: str, manifest: DatasetManifest, is_encoded: bool) -> None:
        self.manifest, self.is_encoded = manifest, is_encoded
        try:
            self.encoder = None if is_encoded else Encoder.of_dataset(uri)
        except ValueError as error:
            raise ValueError(
                f"{error}. If the records of the stream have the data set's own columns, with ids, set "
                "stream.rows=encoded"
            ) from error

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns that records must have."""
        return self.manifest.columns if self.encoder is None else self.encoder.schema.columns

    def of_table(self, table: pa.Table, records: NDArray[np.int64], name: str) -> Checked:
        """Check encoded rows.

        Args:
            table: with the manifest's columns.
            records: numbers of its rows.
            name: of the file or topic, for messages.

        Raises:
            ValueError: a column is missing.
        """
        present = table.column_names
        if absent := [column for column in self.manifest.columns if column not in present]:
            raise ValueError(f"there is no column {absent[0]!r}; the columns are {', '.join(present)}")
        table, bad = table.select(list(self.manifest.columns)), dict[int, str]()
        rows = self._decoded(table, records, name, bad)
        if rows is None:
            good = np.flatnonzero(~np.isin(records, list(bad)))
            table, records = table.take(good), records[good]
            rows = decode(table, self.manifest, name) if len(good) else None
        return Checked(rows=rows, records=records, bad=bad)

    def of_frame(self, frame: pl.DataFrame, records: NDArray[np.int64], name: str) -> Checked:
        """Encode and check rows.

        Args:
            frame: with the `columns`, of any type that looks alike as a text if they are raw.
            records: numbers of its rows.
            name: of the file or topic, for messages.

        Raises:
            ValueError: a column is missing.
        """
        if self.encoder is None:
            return self.of_table(frame.to_arrow(), records, name)
        rows = read_rows(frame, self.encoder.schema, to_train=True)
        bad = {int(records[at]): reason for at, reason in rows.reasons.items()}
        table = self.encoder.encode_read(rows.good).select(self.manifest.columns).to_arrow()
        checked = self.of_table(table, np.delete(records, sorted(rows.reasons)), name)
        return replace(checked, bad={**bad, **checked.bad})

    def _decoded(
        self, table: pa.Table, records: NDArray[np.int64], name: str, bad: dict[int, str]
    ) -> Rows | None:
        """The rows decoded; None if some cannot be, which are found by halving and added to `bad`."""
        if not table.num_rows:
            return None
        try:
            return decode(table, self.manifest, name)
        except DecodeError as error:
            if table.num_rows == 1:
                bad[int(records[0])] = error.reason[:LONGEST_REASON]
                return None
        middle = table.num_rows // 2
        for half in (slice(middle), slice(middle, None)):
            self._decoded(table[half], records[half], name, bad)
        return None


def criteo_rows(text: bytes) -> tuple[pl.DataFrame, list[BadLine]]:
    """Split lines of one of Criteo's logs into columns.

    Args:
        text: whole lines, each with its line end.

    Returns:
        Raw rows of the good lines in order, with all columns as String; and the bad lines.
    """
    good, bad = vet(text.replace(b"\r\n", b"\n"))
    if not good:
        return pl.DataFrame(schema=_CRITEO_SCHEMA), bad
    return pl.read_csv(good, has_header=False, separator="\t", quote_char=None, schema=_CRITEO_SCHEMA), bad
