"""Makes checked rows of messages: JSON objects, and lines of Criteo's logs."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import compress
from typing import Any, Final

import numpy as np
import polars as pl
import pyarrow as pa
from numpy.typing import NDArray

from data.convert.read.jsonl import JsonParser
from data.criteo import PREPARE
from data.dataset import DatasetManifest
from data.schema import Schema
from data.stream.records import RecordReader, criteo_rows
from data.stream.source import Checked

NO_VALUE: Final = "no value"
_LARGEST: Final = int(np.finfo(np.float32).max)
_Parsed = tuple[pl.DataFrame, Mapping[int, str]]
"""Raw rows of the good ones of some lines, and the reasons of the others by their positions."""


class MessageReader:
    """Reads messages by the columns of a data set.

    Encoded, a message is a JSON object with the manifest's columns: ids and weights as numbers or lists of
    them. Raw, it is one with the columns that the data set was made of; those with a `separator` in the
    schema hold texts, other lists are JSON lists. If `data.prepare` made the data set, a raw message may be
    a line of Criteo's logs instead.

    Args:
        dataset: URI of the data set.
        manifest: its manifest.
        name: of the topic, for messages of errors.
        is_encoded: as for `RecordReader`.

    Raises:
        ValueError: the data set does not say how raw rows become its columns.
    """

    def __init__(self, dataset: str, manifest: DatasetManifest, name: str, *, is_encoded: bool) -> None:
        self._manifest, self._name = manifest, name
        self._records = RecordReader(dataset, manifest, is_encoded)
        self._takes_criteo = manifest.provenance.get("maker") == PREPARE
        encoder = self._records.encoder
        self._parser = None if encoder is None else JsonParser(encoder.schema.columns, _lists(encoder.schema))

    def read(self, values: Sequence[bytes | None], records: NDArray[np.int64]) -> Checked:
        """Read messages.

        Args:
            values: of the messages; None or blank: a bad record.
            records: their offsets, ascending `[n]`.
        """
        is_there = np.array([bool(value and value.strip()) for value in values], bool)
        given = [value for value in compress(values, is_there) if value is not None]
        bad = dict.fromkeys(records[~is_there].tolist(), NO_VALUE)
        left = records[is_there]
        if not given:
            return Checked(rows=None, records=left, bad=bad)
        checked = self._encoded(given, left) if self._parser is None else self._raw(given, left, self._parser)
        return replace(checked, bad={**bad, **checked.bad})

    def _raw(self, values: Sequence[bytes], records: NDArray[np.int64], parser: JsonParser) -> Checked:
        is_line = np.array(
            [self._takes_criteo and not value.lstrip().startswith(b"{") for value in values], bool
        )
        frames: list[pl.DataFrame] = []
        numbers: list[NDArray[np.int64]] = []
        bad: dict[int, str] = {}
        ways: list[tuple[NDArray[np.bool_], Callable[[Sequence[bytes]], _Parsed]]] = [
            (~is_line, lambda lines: _json_rows(parser, lines)),
            (is_line, _criteo_rows),
        ]
        for chosen, parse in ways:
            if chosen.any():
                frame, reasons = parse(list(compress(values, chosen)))
                frames.append(frame.select(self._records.columns))
                numbers.append(np.delete(records[chosen], sorted(reasons)))
                bad |= {int(records[chosen][at]): reason for at, reason in reasons.items()}
        found = np.concatenate(numbers)
        order = np.argsort(found)
        checked = self._records.of_frame(pl.concat(frames)[order], found[order], self._name)
        return replace(checked, bad={**bad, **checked.bad})

    def _encoded(self, values: Sequence[bytes], records: NDArray[np.int64]) -> Checked:
        rows, good, bad = [], [], {}
        for record, value in zip(records.tolist(), values, strict=True):
            try:
                rows.append(_encoded_row(value, self._manifest))
                good.append(record)
            except ValueError as error:
                bad[record] = str(error)
        if not rows:
            return Checked(rows=None, records=records[:0], bad=bad)
        names, ids = self._manifest.columns, {feature.name for feature in self._manifest.features}
        kinds = [pa.int64() if name in ids else pa.float64() for name in names]
        table = pa.table(list(map(_array, zip(*rows, strict=True), kinds)), names=list(names))
        checked = self._records.of_table(table, np.array(good, np.int64), self._name)
        return replace(checked, bad={**bad, **checked.bad})


def _lists(schema: Schema) -> set[str]:
    """Columns of raw JSON objects that hold lists."""
    with_lists = [sparse for sparse in schema.sparse if sparse.is_list and not sparse.separator]
    return {name for sparse in with_lists for name in (sparse.column, sparse.weights) if name}


def _json_rows(parser: JsonParser, lines: Sequence[bytes]) -> _Parsed:
    # JSON takes a line end for a blank
    frame, bad = parser.parse([line.replace(b"\n", b" ") for line in lines], 0)
    return frame, {each.row: each.reason for each in bad}


def _criteo_rows(lines: Sequence[bytes]) -> _Parsed:
    # a line end within a message makes it a bad line, not two
    whole = [line.rstrip(b"\r\n").replace(b"\n", b"\0") + b"\n" for line in lines]
    frame, bad = criteo_rows(b"".join(whole))
    return frame, {line.index: line.reason for line in bad}


def _encoded_row(value: bytes, manifest: DatasetManifest) -> list[Any]:
    """Columns of a message in the manifest's order: floats and integers, or lists of them.

    Raises:
        ValueError: a column is missing or of a wrong type.
    """
    try:
        found = json.loads(value)
    except (ValueError, RecursionError) as error:
        raise ValueError("no JSON") from error
    if not isinstance(found, dict):
        raise ValueError("no JSON object")
    label = found.get(manifest.label)
    row = [_number(int(label) if isinstance(label, bool) else label, manifest.label)]
    row += [_number(found.get(name), name) for name in manifest.dense]
    for feature in manifest.features:
        ids = found.get(feature.name)
        for each in ids if isinstance(ids, list) else (ids,):
            if type(each) is not int or not -(1 << 63) <= each < 1 << 63:
                raise ValueError(f"{feature.name} holds no integer of 64 bits, and no list of them")
        row.append(ids)
    for name in manifest.columns[len(row) :]:
        weights = found.get(name)
        if isinstance(weights, list):
            row.append([_number(each, name) for each in weights])
        else:
            row.append(_number(weights, name))
    return row


def _number(value: Any, name: str) -> Any:
    if type(value) is float or (type(value) is int and -_LARGEST <= value <= _LARGEST):
        return float(value)
    raise ValueError(f"{name} holds no number")


def _array(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    """A column, of lists if one value is a list."""
    if any(isinstance(value, list) for value in values):
        return pa.array([value if isinstance(value, list) else [value] for value in values], pa.list_(kind))
    return pa.array(values, kind)
