"""Rounded weights on the way to a mirror, and the rest that makes them exact again, with nothing lost.

A changed row travels with rounded weights. Its owner notes that it owes the rest, in one byte a row, and
sends that in a later moment if the row has not changed since; a row that changes again travels as a whole
again. So errors never add up, and the mirror becomes bit for bit what the rows are once they rest. This is
error feedback without a second copy of the table, which would hold the errors otherwise.

The rest of a weight in bfloat16 is the other 16 bits, which also say whether the first ones were rounded up:
both together are as long as the weight, so that sending in two parts never costs more than sending at once.
The rest of weights in int8 is the weights as they are.
"""

from collections.abc import Mapping
from enum import IntEnum
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from cpr.mirror.config import WireDtype

SCAN_ROWS: Final = 1 << 22
"""Rows that are looked at in one moment for those that owe a rest: less than a millisecond."""
BLOCK_ROWS: Final = 1 << 16
"""Rows that are looked at together, so that few are listed beyond those that are taken."""
LARGEST_INT8: Final = 127

Array = np.ndarray[Any, np.dtype[Any]]


class Form(IntEnum):
    """What a piece has of its rows."""

    EXACT = 0
    """All columns as they are."""
    BF16 = 1
    """All columns; weights rounded to bfloat16."""
    BF16_REST = 2
    """What `BF16` leaves of the weights."""
    INT8 = 3
    """All columns; weights as int8, with a scale (float32) for each row, whose largest weight is 127."""
    WEIGHTS = 4
    """The weights as they are."""

    @property
    def has_all_columns(self) -> bool:
        """Whether there are other columns than the weights."""
        return self not in {Form.BF16_REST, Form.WEIGHTS}

    def weight_bytes(self, exact_bytes: int) -> int:
        """Bytes of a row's weights, which are `exact_bytes` as float32."""
        if self in {Form.BF16, Form.BF16_REST}:
            return exact_bytes // 2
        return exact_bytes // 4 + 4 if self is Form.INT8 else exact_bytes


ROUNDED: Final[Mapping[WireDtype, Form]] = {"fp32": Form.EXACT, "bf16": Form.BF16, "int8": Form.INT8}
REST: Final[Mapping[Form, Form]] = {Form.BF16: Form.BF16_REST, Form.INT8: Form.WEIGHTS}


def encode(form: Form, weights: Array) -> Array:
    """Encode float32 `[n, cols]` as bytes: uint8 `[n, Form.weight_bytes]`."""
    if form is Form.BF16:
        return ((weights.view(np.uint32) + np.uint32(0x8000)) >> 16).astype(np.uint16).view(np.uint8)
    if form is Form.BF16_REST:
        return weights.view(np.uint32).astype(np.uint16).view(np.uint8)
    if form is Form.INT8:
        scales = np.abs(weights).max(1, keepdims=True) / np.float32(LARGEST_INT8)
        with np.errstate(invalid="ignore", divide="ignore"):  # rows of zeros, and those that are not finite
            values = np.nan_to_num(weights / scales, posinf=LARGEST_INT8, neginf=-LARGEST_INT8)
        return np.concatenate([scales.view(np.uint8), np.rint(values).astype(np.int8).view(np.uint8)], 1)
    return weights.view(np.uint8)


def decode(form: Form, data: Array, held: Array) -> Array:
    """Decode what `encode` made, into float32 `[n, cols]`.

    `held` is what the mirror has of these rows, float32 `[n, cols]`: for a rest, their rounded weights, or
    the exact ones, if the same rest was written before.
    """
    if form is Form.BF16:
        return (data.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    if form is Form.BF16_REST:
        rounded = (held.view(np.uint32) + np.uint32(0x8000)) & np.uint32(0xFFFF0000)
        return (rounded + data.view(np.int16).astype(np.int32).view(np.uint32)).view(np.float32)
    if form is Form.INT8:
        scales = np.ascontiguousarray(data[:, :4]).view(np.float32)
        return data[:, 4:].view(np.int8).astype(np.float32) * scales
    return data.view(np.float32)


class RoundedRows:
    """Notes which rows a mirror has with rounded weights.

    Args:
        num_rows: of each shard whose rows travel rounded, by its number.
    """

    def __init__(self, num_rows: Mapping[int, int]) -> None:
        self._shards = list(num_rows)
        self._edges = np.cumsum([0, *num_rows.values()])
        self._is_rounded = np.zeros(self._edges[-1], bool)
        self._hand = 0
        """Where the search for rounded rows goes on: so each has its turn."""
        self.count = 0
        """Number of rounded rows."""

    def add(self, rows: Mapping[int, Tensor]) -> None:
        """Note that these rows travel rounded; rows of shards that never do are ignored."""
        self._set(rows, True)

    def discard(self, rows: Mapping[int, Tensor]) -> None:
        """Note that these rows travel as a whole again, or not at all."""
        self._set(rows, False)

    def clear(self) -> None:
        """Note that no rows are rounded any more."""
        self._is_rounded[:] = False
        self.count = 0

    def take(self, limit: int) -> dict[int, Tensor]:
        """At most so many rounded rows, which travel exactly now: int64 `[n]` by number of the shard."""
        total, parts, scanned = len(self._is_rounded), list[Array](), 0
        while scanned < min(SCAN_ROWS, total) and limit and self.count:
            end = min(self._hand + BLOCK_ROWS, self._hand + total - scanned, total)
            found = self._hand + np.flatnonzero(self._is_rounded[self._hand : end])[:limit]
            parts.append(found)
            self._is_rounded[found] = False
            self.count -= found.size
            limit -= found.size
            scanned += end - self._hand
            self._hand = (end if limit else int(found[-1]) + 1) % total
        joint = np.sort(np.concatenate([np.empty(0, np.int64), *parts]))
        edges = np.searchsorted(joint, self._edges)
        return {
            shard: torch.from_numpy(joint[edges[place] : edges[place + 1]] - self._edges[place])
            for place, shard in enumerate(self._shards)
            if edges[place] < edges[place + 1]
        }

    def _set(self, rows: Mapping[int, Tensor], value: bool) -> None:
        for place, shard in enumerate(self._shards):
            if shard in rows:
                flags = self._is_rounded[self._edges[place] : self._edges[place + 1]]
                chosen = rows[shard].numpy()
                were = int(np.count_nonzero(flags[chosen]))
                flags[chosen] = value
                self.count += (chosen.size if value else 0) - were
