"""Pieces: some rows of a shard with all their columns, as they travel to a mirror and are kept there.

A piece is five integers (number of the shard, number of rows, first row or -1, bytes of the piece, `Form`),
the rows' numbers within the shard (int64, unless they are consecutive) and the columns by name, or, in some
forms, the weights alone. Each part begins at a multiple of 8 bytes, so that it can be used in place.

Rows are copied by numpy as opaque units of bytes: for the few hundred rows of a table that a step changes,
the calls cost more than the bytes, and those of torch several times as much.
"""

import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from cpr.mirror.rounding import Array, Form, decode, encode

HEADER: Final = struct.Struct("=5q")
ALIGNMENT: Final = 8
NUMBERS: Final = "mirrored_row"
"""Column of a mirror that holds some rows of a shard: the number of the row in each slot, from 1; 0: none."""
_LISTED: Final = -1
"""First row of a piece whose rows are listed."""

UnitDtype = np.dtype[np.void]


class ShardRows:
    """The rows of a shard as units of bytes, one array for each column.

    Args:
        columns: live, `[num_rows, ...]` by name, on any device.
        is_numbered: whether its pieces have the column `NUMBERS` as well, for a mirror of some rows.
    """

    def __init__(self, columns: Mapping[str, Tensor], *, is_numbered: bool = False) -> None:
        self.num_rows = columns["weights"].shape[0]
        if is_numbered:
            columns = {**columns, NUMBERS: torch.empty(0, dtype=torch.int64)}  # it is never read
        self.columns = [columns[name].detach() for name in sorted(columns)]
        self.weights = sorted(columns).index("weights")
        """Number of the weights among the columns."""
        self._numbers = sorted(columns).index(NUMBERS) if is_numbered else None
        self.can_round = columns["weights"].dtype == torch.float32
        """Whether the weights may travel in other forms than `Form.EXACT`."""
        self.row_bytes = [each.element_size() * each.shape[1:].numel() for each in self.columns]
        self._units: list[Array | None] = [
            _as_units(each, num_bytes) if each.device.type == "cpu" and each.is_contiguous() else None
            for each, num_bytes in zip(self.columns, self.row_bytes, strict=True)
        ]
        """None: of a column that is not contiguous in host memory."""
        self._dtypes: dict[Form, dict[int, UnitDtype]] = {}

    def dtypes(self, form: Form) -> dict[int, UnitDtype]:
        """Unit of bytes of a row in each column that a piece of this form has, by number of the column."""
        if form not in self._dtypes:
            widths = {self.weights: form.weight_bytes(self.row_bytes[self.weights])}
            if form.has_all_columns:
                widths = dict(enumerate(self.row_bytes)) | widths
            self._dtypes[form] = {number: np.dtype((np.void, width)) for number, width in widths.items()}
        return self._dtypes[form]

    def piece_bytes(self, num_rows: int, *, listed: bool, form: Form = Form.EXACT) -> int:
        """Bytes of a piece of so many rows."""
        of_rows = _padded(8 * num_rows) if listed else 0
        return (
            HEADER.size
            + of_rows
            + sum(_padded(num_rows * each.itemsize) for each in self.dtypes(form).values())
        )

    def rows_within(self, num_bytes: int) -> int:
        """Rows, at least one, whose piece has at most about so many bytes."""
        return max(1, num_bytes // (8 + sum(self.row_bytes)))

    def read(self, rows: slice | Array, parts: Mapping[int, Array], form: Form = Form.EXACT) -> None:
        """Copy rows into bytes, one array of units `[n]` for each column of the form."""
        for number, part in parts.items():
            if form is Form.EXACT or number != self.weights:
                self._gather(number, rows, part)
            else:
                weights = np.empty(len(part), np.dtype((np.void, self.row_bytes[number])))
                self._gather(number, rows, weights)
                _bytes_of(part)[:] = encode(form, _bytes_of(weights).view(np.float32))

    def exact(self, piece: "Piece") -> "Piece":
        """The piece with weights that are not rounded; with those that are held, where it has their rest."""
        if piece.form is Form.EXACT:
            return piece
        held = _bytes_of(self.held(self.weights, piece.rows)).view(np.float32)
        weights = decode(piece.form, _bytes_of(piece.parts[self.weights]), held)
        dtype = np.dtype((np.void, self.row_bytes[self.weights]))
        parts = {**piece.parts, self.weights: weights.view(dtype).reshape(-1)}
        return replace(piece, parts=parts, form=Form.EXACT)

    def write(self, piece: "Piece") -> None:
        """Put the rows of an exact piece in place; all columns are contiguous in host memory."""
        assert piece.form is Form.EXACT
        for number, part in piece.parts.items():
            units = self._units[number]
            assert units is not None
            units[piece.rows] = part

    def held(self, number: int, rows: slice | Array) -> Array:
        """Units of bytes `[n]` of a column that is contiguous in host memory; a view, if rows are a slice."""
        units = self._units[number]
        assert units is not None
        return units[rows] if isinstance(rows, slice) else units.take(rows)

    @property
    def num_words(self) -> list[int]:
        """Integers of a row in each column, as `sum_of` has them."""
        return [width // _word(width).itemsize for width in self.row_bytes]

    @staticmethod
    def sum_of(units: Array, rows: slice | Array) -> Array:
        """Checksum of these rows of a column, `units` `[n]`: uint64 `[words of a row + 1]`, modulo 2**64."""
        words = _bytes_of(units).view(_word(units.itemsize))
        numbers = np.arange(rows.start, rows.stop) if isinstance(rows, slice) else rows
        by_row = words[:, 0] * (2 * numbers.astype(np.uint64) + 1)
        return np.append(words.sum(axis=0, dtype=np.uint64), by_row.sum())

    def _gather(self, number: int, rows: slice | Array, part: Array) -> None:
        units = self._units[number]
        if number == self._numbers:
            assert not isinstance(rows, slice)
            part.view(np.int64)[:] = rows + 1
        elif units is None:
            source = self.columns[number]
            found = source[rows if isinstance(rows, slice) else torch.from_numpy(rows).to(source.device)]
            part[:] = _as_units(found.cpu().contiguous(), self.row_bytes[number])
        elif isinstance(rows, slice):
            part[:] = units[rows]
        else:
            units.take(rows, out=part, mode="clip")  # other modes buffer the output


@dataclass(frozen=True, eq=False)
class Piece:
    """Views into the bytes of a piece."""

    shard: int
    """Number of the shard among those of its owner."""
    rows: slice | Array
    """Rows of the shard, from 0: consecutive, or int64 `[n]`."""
    parts: dict[int, Array]
    """Units of bytes `[n]` by number of the column (`ShardRows.columns`)."""
    form: Form


def write_piece(
    buffer: Tensor,
    number: int,
    shard: ShardRows,
    rows: slice | Tensor,
    form: Form = Form.EXACT,
    places: Tensor | None = None,
) -> int:
    """Copy rows of a shard to the beginning of a buffer; returns the bytes of the piece.

    Args:
        buffer: uint8 on the CPU, with at least `ShardRows.piece_bytes`.
        number: of the shard.
        shard: live rows.
        rows: with a beginning and an end, or int64 `[n]` on the CPU.
        form: only of a shard that `can_round` may it be another than `Form.EXACT`.
        places: of listed rows in the mirror, int64 `[n]` on the CPU; None: as in the shard.
    """
    listed = isinstance(rows, Tensor)
    num_rows = rows.numel() if isinstance(rows, Tensor) else rows.stop - rows.start
    num_bytes = shard.piece_bytes(num_rows, listed=listed, form=form)
    data = buffer.numpy()[:num_bytes]
    first = _LISTED if isinstance(rows, Tensor) else rows.start
    HEADER.pack_into(data.data, 0, number, num_rows, first, num_bytes, form)
    listing, parts = _parts(data, shard, num_rows, form, listed=listed)
    if isinstance(rows, Tensor):
        listing[:] = (rows if places is None else places).numpy()
    shard.read(rows if isinstance(rows, slice) else rows.numpy(), parts, form)
    return num_bytes


def read_pieces(data: Tensor, shards: Sequence[ShardRows]) -> Iterator[Piece]:
    """The pieces in `data`, uint8 `[n]` on the CPU, as views.

    Raises:
        ValueError: the bytes are no pieces of these shards.
    """
    array, begin = data.numpy(), 0
    while begin < len(array):
        if len(array) - begin < HEADER.size:
            raise ValueError(f"{len(array) - begin} bytes are left, fewer than a header")
        number, num_rows, first, num_bytes, form_number = HEADER.unpack_from(array.data, begin)
        if not 0 <= number < len(shards):
            raise ValueError(f"there is no shard {number}")
        shard, listed, form = shards[number], first == _LISTED, Form(form_number)
        if form is not Form.EXACT and not shard.can_round:
            raise ValueError(f"shard {number} has no float32 weights that could be rounded")
        wanted = shard.piece_bytes(num_rows, listed=listed, form=form) if num_rows >= 0 else -1
        if num_bytes != wanted or num_bytes > len(array) - begin:
            raise ValueError(f"a piece of {num_rows} rows has {num_bytes} bytes instead of {wanted}")
        listing, parts = _parts(array[begin : begin + num_bytes], shard, num_rows, form, listed=listed)
        rows = listing if listed else slice(first, first + num_rows)
        fits = 0 <= first <= shard.num_rows - num_rows
        if listed:
            # as unsigned numbers, negative ones are large
            fits = not num_rows or listing.view(np.uint64).max() < shard.num_rows
        if not fits:
            raise ValueError(f"a piece has rows outside of the {shard.num_rows} rows of shard {number}")
        yield Piece(number, rows, parts, form)
        begin += num_bytes


def unique_rows(rows: Sequence[Tensor]) -> Tensor:
    """All rows in these tensors once, ascending: int64 `[n]` of int64 `[m]` each, none negative."""
    joined = np.concatenate([each.numpy() for each in rows])
    if joined.size and joined.max() <= np.iinfo(np.int32).max:
        joined = joined.astype(np.int32)  # which numpy sorts in half the time
    joined.sort()  # faster than `torch.unique`
    is_first = np.ones(len(joined), bool)
    np.not_equal(joined[1:], joined[:-1], out=is_first[1:])
    return torch.from_numpy(joined[is_first].astype(np.int64, copy=False))


def _parts(
    piece: Array, shard: ShardRows, num_rows: int, form: Form, *, listed: bool
) -> tuple[Array, dict[int, Array]]:
    """Views of the row numbers (empty if not listed) and of each column in the bytes of a piece."""
    listing = piece[HEADER.size : HEADER.size + 8 * num_rows * listed].view(np.int64)
    at, parts = HEADER.size + (_padded(8 * num_rows) if listed else 0), {}
    for number, dtype in shard.dtypes(form).items():
        num_bytes = num_rows * dtype.itemsize
        parts[number] = piece[at : at + num_bytes].view(dtype)
        at += _padded(num_bytes)
    return listing, parts


def _as_units(column: Tensor, row_bytes: int) -> Array:
    """`[num_rows, ...]`, contiguous on the CPU, as `[num_rows]` units of bytes."""
    flat: Array = column.reshape(-1).view(torch.uint8).numpy()
    return flat.view(np.dtype((np.void, row_bytes)))


def _bytes_of(units: Array) -> Array:
    """`[n]` units of bytes as uint8 `[n, bytes]`."""
    return units.view(np.uint8).reshape(len(units), units.itemsize)


def _word(num_bytes: int) -> np.dtype[Any]:
    """The widest unsigned integer of which a row of so many bytes has a whole number."""
    return np.dtype(f"u{math.gcd(num_bytes, 8)}")


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
