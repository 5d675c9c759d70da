"""Checks every digest and row count of a finished data set against its manifest."""

import hashlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatch
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from data.dataset import Part, read_manifest
from data.jobs.location import Location


def verify(out: Location) -> list[str]:
    """Check a data set.

    Returns:
        A sentence for each problem; empty if the data set is intact.

    Raises:
        ValueError: there is no finished data set.
    """
    manifest = read_manifest(out.root)
    files = list(manifest.provenance.get("files", []))
    if "rejects" in manifest.provenance:
        files.append(manifest.provenance["rejects"])
    with ThreadPoolExecutor(max_workers=2) as threads:  # hashing releases the GIL; more would only seek
        problems = [*threads.map(lambda part: _check_part(out, part), manifest.parts)]
        problems += threads.map(lambda file: _check_file(out, file), files)
    return [problem for problem in problems if problem] + list(_strangers(out, manifest.parts))


def _check_part(out: Location, part: Part) -> str | None:
    known = {"path": part.path, "num_bytes": part.num_bytes, "sha256": part.sha256}
    problem = _check_file(out, known)
    if problem:
        return problem
    try:
        with (out / part.path).open() as stream:
            metadata = pq.read_metadata(stream)
    except pa.ArrowInvalid as error:
        return f"{part.path} is not a Parquet file ({error})"
    groups = tuple(metadata.row_group(index).num_rows for index in range(metadata.num_row_groups))
    if groups != part.row_groups or metadata.num_rows != part.num_rows:
        return f"{part.path} has row groups {list(groups)}, not {list(part.row_groups)}"
    return None


def _check_file(out: Location, known: dict[str, Any]) -> str | None:
    file = out / known["path"]
    size = file.size()
    if size is None:
        return f"{known['path']} is missing"
    if size != known["num_bytes"]:
        return f"{known['path']} has {size:,} bytes, not {known['num_bytes']:,}"
    with file.open() as stream:
        if hashlib.file_digest(stream, "sha256").hexdigest() != known["sha256"]:
            return f"{known['path']} has other bytes than were written: its digest differs"
    return None


def _strangers(out: Location, parts: tuple[Part, ...]) -> Iterator[str]:
    known = {part.path for part in parts}
    for name in out.sizes():
        if fnmatch(name, "day=*/*.parquet") and name not in known:
            yield f"{name} is not part of the data set"
