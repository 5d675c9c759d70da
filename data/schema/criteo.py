"""The schema that is equal to what `data.prepare` does with Criteo's columns."""

import io
from typing import Final

import numpy as np
import polars as pl

from data.criteo import LABEL, PREPARE
from data.dataset import DatasetManifest, open_folder
from data.schema.definition import Dense, Label, Schema, Sparse

_RULES: Final = {"modulo": "modulo", "hash": "mix", "vocabulary": "vocabulary", "raw": "raw"}
"""Rule of a schema by `data.prepare --ids`."""


def criteo_encoding(uri: str, manifest: DatasetManifest) -> tuple[Schema, dict[str, pl.Series]]:
    """Schema and vocabularies of a data set that `data.prepare` made.

    Raises:
        ValueError: another program made it, and raw rows are unknown.
    """
    maker = manifest.provenance.get("maker")
    if maker != PREPARE:
        raise ValueError(
            f"the data set at {uri} does not say how raw rows become ids (made by {maker or 'others'}); "
            "only data sets of data.convert and data.prepare do"
        )
    rule = manifest.provenance["identity"]["ids"]
    takes_rows = rule in ("modulo", "hash")
    schema = Schema(
        label=Label(column=LABEL),
        dense=tuple(Dense(column=name, log1p=True) for name in manifest.dense),
        sparse=tuple(
            Sparse(
                column=feature.name, type="hex", ids=_RULES[rule], rows=feature.rows if takes_rows else None
            )
            for feature in manifest.features
        ),
    )
    names = [feature.name for feature in manifest.features] if rule == "vocabulary" else []
    return schema, {name: _values(uri, name) for name in names}


def _values(uri: str, name: str) -> pl.Series:
    """Values of a vocabulary that `data.prepare` wrote as npy, uint32 `[2, n]`: values, ids."""
    filesystem, folder = open_folder(uri)
    with filesystem.open_input_file(f"{folder}/vocabulary/{name}.npy") as stream:
        values, ids = np.load(io.BytesIO(stream.read()))
    return pl.Series(values[np.argsort(ids)].astype(np.int64))
