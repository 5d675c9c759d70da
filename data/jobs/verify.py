"""Checks every digest and row count of a finished data set against its manifest."""

import hashlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatch
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from data.dataset import DatasetManifest, Part, read_manifest
from data.jobs.location import Location


def verify(out: Location) -> list[str]:
    """Check a data set.

    Returns:
        A sentence for each problem; empty if the data set is intact.

    Raises:
        ValueError: there is no finished data set.
    """
    manifest = read_manifest(out.root)
    with ThreadPoolExecutor(max_workers=2) as threads:  # hashing releases the GIL; more would only seek
        problems = [*threads.map(lambda part: _check_part(out, part), manifest.parts)]
        problems += threads.map(lambda file: _check_file(out, file), _other_files(manifest))
    return [problem for problem in problems if problem] + list(_strangers(out, manifest.parts))


def check_sizes(out: Location, manifest: DatasetManifest) -> dict[str, str]:
    """Find files that are missing or have another size, without reading any.

    Returns:
        A sentence for each of them, by path.
    """
    sizes = out.sizes()
    known = [*map(_known, manifest.parts), *_other_files(manifest)]
    problems = {file["path"]: _check_size(file, sizes.get(file["path"])) for file in known}
    return {path: problem for path, problem in problems.items() if problem}


def _known(part: Part) -> dict[str, Any]:
    return {"path": part.path, "num_bytes": part.num_bytes, "sha256": part.sha256}


def _other_files(manifest: DatasetManifest) -> list[dict[str, Any]]:
    """The manifest's entries about files that are not parts, such as vocabularies."""
    rejects = manifest.provenance.get("rejects")
    return [*manifest.provenance.get("files", []), *([rejects] if rejects else [])]


def _check_part(out: Location, part: Part) -> str | None:
    problem = _check_file(out, _known(part))
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
    if problem := _check_size(known, file.size()):
        return problem
    with file.open() as stream:
        if hashlib.file_digest(stream, "sha256").hexdigest() != known["sha256"]:
            return f"{known['path']} has other bytes than were written: its digest differs"
    return None


def _check_size(known: dict[str, Any], size: int | None) -> str | None:
    if size is None:
        return f"{known['path']} is missing"
    if size != known["num_bytes"]:
        return f"{known['path']} has {size:,} bytes, not {known['num_bytes']:,}"
    return None


def _strangers(out: Location, parts: tuple[Part, ...]) -> Iterator[str]:
    known = {part.path for part in parts}
    for name in out.sizes():
        if fnmatch(name, "day=*/*.parquet") and name not in known:
            yield f"{name} is not part of the data set"
