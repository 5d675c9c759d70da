"""The rows that the last steps have changed, as they were before: with them a survivor goes back to a step.

Without it, the survivors of a failure hold half of the batch that was interrupted, or are a step ahead of the
mirrors. Before rows change, they are copied into a file for the step, next to the tables in resident memory.
Such copies are pieces (`cpr.mirror.pieces`) after a header of three integers; a piece counts from when the
header's number of bytes includes it, which is before its rows change.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from cpr.errors import DamagedMemoryError, NotEnoughMemoryError
from cpr.mirror.pieces import Piece, ShardRows, read_pieces, write_piece
from cpr.resident.regions import grow_region, map_region
from cpr.resident.segment import UNDO_FILE, Segment
from cpr.shards.shard import TableShard

UNDO_STEPS: Final = 4
"""Steps that can be undone: a mirror that keeps up is one or two behind, and survivors one ahead."""
HEADER_BYTES: Final = 64
MAGIC: Final = int.from_bytes(b"CPRUNDO1", "little")

logger = logging.getLogger(__name__)


class UndoLog:
    """Copies rows of a worker's shards before they change, and keeps the copies of `UNDO_STEPS` steps.

    Args:
        segment: sealed, with all these shards and no others in it (`can_undo`).
        shards: live rows of the shards; none, if none are in the segment: then states alone are kept.
        steps_done: training steps done.
    """

    def __init__(self, segment: Segment, shards: Sequence[ShardRows], steps_done: int) -> None:
        self._segment, self._shards = segment, shards
        self._steps = [_StepFile(segment.folder / f"{UNDO_FILE}{place}") for place in range(UNDO_STEPS)]
        self._has_room = True
        self._try(lambda: segment.replica.keep(UNDO_STEPS + 1))
        self.begin(steps_done + 1)

    def begin(self, step: int) -> None:
        """Begin a step: its copies replace those of the oldest one."""
        if self._has_room:
            self._current = self._steps[step % UNDO_STEPS]
            self._try(lambda: self._current.begin(step))

    def copy(self, rows: Mapping[int, Tensor]) -> None:
        """Copy rows, int64 `[n]` on the CPU by number of the shard, which are about to change."""
        if self._has_room and self._shards:
            self._try(lambda: self._copy(rows))

    @torch.no_grad()
    def _copy(self, rows: Mapping[int, Tensor]) -> None:
        shards = self._shards
        num_bytes = sum(shards[at].piece_bytes(each.numel(), listed=True) for at, each in rows.items())
        free, at = self._current.reserve(num_bytes), 0
        for number, each in rows.items():
            at += write_piece(free[at:], number, shards[number], each)
        self._current.count(at)

    def _try(self, write: Callable[[], object]) -> None:
        """Write, or do without from now on: a lack of memory must not end training."""
        try:
            write()
        except NotEnoughMemoryError as error:
            self._has_room = False
            self._segment.forget_past()
            logger.warning(
                "after a failure, a part of the batch that was interrupted stays in this worker's rows: %s",
                error,
            )


def can_undo(segment: Segment, shards: Sequence[TableShard]) -> bool:
    """Whether a sealed segment holds these shards and no others: then their numbers say which is which."""
    layout = segment.layout
    return layout is not None and [each.extent for each in layout.shards] == [each.extent for each in shards]


def reachable_steps(segment: Segment) -> tuple[int, ...]:
    """Steps that a dead worker's rows and replicated state can be brought to, newest first.

    Raises:
        DamagedMemoryError: a file differs from what was written.
        UnreadableMemoryError: a file cannot be read now.
    """
    finished, copies = segment.status.step_finished, _copies(segment)
    shards = [ShardRows(held.columns) for held in segment.held_shards()]
    for step, data in copies.items():
        _pieces(step, data, shards)
    changed = range(max(finished, segment.status.update_begun), finished, -1)
    reachable, held = [], segment.replica.steps()
    while finished in held and all(step in copies for step in changed):
        reachable.append(finished)
        changed = range(changed.start, finished - 1, -1)
        finished -= 1
    return tuple(reachable)


def go_back(segment: Segment, step: int) -> None:
    """Bring a claimed segment to one of its `reachable_steps`.

    If this process dies meanwhile, its successor can still bring the segment there, or further back.

    Raises:
        DamagedMemoryError: a file differs from what was written.
        UnreadableMemoryError: a file cannot be read now.
    """
    status = segment.status
    if status.step_finished == step and status.update_begun <= step:
        return
    copies, shards = _copies(segment), [ShardRows(held.columns) for held in segment.held_shards()]
    status.update_begun = max(status.update_begun, status.step_finished)  # until all of it is undone
    segment.replica.go_back(step)
    status.step_finished = step
    for each in sorted((each for each in copies if each > step), reverse=True):
        for piece in reversed(_pieces(each, copies[each], shards)):
            shards[piece.shard].write(piece)
    status.update_begun = step


def _copies(segment: Segment) -> dict[int, Tensor]:
    """The copies of each step, uint8 `[n]`."""
    found = {}
    for path in segment.folder.glob(f"{UNDO_FILE}*"):
        file = _StepFile(path)
        if (copies := file.read()) is not None:
            found[file.step] = copies
    return found


def _pieces(step: int, data: Tensor, shards: Sequence[ShardRows]) -> list[Piece]:
    try:
        return list(read_pieces(data, shards))
    except ValueError as error:
        raise DamagedMemoryError(f"the rows before step {step} are damaged: {error}") from error


class _StepFile:
    """The copies of one step."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._memory = torch.empty(0, dtype=torch.uint8)

    @property
    def step(self) -> int:
        """Number of the step, from 1."""
        return int(self._words[1])

    def begin(self, step: int) -> None:
        """Forget the copies of an earlier step."""
        self._enlarge(HEADER_BYTES)
        self._words[0] = 0
        self._words[1:3] = step, 0
        self._words[0] = MAGIC

    def reserve(self, num_bytes: int) -> Tensor:
        """Make room for more copies, uint8, `[num_bytes]` or more."""
        begin = HEADER_BYTES + int(self._words[2])
        self._enlarge(begin + num_bytes)
        return self._memory[begin:]

    def count(self, num_bytes: int) -> None:
        """Let so many more bytes count."""
        self._words[2] += num_bytes

    def read(self) -> Tensor | None:
        """Map a dead worker's copies, uint8 `[n]`; None: there are none."""
        self._memory = map_region(self._path)
        if self._memory.numel() < HEADER_BYTES or int(self._words[0]) != MAGIC:
            return None
        num_bytes = int(self._words[2])
        if not 0 <= num_bytes <= self._memory.numel() - HEADER_BYTES:
            raise DamagedMemoryError(f"{self._path} has an impossible length")
        return self._memory[HEADER_BYTES : HEADER_BYTES + num_bytes]

    def _enlarge(self, num_bytes: int) -> None:
        if self._memory.numel() < num_bytes:
            self._memory = grow_region(self._path, num_bytes + num_bytes // 4)

    @property
    def _words(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        return self._memory[:HEADER_BYTES].numpy().view(np.int64)
