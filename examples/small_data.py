"""Writes a small data set for the examples: a folder of Parquet files, one a day, with a manifest."""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import polars

from data.dataset import MANIFEST_NAME, DatasetManifest, Feature, Part


def write_dataset(
    folder: Path, days: Sequence[polars.DataFrame], rows: Mapping[str, int], dense: Sequence[str] = ()
) -> None:
    """Write a frame per day, with a column `label`, float32 columns `dense` and int32 ids or lists of ids.

    `rows` are the rows of the tables by feature: ids are smaller.
    """
    parts = []
    for day, frame in enumerate(days):
        path = folder / f"day={day}" / "part-00000.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        frame.write_parquet(path)
        content = path.read_bytes()
        parts.append(
            Part(
                path=str(path.relative_to(folder)),
                day=day,
                num_rows=len(frame),
                row_groups=(len(frame),),
                num_bytes=len(content),
                sha256=hashlib.sha256(content).hexdigest(),
            )
        )
    features = tuple(Feature(name=name, rows=number) for name, number in rows.items())
    manifest = DatasetManifest(features=features, parts=tuple(parts), dense=tuple(dense))
    (folder / MANIFEST_NAME).write_text(manifest.to_json())
