"""Small data sets for the tests of `data/`."""

import hashlib
import resource
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data.criteo import LABEL
from data.dataset import MANIFEST_NAME, DatasetManifest, Feature, Part

MakeDataset = Callable[..., DatasetManifest]


@pytest.fixture
def no_file_longer_than():
    """A context in which writing more bytes to a file fails, as on a full disk."""

    @contextmanager
    def limited(num_bytes: int) -> Iterator[None]:
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)

    return limited


def _column(kind: str, numbers: np.ndarray, rows: int) -> pa.Array:
    ids = numbers % rows
    if kind == "one":
        return pa.array(ids.astype(np.int32))
    # Row i has i % 4 ids, so bags of 0 to 3.
    bags = [[int((i + k) % rows) for k in range(i % 4)] for i in numbers.tolist()]
    return pa.array(bags, pa.list_(pa.int32()))


@pytest.fixture(scope="session")
def make_dataset() -> MakeDataset:
    """Write a data set whose every value tells its row number: `dense[:, 0]` is the number itself."""

    def make(
        folder: Path,
        row_groups: Sequence[Sequence[int]] = ((40, 30), (30,)),
        kinds: Sequence[str] = ("one", "one", "one"),
        num_dense: int = 2,
    ) -> DatasetManifest:
        dense = tuple(f"int_{i}" for i in range(num_dense))
        features = tuple(Feature(name=f"cat_{i}", rows=7 + 10 * i) for i in range(len(kinds)))
        first, parts = 0, []
        for day, sizes in enumerate(row_groups):
            numbers = np.arange(first, first + sum(sizes))
            columns = {LABEL: pa.array((numbers % 3 == 0).astype(np.int8))}
            columns |= {
                name: pa.array((numbers * (i + 1)).astype(np.float32)) for i, name in enumerate(dense)
            }
            for kind, feature in zip(kinds, features, strict=True):
                columns[feature.name] = _column(kind, numbers, feature.rows)
            table = pa.table(columns)
            path = folder / f"day={day}" / "part-0.parquet"
            path.parent.mkdir(parents=True)
            begin = 0
            with pq.ParquetWriter(path, table.schema, write_page_checksum=True) as writer:
                for size in sizes:
                    writer.write_table(table.slice(begin, size), row_group_size=size)
                    begin += size
            parts.append(
                Part(
                    path=str(path.relative_to(folder)),
                    day=day,
                    num_rows=len(numbers),
                    row_groups=tuple(sizes),
                    num_bytes=path.stat().st_size,
                    sha256=hashlib.sha256(path.read_bytes()).hexdigest(),
                )
            )
            first += sum(sizes)
        manifest = DatasetManifest(features=features, parts=tuple(parts), dense=dense)
        (folder / MANIFEST_NAME).write_text(manifest.to_json())
        return manifest

    return make
