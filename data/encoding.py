"""Whether two data sets turn raw rows into the same inputs of a model: two conversions of raw rows do not.

Each counts its own vocabularies and means, so that one id means other values in them.
"""

import json
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any, Final

from data.criteo import PREPARE
from data.dataset import DatasetManifest

_PLACES: Final = ("column", "name", "weights", "separator", "list", "min_count", "max_rows")
"""Keys of a schema that say where values stand in the raw rows, or how a vocabulary was counted."""


def encoding(manifest: DatasetManifest) -> Mapping[str, str]:
    """For each dense column and feature, how raw values become its inputs, digests of vocabularies included.

    Equal texts mean equal inputs. Empty if the manifest does not say how the data was made.
    """
    is_prepared = manifest.provenance.get("maker") == PREPARE
    if not manifest.schema and not is_prepared:
        return {}
    files = manifest.provenance.get("files", [])
    digests = {PurePosixPath(file["path"]).stem: file["sha256"] for file in files}  # vocabularies
    if manifest.schema:
        missing = manifest.schema.get("missing")
        return {
            section.get("name", section["column"]): _text(section, missing, digests)
            for kind in ("dense", "sparse")
            for section in manifest.schema.get(kind, [])
        }
    rule = manifest.provenance["identity"]["ids"]
    return {
        feature.name: f"{rule} {feature.rows} {digests.get(feature.name, '')}"
        for feature in manifest.features
    }


def differing_inputs(ours: DatasetManifest, theirs: DatasetManifest) -> list[str]:
    """Inputs that one program encodes otherwise in the two data sets; empty where that is not known."""
    if bool(ours.schema) != bool(theirs.schema):
        return []
    mine, others = encoding(ours), encoding(theirs)
    return [name for name, text in mine.items() if name in others and others[name] != text]


def _text(section: Mapping[str, Any], missing: Any, digests: Mapping[str, str]) -> str:
    rules = {key: value for key, value in section.items() if key not in _PLACES}
    digest = digests.get(section.get("name", section["column"]))
    return json.dumps([rules, missing, digest], sort_keys=True)
