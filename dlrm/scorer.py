"""Scores rows with a program of `dlrm.export`: no run, process group or TorchRec is needed.

In a service, `Scorer("model.pt2").score(rows)` turns a polars frame of raw rows into probabilities.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import polars as pl
import torch
from numpy.typing import NDArray
from torch import Tensor

from data.convert.read.files import input_file
from data.jobs.location import Location
from data.schema import Encoder

METADATA_NAME: Final = "metadata.json"
"""Name of the metadata among the extra files of a program."""
BLOCK_BYTES: Final = 1 << 20
"""Of a file that are read, encoded and scored at once."""


class Scorer:
    """An exported program, and what makes its inputs of raw rows.

    Args:
        path: file that `dlrm.export` wrote.

    Raises:
        ValueError: it is no such file.
    """

    def __init__(self, path: str | Path) -> None:
        extra = {METADATA_NAME: ""}
        try:
            self._program = torch.export.load(path, extra_files=extra).module()
            self.metadata: dict[str, Any] = json.loads(extra[METADATA_NAME])
        except Exception as error:  # torch raises errors of any type
            raise ValueError(f"{path} cannot be loaded as a .pt2 file of dlrm.export: {error}") from error
        state = self.metadata["encoder"]
        self.encoder = Encoder.from_state(state) if state else None
        """Of raw rows; None if the model was trained on data that was not made of any (`data.synthetic`)."""

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns that rows must have: those of raw rows, or of the data set if there is no encoder."""
        if self.encoder is not None:
            return self.encoder.schema.inputs
        features = self.metadata["features"]
        weights = dict.fromkeys(each["weights"] for each in features if each["weights"])
        return (*self.metadata["dense"], *(each["name"] for each in features), *weights)

    def score(self, rows: pl.DataFrame) -> NDArray[np.float32]:
        """Probabilities of a click, `[n]`, of n rows with the `columns`.

        Raises:
            ValueError: a column or value does not fit, or the model gives no logits.
        """
        if not len(rows):
            return np.empty(0, np.float32)
        encoded = rows if self.encoder is None else self.encoder.encode(rows)
        lacking = self.metadata["least_samples"] - len(encoded)
        if lacking > 0:
            encoded = pl.concat([encoded, *[encoded[:1]] * lacking])
        with torch.no_grad():
            logits = self._program(*self._inputs(encoded))
        if not isinstance(logits, Tensor):
            raise ValueError("the model gives no logits, so there are no scores")
        scores: NDArray[np.float32] = logits[: len(rows)].sigmoid().numpy()
        return scores

    def score_file(self, path: str | Path) -> Iterator[NDArray[np.float32]]:
        """Probabilities of the rows of a CSV, TSV, JSON lines or Parquet file, in order, in blocks.

        Raises:
            ValueError: the file, a column or a row cannot be read; there are no scores for later ones.
        """
        file = input_file(Location.of(path), str(path), self.columns)
        if self.encoder is None and file.format != "parquet":
            raise ValueError(
                f"{path}: this model was trained on data that was not made from raw rows, and takes the "
                "Parquet files of such data"
            )
        for block in file.blocks(self.columns, 0, BLOCK_BYTES):
            for bad in block.bad:
                raise ValueError(f"{path}, row {bad.row}: {bad.reason}")
            try:
                yield self.score(block.frame)
            except ValueError as error:
                first = block.rows[0]
                raise ValueError(f"{path}, counted from row {first}: {error}") from error

    def _inputs(self, rows: pl.DataFrame) -> list[Any]:
        """Arguments of the program for encoded rows."""
        dense = [torch.tensor(rows[name].to_numpy()) for name in self.metadata["dense"]]
        bags = {each["name"]: _flat(rows[each["name"]]) for each in self.metadata["features"]}
        for name in self.metadata["with_one_id"]:
            if not bool((bags[name][1].diff() == 1).all()):
                raise ValueError(f"this model takes exactly one id of {name} in every row")
        weighted = {each["name"]: each["weights"] for each in self.metadata["features"] if each["weights"]}
        weights = {name: _flat(rows[column])[0].float() for name, column in weighted.items()}
        return [
            torch.stack(dense, 1).float() if dense else torch.empty(len(rows), 0),
            {name: ids.long() for name, (ids, _) in bags.items()},
            {name: offsets for name, (_, offsets) in bags.items()},
            *([weights] if weights else []),
        ]


def _flat(column: pl.Series) -> tuple[Tensor, Tensor]:
    """Values `[N]` of a column of single values or lists, and the offsets `[B + 1]` of its rows."""
    is_list = isinstance(column.dtype, pl.List)
    values = column.to_arrow().flatten() if is_list else column.to_arrow()
    lengths = column.list.len().to_numpy() if is_list else np.ones(len(column), np.int64)
    return torch.tensor(values.to_numpy()), torch.tensor(np.cumsum([0, *lengths]))
