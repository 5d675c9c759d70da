"""What new data takes from a data set that `data.convert` made: its schema, means and vocabularies."""

import hashlib
from collections.abc import Mapping

from data.dataset import read_manifest
from data.jobs.files import durable_file
from data.jobs.location import Location
from data.schema import Schema
from data.schema.encoder import vocabulary_path


def schema_like(like: Location) -> Schema:
    """The schema of a data set, with its means and standard deviations.

    Raises:
        ValueError: there is no data set, or `data.convert` did not make it.
        OSError: it cannot be read.
    """
    manifest = read_manifest(like.root)
    if not manifest.schema:
        raise ValueError(f"--like takes a data set that data.convert made, and {like} holds no schema")
    return Schema.from_json(manifest.schema)


def vocabulary_digests(like: Location) -> Mapping[str, str]:
    """SHA-256 of the vocabulary files of a data set, by path in its folder."""
    return {file["path"]: file["sha256"] for file in read_manifest(like.root).provenance["files"]}


def copy_vocabularies(like: Location, out: Location, schema: Schema) -> dict[str, str]:
    """Copy the vocabularies of a data set to another folder; returns their paths by feature.

    Raises:
        ValueError: a file is damaged or lost.
        OSError: a file cannot be read or written.
    """
    digests = vocabulary_digests(like)
    paths = {one.name: vocabulary_path(one.name) for one in schema.sparse if one.ids == "vocabulary"}
    for path in paths.values():
        try:
            content = (like / path).read()
        except FileNotFoundError as error:
            raise ValueError(f"{like / path} is lost; restore that data set") from error
        if hashlib.sha256(content).hexdigest() != digests[path]:
            raise ValueError(f"{like / path} is damaged: its digest is not that of the manifest")
        with durable_file(out / path) as sink:
            sink.write(content)
    return paths
