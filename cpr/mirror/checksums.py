"""Checksums of a mirror's rows, which tell whether anything but its keeper has overwritten them.

The checksum of a column is the sum of its rows in integers of 64 bits (of fewer, if a row has fewer), modulo
2**64, and as one more integer the sum of the rows' first integers, each times an odd number of its row, as
rows that have changed places have the same sum. A written row changes it by the difference between the row
and what was there, so that a moment costs a look at the rows that it replaces, and no look at the others.

There are two versions in a file: the newest, and one to which the next moment is being written.
"""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Final

import numpy as np

from cpr.errors import DamagedMemoryError
from cpr.mirror.pieces import Piece, ShardRows
from cpr.resident.regions import create_region, map_region

FILE: Final = "checksums"


class Checksums:
    """Checksums of all columns of several shards.

    Args:
        folder: of the mirror.
        shards: its rows.
        is_new: whether the rows are all zeros, and the file is to be made.

    Raises:
        NotEnoughMemoryError: there is no room for the file.
        DamagedMemoryError: the file is not one of these shards.
        UnreadableMemoryError: the file cannot be read now.
    """

    def __init__(self, folder: Path, shards: Sequence[ShardRows], *, is_new: bool) -> None:
        self._shards = shards
        counts = [count + 1 for shard in shards for count in shard.num_words]
        ends = np.cumsum([1, *counts]).tolist()
        self._places = [slice(begin, end) for begin, end in pairwise(ends)]
        """Of each column in a version, which begins with the step."""
        self._first = np.cumsum([0, *(len(shard.num_words) for shard in shards)]).tolist()
        """Number of the first column of each shard."""
        num_bytes = 2 * 8 * ends[-1]
        memory = (create_region if is_new else map_region)(folder / FILE, num_bytes)
        self._versions = memory.numpy().view(np.uint64).reshape(2, ends[-1])

    def write(self, before: int, step: int, pieces: Sequence[Piece]) -> None:
        """Note what pieces are about to change in the rows of a step, which become those of another one.

        Until the next call both count; while the step stays the same, only the new ones do.

        Args:
            before: step of the rows.
            step: of the rows with the pieces.
            pieces: exact, and each row is in one of them at most.
        """
        at = self._version(before)
        sums = self._versions[at]
        if step != before:
            self._versions[1 - at] = sums
            sums = self._versions[1 - at]
        for piece in pieces:
            shard, first = self._shards[piece.shard], self._first[piece.shard]
            for column, part in piece.parts.items():
                of_column = sums[self._places[first + column]]
                of_column += shard.sum_of(part, piece.rows)
                of_column -= shard.sum_of(shard.held(column, piece.rows), piece.rows)
        sums[0] = step

    def check(self, step: int) -> None:
        """Compare with the rows of a step.

        Raises:
            DamagedMemoryError: they differ.
        """
        sums, columns = self._versions[self._version(step)], iter(self._places)
        for number, shard in enumerate(self._shards):
            rows = slice(0, shard.num_rows)
            for column in range(len(shard.num_words)):
                found = shard.sum_of(shard.held(column, rows), rows)
                if not np.array_equal(sums[next(columns)], found):
                    raise DamagedMemoryError(f"rows of shard {number} differ from their checksum")

    def _version(self, step: int) -> int:
        for number, tag in enumerate(self._versions[:, 0].tolist()):
            if tag == step:
                return number
        raise DamagedMemoryError(f"there are no checksums of the rows of step {step}")
