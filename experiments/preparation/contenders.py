"""Three converters of raw Criteo lines for `experiments.preparation`: this project's, TorchRec's and polars'.

Each is a function of the raw files, an empty folder and the number of processes or threads. The one with
polars produces the same columns, types, values and codec as `data.prepare`, written as its documentation
advises: a lazy scan, expressions, a streaming sink. TorchRec's converter is its own function, unchanged.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import polars as pl

from data.criteo import CATEGORY_NAMES, DENSE_NAMES, KAGGLE_CARDINALITIES, LABEL
from data.prepare.config import PrepareConfig
from data.prepare.convert import COMPRESSION, ROW_GROUP_ROWS
from data.prepare.job import prepare

TABLES: Final = "kaggle"
_ROWS: Final = dict(zip(CATEGORY_NAMES, KAGGLE_CARDINALITIES, strict=True))


def ours(raw: Sequence[Path], out: Path, num_cores: int) -> None:
    """Convert with `data.prepare`, the start of its worker processes included."""
    prepare(
        PrepareConfig(
            raw=tuple(raw), out=out / "ours", table_rows=TABLES, cap=2**31 - 1, num_processes=num_cores
        )
    )


def polars(raw: Sequence[Path], out: Path, num_cores: int) -> None:
    """Convert with a lazy scan into a streaming Parquet sink, on all cores that the process may use."""
    schema = {
        LABEL: pl.UInt8,
        **dict.fromkeys(DENSE_NAMES, pl.Int64),
        **dict.fromkeys(CATEGORY_NAMES, pl.String),
    }
    scan = pl.scan_csv(list(raw), has_header=False, separator="\t", quote_char=None, schema=schema)
    dense = (pl.col(DENSE_NAMES).cast(pl.Float32).fill_null(0).clip(0) + 1).log()
    raw_ids = pl.col(CATEGORY_NAMES).str.to_integer(base=16, dtype=pl.UInt32, strict=True)
    ids = [(pl.col(name) % rows).cast(pl.Int32).fill_null(0) for name, rows in _ROWS.items()]
    scan.with_columns(dense, raw_ids).with_columns(ids).sink_parquet(
        out / "polars.parquet", compression=COMPRESSION, row_group_size=ROW_GROUP_ROWS, statistics=False
    )


def torchrec(raw: Sequence[Path], out: Path, num_cores: int) -> None:
    """Convert with TorchRec to numpy files, one file after the other on one core."""
    from torchrec.datasets.criteo import BinaryCriteoUtils  # noqa: PLC0415  # slow to import, only needed here

    for path in raw:
        names = [str(out / f"{path.name}_{kind}.npy") for kind in ("dense", "sparse", "labels")]
        BinaryCriteoUtils.tsv_to_npys(str(path), *names)


CONTENDERS: Final[dict[str, Callable[[Sequence[Path], Path, int], None]]] = {
    "ours": ours,
    "polars": polars,
    "torchrec": torchrec,
}
