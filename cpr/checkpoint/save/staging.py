"""Staging memory: a fixed number of host buffers that rows are copied into while training waits.

The pool limits the memory of saves: rows are copied only when a buffer is free. Its pages are touched once,
before they are needed, because the first touch of fresh memory is many times slower than later ones.
"""

import threading
from typing import Final

import torch
from torch import Tensor

PIECE_BYTES: Final = 4 * 2**20
"""Size of a buffer: large enough for an efficient write, small enough that a few stay in the CPU cache until
they are written."""
ALIGNMENT: Final = 64
"""Alignment of each column in a buffer, in bytes, as Arrow recommends."""


class StagingPool:
    """A pool of at least two buffers of `PIECE_BYTES` each; `pinned` for copies from CUDA."""

    def __init__(self, num_bytes: int, pinned: bool = False) -> None:
        self.num_buffers = max(2, num_bytes // PIECE_BYTES)
        self._pinned = pinned
        self._free: list[Tensor] = []
        self._num_made = 0
        self._changed = threading.Condition()

    def warm_up(self, num_bytes: int) -> None:
        """Allocate and touch as many buffers as `num_bytes` need, within the limit."""
        wanted = min(self.num_buffers, -(-num_bytes // PIECE_BYTES))
        while True:
            with self._changed:
                if self._num_made >= wanted:
                    return
                self._num_made += 1
            self.release(self._make())

    def acquire(self, timeout_s: float = 0.0) -> Tensor | None:
        """Take a buffer, uint8 `[PIECE_BYTES]`; None if none is free, or becomes free in time.

        `wake` ends the waiting, too.
        """
        with self._changed:
            if not self._free and self._num_made == self.num_buffers:
                self._changed.wait(timeout_s)
            if self._free:
                return self._free.pop()
            if self._num_made == self.num_buffers:
                return None
            self._num_made += 1
        return self._make()  # outside of the lock, as touching fresh pages takes long

    def release(self, buffer: Tensor) -> None:
        """Return a buffer."""
        with self._changed:
            self._free.append(buffer)
            self._changed.notify()

    def wake(self) -> None:
        """End the waiting of all threads in `acquire`."""
        with self._changed:
            self._changed.notify_all()

    def _make(self) -> Tensor:
        return torch.zeros(PIECE_BYTES, dtype=torch.uint8, pin_memory=self._pinned)


def place_columns(buffer: Tensor, columns: dict[str, Tensor], num_rows: int) -> dict[str, Tensor]:
    """Aligned views into a buffer, uint8 `[PIECE_BYTES]`, for some rows of each column.

    The views have dtype and width of `columns`, `[rows]` or `[rows, cols]`.
    """
    placed, begin = {}, 0
    for name, column in columns.items():
        shape = (num_rows, *column.shape[1:])
        num_bytes = torch.Size(shape).numel() * column.element_size()
        placed[name] = buffer[begin : begin + num_bytes].view(column.dtype).view(shape)
        begin += -(-num_bytes // ALIGNMENT) * ALIGNMENT
    return placed


def rows_per_piece(columns: dict[str, Tensor]) -> int:
    """Number of rows of these columns that fit into a buffer; raises ValueError if not even one does."""
    per_row = sum(column[:1].numel() * column.element_size() for column in columns.values())
    rows = (PIECE_BYTES - ALIGNMENT * len(columns)) // max(1, per_row)
    if rows < 1:
        raise ValueError(f"a row takes {per_row} bytes; at most {PIECE_BYTES} can be saved")
    return rows
