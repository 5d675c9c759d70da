"""What a schema file of `data.index` says: which columns are label, dense values, ids and weights."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pyarrow as pa

from data.dataset import DatasetManifest, Feature
from data.schema.definition import MOST_ROWS
from data.schema.parse import build_from_file

LABEL_NAMES: Final = ("label", "click", "clicked", "is_click", "target", "y")
"""Names by which `guess` knows a label."""


@dataclass(frozen=True, kw_only=True)
class LabelColumn:
    """Section `[label]`: 0 and 1, or false and true."""

    column: str
    """Column of the files."""


@dataclass(frozen=True, kw_only=True)
class DenseColumn:
    """Section `[[dense]]`: a finite number, which the model takes as it is."""

    column: str
    """Column of the files."""


@dataclass(frozen=True, kw_only=True)
class SparseColumn:
    """Section `[[sparse]]`: an id, or a list of ids, from 0 on."""

    column: str
    """Column of the files, and name of the feature."""
    rows: int | None = None
    """Rows of the table; default: the highest id + 1."""
    ids: str = ""
    """`raw`: ids are any 64-bit integers, for dynamic tables."""
    weights: str = ""
    """Column with one number for each id."""


@dataclass(frozen=True, kw_only=True)
class IndexSchema:
    """A whole schema file.

    Raises:
        ValueError: it contradicts itself; the message says what to change.
    """

    label: LabelColumn
    dense: tuple[DenseColumn, ...] = ()
    sparse: tuple[SparseColumn, ...] = ()

    def __post_init__(self) -> None:
        for sparse in self.sparse:
            where = f"[[sparse]] {sparse.column}"
            if sparse.ids not in ("", "raw"):
                raise ValueError(f'{where}: ids is "raw" or left out; other rules are for data.convert')
            if sparse.rows is not None and sparse.ids:
                raise ValueError(f'{where}: ids = "raw" has no rows; leave one of them out')
            if sparse.rows is not None and not 1 <= sparse.rows <= MOST_ROWS:
                raise ValueError(f"{where}: rows is between 1 and {MOST_ROWS}, not {sparse.rows}")
        self.manifest()

    @classmethod
    def from_toml(cls, path: Path) -> "IndexSchema":
        """Read a schema file.

        Raises:
            ValueError: it is not there, no TOML, or no valid schema.
        """
        return build_from_file(cls, path)

    def manifest(self) -> DatasetManifest:
        """A manifest without files; features without given rows have 0."""
        return DatasetManifest(
            features=tuple(
                Feature(name=sparse.column, rows=sparse.rows or 0, weights=sparse.weights)
                for sparse in self.sparse
            ),
            parts=(),
            dense=tuple(dense.column for dense in self.dense),
            label=self.label.column,
        )


def guess(columns: pa.Schema) -> str:
    """A schema file for these columns to start from: by name the label, by type all others."""
    names = [name for name in columns.names if name.lower() in LABEL_NAMES] or columns.names
    return "\n".join(_guessed(columns, names[0])) + "\n"


def _guessed(columns: pa.Schema, label: str) -> Iterator[str]:
    yield f"[label]  # 0 and 1, or false and true\ncolumn = {json.dumps(label, ensure_ascii=False)}"
    for name in columns.names:
        found = columns.field(name).type
        line = f"column = {json.dumps(name, ensure_ascii=False)}"
        of_list = found.value_type if pa.types.is_nested(found) and hasattr(found, "value_type") else None
        if name == label:
            continue
        if pa.types.is_floating(found):
            yield f"\n[[dense]]\n{line}"
        elif pa.types.is_integer(of_list or found):
            yield f"\n[[sparse]]\n{line}"
        else:
            may = " may be weights of a [[sparse]]," if of_list and pa.types.is_floating(of_list) else ""
            yield (
                f"\n# {line} ({found}){may} is left out" if may else f"\n# {line} ({found}): see data.convert"
            )
