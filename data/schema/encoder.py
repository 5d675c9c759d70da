"""Encodes raw rows as the columns of a data set: the one way, in training and in scoring."""

import json
from collections.abc import Mapping
from typing import Any, Final

import polars as pl

from data.dataset import Feature, open_folder, read_manifest
from data.schema.criteo import criteo_encoding
from data.schema.definition import Schema, Sparse
from data.schema.ids import Vocabulary, to_ids
from data.schema.lists import Ragged
from data.schema.rows import read_rows

VOCABULARY_FOLDER: Final = "vocabulary"
_SCHEMA_KEY: Final = "schema"
_VOCABULARY_KEY: Final = "vocabulary:"


class Encoder:
    """Encodes raw rows by a schema and its vocabularies.

    Args:
        schema: how; dense columns with `standardize` have their mean and std.
        vocabularies: for each feature with that rule, its values (String, or Int64 for the types `integer`
            and `hex`) in the order of their ids, which begin at 2.

    Raises:
        ValueError: a vocabulary is missing, or a mean.
    """

    def __init__(self, schema: Schema, vocabularies: Mapping[str, pl.Series]) -> None:
        self.schema = schema
        wanted = [sparse.name for sparse in schema.sparse if sparse.ids == "vocabulary"]
        absent = [name for name in wanted if name not in vocabularies]
        if absent:
            raise ValueError(f"feature {absent[0]!r} has no vocabulary; convert the data again")
        bare = [dense.name for dense in schema.dense if dense.standardize and dense.mean is None]
        if bare:
            raise ValueError(f"dense column {bare[0]!r} has no mean and std yet; they come from data.convert")
        self.vocabularies = {name: Vocabulary(vocabularies[name]) for name in wanted}

    @classmethod
    def of_dataset(cls, uri: str) -> "Encoder":
        """The encoder that made a data set (`data.convert`), or an equal one (`data.prepare`).

        Raises:
            ValueError: there is no data set, or it does not say how it was made.
            OSError: a file cannot be read.
        """
        manifest = read_manifest(uri)
        if manifest.schema:
            schema = Schema.from_json(manifest.schema)
            return cls(schema, {one.name: read_vocabulary(uri, one) for one in _with_vocabulary(schema)})
        return cls(*criteo_encoding(uri, manifest))

    @property
    def features(self) -> tuple[Feature, ...]:
        """Features of the data set, with the rows of their tables."""
        return tuple(
            Feature(name=sparse.name, rows=self._rows(sparse), weights=sparse.weights_name)
            for sparse in self.schema.sparse
        )

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns of the data set that are inputs of a model: dense, ids, weights."""
        weights = [feature.weights for feature in self.features if feature.weights]
        return (
            *(dense.name for dense in self.schema.dense),
            *(sparse.name for sparse in self.schema.sparse),
            *weights,
        )

    def encode(self, frame: pl.DataFrame | pl.LazyFrame) -> pl.DataFrame:
        """Encode raw rows.

        Args:
            frame: raw rows, with the columns of `schema.inputs`, of any type that looks alike as a text.

        Returns:
            As many rows, with the columns `columns`: dense Float32, ids Int32 (raw: Int64) or lists of them,
            weights List(Float32).

        Raises:
            ValueError: a column is missing or of a wrong type, or a value cannot be read.
        """
        table = frame.collect() if isinstance(frame, pl.LazyFrame) else frame
        rows = read_rows(table, self.schema, to_train=False)
        if rows.reasons:
            first = min(rows.reasons)
            bad = f"{len(rows.reasons):,} of {table.height:,} rows cannot be encoded"
            raise ValueError(f"{bad}; the first is row {first}: {rows.reasons[first]}")
        return self.encode_read(rows.frame).select(self.columns)

    def encode_read(self, frame: pl.DataFrame) -> pl.DataFrame:
        """Encode what `read_rows` has read: standardize dense values, and replace values by ids."""
        made = [
            ((frame[dense.name].cast(pl.Float64) - dense.mean) / dense.std).cast(pl.Float32)
            for dense in self.schema.dense
            if dense.standardize
        ]
        for sparse in self.schema.sparse:
            column, vocabulary = frame[sparse.name], self.vocabularies.get(sparse.name)
            if sparse.is_list:
                bag = Ragged.of(column)
                made.append(bag.series(to_ids(bag.values, sparse, vocabulary)).alias(sparse.name))
            else:
                made.append(to_ids(column, sparse, vocabulary).alias(sparse.name))
        return frame.with_columns(made)

    def state(self) -> dict[str, str]:
        """Everything as texts of JSON, for a file that `from_state` reads."""
        texts = {_SCHEMA_KEY: json.dumps(self.schema.to_json())}
        for name, vocabulary in self.vocabularies.items():
            texts[_VOCABULARY_KEY + name] = json.dumps(vocabulary.values.to_list(), ensure_ascii=False)
        return texts

    @classmethod
    def from_state(cls, state: Mapping[str, str]) -> "Encoder":
        """The encoder of a `state`; other keys in it are ignored."""
        schema = Schema.from_json(json.loads(state[_SCHEMA_KEY]))
        values: dict[str, pl.Series] = {}
        for sparse in _with_vocabulary(schema):
            listed: list[Any] = json.loads(state[_VOCABULARY_KEY + sparse.name])
            values[sparse.name] = pl.Series(listed, dtype=value_dtype(sparse))
        return cls(schema, values)

    def _rows(self, sparse: Sparse) -> int:
        if sparse.ids == "vocabulary":
            return self.vocabularies[sparse.name].num_rows
        return sparse.rows or 0


def vocabulary_path(name: str) -> str:
    """Path of a feature's vocabulary in the data set's folder: columns `value` and `id`, in order of id."""
    return f"{VOCABULARY_FOLDER}/{name}.parquet"


def value_dtype(sparse: Sparse) -> pl.DataType:
    """Type of a feature's values."""
    return pl.String() if sparse.type == "string" else pl.Int64()


def read_vocabulary(uri: str, sparse: Sparse) -> pl.Series:
    """Values of a feature's vocabulary in the order of their ids."""
    filesystem, folder = open_folder(uri)
    with filesystem.open_input_file(f"{folder}/{vocabulary_path(sparse.name)}") as stream:
        return pl.read_parquet(stream.read())["value"]


def _with_vocabulary(schema: Schema) -> list[Sparse]:
    return [sparse for sparse in schema.sparse if sparse.ids == "vocabulary"]
