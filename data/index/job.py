"""Reads all Parquet files of a folder once, checks what a manifest promises, and writes it."""

import difflib
import hashlib
import os
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from data.dataset import MANIFEST_NAME, DatasetManifest, Feature, Part, read_manifest
from data.index.files import days_of, find_files
from data.index.schema import IndexSchema
from data.jobs.files import durable_file
from data.jobs.location import Location
from data.loader import ParquetSource, WithoutLabels
from data.loader.decode import PREPARE_AGAIN, decode
from data.schema.definition import MOST_ROWS

MAKER: Final = "data.index"
"""In the provenance of the manifest."""
MOST_THREADS: Final = 4
"""Files that are read at once; each needs memory for a decoded row group."""
ADVICE: Final = "change the files or the schema, or let `python -m data.convert` make a data set of them"


@dataclass(frozen=True, kw_only=True)
class Checked:
    """A file that was read, with what is counted in it."""

    part: Part
    ids: Mapping[str, tuple[int, int, int]]
    """Lowest id, highest id, and number of ids of each feature; 0, -1, 0 if there are none."""
    num_clicks: int
    """Labels that are 1; 0 without labels."""


@dataclass(frozen=True, kw_only=True)
class Indexed:
    """A finished index."""

    manifest: DatasetManifest
    ids_per_sample: Mapping[str, float]
    num_clicks: int | None
    """Labels that are 1; None without labels."""


def index(
    uri: str,
    schema: IndexSchema,
    progress: Callable[[int, int], object] = lambda done, total: None,
    *,
    labels: bool = True,
) -> Indexed:
    """Check all Parquet files of a folder and write its manifest, replacing one that `index` wrote before.

    Nothing else is written.

    Args:
        uri: the folder, a local path or any pyarrow filesystem URI.
        schema: which columns are what.
        progress: called after each file with the number of files done and of all.
        labels: whether the files have the label column; without it, the data can only be scored.

    Raises:
        ValueError: another program made this data set, or the files do not fit the schema.
        OSError: a file or the folder cannot be read, or the manifest cannot be written.
    """
    folder = Location(uri)
    _refuse_other_makers(folder)
    paths = find_files(folder)
    days, draft = days_of(paths), schema.manifest()
    with ThreadPoolExecutor(min(MOST_THREADS, os.cpu_count() or 1)) as threads:
        check = partial(_check, folder, draft=draft, labels=labels)
        tasks = [threads.submit(check, path, days[path]) for path in paths]
        try:
            checked = []
            for task in tasks:
                checked.append(task.result())
                progress(len(checked), len(paths))
        finally:
            threads.shutdown(cancel_futures=True)
    checked = sorted((each for each in checked if each.part.num_rows), key=lambda each: each.part.day)
    if not checked:
        raise ValueError(f"the Parquet files in {folder} hold no rows")
    raw = {sparse.column for sparse in schema.sparse if sparse.ids}
    manifest = replace(
        draft,
        features=tuple(_feature(each, checked, is_raw=each.name in raw) for each in draft.features),
        parts=tuple(each.part for each in checked),
        provenance={"maker": MAKER},
    )
    with durable_file(folder / MANIFEST_NAME) as sink:
        sink.write(manifest.to_json().encode())
    return Indexed(
        manifest=manifest,
        ids_per_sample={
            each.name: sum(file.ids[each.name][2] for file in checked) / manifest.num_rows
            for each in manifest.features
        },
        num_clicks=sum(file.num_clicks for file in checked) if labels else None,
    )


def columns_of(uri: str) -> pa.Schema:
    """Columns of the first file of a folder."""
    folder = Location(uri)
    with (folder / find_files(folder)[0]).open() as file:
        return pq.read_schema(file)


def _refuse_other_makers(folder: Location) -> None:
    if (folder / MANIFEST_NAME).size() is None:
        return
    maker = read_manifest(folder.root).provenance.get("maker", "another program")
    if maker != MAKER:
        raise ValueError(
            f"{folder} is a data set already, made by {maker}; train on it as it is, or remove its "
            f"{MANIFEST_NAME} first"
        )


def _check(folder: Location, path: str, day: int, draft: DatasetManifest, *, labels: bool) -> Checked:
    """Read a whole file, row group by row group."""
    try:
        part = _part(folder / path, path, day, draft, labels=labels)
        source = (ParquetSource if labels else WithoutLabels)(folder.root, draft)
        seen: dict[str, list[tuple[int, int, int]]] = {feature.name: [] for feature in draft.features}
        num_clicks = 0
        for number in range(len(part.row_groups)):
            rows = decode(source.read(part, number), draft, path)
            num_clicks += int(rows.label.values.sum())
            for feature, column in zip(draft.features, rows.ids, strict=True):
                seen[feature.name].append(_extent(column.values))
        source.close()
    except ValueError as error:
        raise ValueError(str(error).replace(PREPARE_AGAIN, ADVICE)) from error
    ids = {
        name: (
            min(low for low, *_ in found),
            max(high for _, high, _ in found),
            sum(num for *_, num in found),
        )
        for name, found in seen.items()
        if found
    }
    return Checked(part=part, ids=ids, num_clicks=num_clicks)


def _extent(ids: np.ndarray) -> tuple[int, int, int]:
    return (int(ids.min()), int(ids.max()), len(ids)) if len(ids) else (0, -1, 0)


def _part(location: Location, path: str, day: int, draft: DatasetManifest, *, labels: bool) -> Part:
    """Describe a file whose columns fit the schema by name."""
    with location.open() as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        num_bytes = file.tell()
        try:
            metadata = pq.read_metadata(file)
        except pa.ArrowInvalid as error:
            raise ValueError(f"{path} is not a Parquet file ({error}); {ADVICE}") from error
    _check_names(path, Counter(metadata.schema.to_arrow_schema().names), draft, labels=labels)
    return Part(
        path=path,
        day=day,
        num_rows=metadata.num_rows,
        row_groups=tuple(metadata.row_group(number).num_rows for number in range(metadata.num_row_groups)),
        num_bytes=num_bytes,
        sha256=digest,
    )


def _check_names(path: str, names: Counter[str], draft: DatasetManifest, *, labels: bool) -> None:
    if not labels and names[draft.label]:
        raise ValueError(
            f"{path} has the label column {draft.label!r}: leave out --no-labels, or, if its values are not "
            "labels, rename or drop it"
        )
    for column in draft.columns if labels else draft.columns[1:]:
        if not names[column]:
            close = difflib.get_close_matches(column, names, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"it has {', '.join(names)}"
            hint += "; files without labels, to be scored, take --no-labels" * (column == draft.label)
            raise ValueError(f"{path} has no column {column!r}; {hint}")
        if names[column] > 1:
            raise ValueError(f"{path} has {names[column]} columns {column!r}; rename all but one")


def _feature(feature: Feature, checked: list[Checked], *, is_raw: bool) -> Feature:
    """The feature with the rows of its table: those given, or the highest id + 1."""
    name = feature.name
    if is_raw or feature.rows:
        return feature
    lowest = min(checked, key=lambda each: each.ids[name][0])
    highest = max(checked, key=lambda each: each.ids[name][1])
    if lowest.ids[name][0] < 0:
        raise ValueError(
            f"{lowest.part.path}: column {name} holds id {lowest.ids[name][0]}, but ids go from 0. Number "
            'them from 0, or set ids = "raw" in the schema, for dynamic tables'
        )
    rows = max(highest.ids[name][1], 0) + 1
    if rows > MOST_ROWS:
        raise ValueError(
            f"{highest.part.path}: column {name} holds id {rows - 1}, too high for a row of a table. Set "
            'ids = "raw" in the schema, for dynamic tables, or let `python -m data.convert` hash the ids'
        )
    return replace(feature, rows=rows)
