"""Pieces: some rows of a shard with all their columns, as they travel to a mirror and are kept there.

A piece is four integers (number of the shard, number of rows, first row or -1, bytes of the piece), the rows'
numbers within the shard (int64, unless they are consecutive) and the columns by name. Each part begins at a
multiple of 8 bytes, so that it can be used in place.

Rows are copied by numpy as opaque units of bytes: for the few hundred rows of a table that a step changes,
the calls cost more than the bytes, and those of torch several times as much.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

HEADER_BYTES: Final = 32
ALIGNMENT: Final = 8
_LISTED: Final = -1
"""First row of a piece whose rows are listed."""

Array = np.ndarray[Any, np.dtype[Any]]


class ShardRows:
    """The rows of a shard as units of bytes, one array for each column.

    Args:
        columns: live, `[num_rows, ...]` by name, on any device.
    """

    def __init__(self, columns: Mapping[str, Tensor]) -> None:
        self.columns = [columns[name].detach() for name in sorted(columns)]
        self.num_rows = self.columns[0].shape[0]
        self.row_bytes = [each.element_size() * each.shape[1:].numel() for each in self.columns]
        self._units: list[Array | None] = [
            _as_units(each, num_bytes) if each.device.type == "cpu" and each.is_contiguous() else None
            for each, num_bytes in zip(self.columns, self.row_bytes, strict=True)
        ]
        """None: of a column that is not contiguous in host memory."""

    def piece_bytes(self, num_rows: int, *, listed: bool) -> int:
        """Bytes of a piece of so many rows."""
        of_rows = _padded(8 * num_rows) if listed else 0
        return HEADER_BYTES + of_rows + sum(_padded(num_rows * each) for each in self.row_bytes)

    def rows_within(self, num_bytes: int) -> int:
        """Rows, at least one, whose piece has at most about so many bytes."""
        return max(1, num_bytes // (8 + sum(self.row_bytes)))

    def read(self, rows: slice | Array, parts: Sequence[Array]) -> None:
        """Copy rows into units of bytes `[n]`, one array for each column."""
        for number, (units, part) in enumerate(zip(self._units, parts, strict=True)):
            if units is None:
                source = self.columns[number]
                found = source[rows if isinstance(rows, slice) else torch.from_numpy(rows).to(source.device)]
                part[:] = _as_units(found.cpu().contiguous(), self.row_bytes[number])
            elif isinstance(rows, slice):
                part[:] = units[rows]
            else:
                np.take(units, rows, out=part, mode="clip")  # other modes buffer the output

    def write(self, piece: "Piece") -> None:
        """Put the rows of a piece in place; all columns are contiguous in host memory."""
        for units, part in zip(self._units, piece.parts, strict=True):
            assert units is not None
            units[piece.rows] = part


@dataclass(frozen=True, eq=False)
class Piece:
    """Views into the bytes of a piece."""

    shard: int
    """Number of the shard among those of its owner."""
    rows: slice | Array
    """Rows of the shard, from 0: consecutive, or int64 `[n]`."""
    parts: list[Array]
    """Units of bytes `[n]`, in the order of `ShardRows.columns`."""


def write_piece(buffer: Tensor, number: int, shard: ShardRows, rows: slice | Tensor) -> int:
    """Copy rows of a shard to the beginning of a buffer; returns the bytes of the piece.

    Args:
        buffer: uint8 on the CPU, with at least `ShardRows.piece_bytes`.
        number: of the shard.
        shard: live rows.
        rows: with a beginning and an end, or int64 `[n]` on the CPU.
    """
    listed = isinstance(rows, Tensor)
    num_rows = rows.numel() if isinstance(rows, Tensor) else rows.stop - rows.start
    num_bytes = shard.piece_bytes(num_rows, listed=listed)
    data = buffer.numpy()[:num_bytes]
    first = _LISTED if isinstance(rows, Tensor) else rows.start
    data[:HEADER_BYTES].view(np.int64)[:] = number, num_rows, first, num_bytes
    listing, parts = _parts(data, shard, num_rows, listed=listed)
    if isinstance(rows, Tensor):
        listing[:] = rows.numpy()
    shard.read(rows if isinstance(rows, slice) else listing, parts)
    return num_bytes


def read_pieces(data: Tensor, shards: Sequence[ShardRows]) -> Iterator[Piece]:
    """The pieces in `data`, uint8 `[n]` on the CPU, as views.

    Raises:
        ValueError: the bytes are no pieces of these shards.
    """
    array, begin = data.numpy(), 0
    while begin < len(array):
        if len(array) - begin < HEADER_BYTES:
            raise ValueError(f"{len(array) - begin} bytes are left, fewer than a header")
        header = array[begin : begin + HEADER_BYTES].view(np.int64).tolist()
        number, num_rows, first, num_bytes = header
        if not 0 <= number < len(shards):
            raise ValueError(f"there is no shard {number}")
        shard, listed = shards[number], first == _LISTED
        wanted = shard.piece_bytes(num_rows, listed=listed) if num_rows >= 0 else -1
        if num_bytes != wanted or num_bytes > len(array) - begin:
            raise ValueError(f"a piece of {num_rows} rows has {num_bytes} bytes instead of {wanted}")
        listing, parts = _parts(array[begin : begin + num_bytes], shard, num_rows, listed=listed)
        rows = listing if listed else slice(first, first + num_rows)
        fits = 0 <= first <= shard.num_rows - num_rows
        if listed:
            fits = not num_rows or (listing.min() >= 0 and listing.max() < shard.num_rows)
        if not fits:
            raise ValueError(f"a piece has rows outside of the {shard.num_rows} rows of shard {number}")
        yield Piece(number, rows, parts)
        begin += num_bytes


def unique_rows(rows: Sequence[Tensor]) -> Tensor:
    """All rows in these tensors once, ascending: int64 `[n]` of int64 `[m]` each, none negative."""
    ordered = np.sort(np.concatenate([each.numpy() for each in rows]))  # faster than `torch.unique`
    return torch.from_numpy(ordered[np.flatnonzero(np.diff(ordered, prepend=-1))])


def _parts(piece: Array, shard: ShardRows, num_rows: int, *, listed: bool) -> tuple[Array, list[Array]]:
    """Views of the row numbers (empty if not listed) and of each column in the bytes of a piece."""
    listing = piece[HEADER_BYTES : HEADER_BYTES + 8 * num_rows * listed].view(np.int64)
    at, parts = HEADER_BYTES + (_padded(8 * num_rows) if listed else 0), []
    for row_bytes in shard.row_bytes:
        end = at + num_rows * row_bytes
        parts.append(piece[at:end].view(np.dtype((np.void, row_bytes))))
        at += _padded(num_rows * row_bytes)
    return listing, parts


def _as_units(column: Tensor, row_bytes: int) -> Array:
    """`[num_rows, ...]`, contiguous on the CPU, as `[num_rows]` units of bytes."""
    flat: Array = column.reshape(-1).view(torch.uint8).numpy()
    return flat.view(np.dtype((np.void, row_bytes)))


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
