"""Saves of the rows that deserve it most, laid over a base: what the next one holds, what became of the last.

Nothing that a save held loses its priority because the save failed, and nobody's counters are believed before
all know what became of it. Whether a base is due is decided alike on all ranks.
"""

import math
import time

from cpr.checkpoint.checkpointer import Checkpointer
from cpr.checkpoint.format.manifest import Moment
from cpr.checkpoint.save.writer_thread import Save
from cpr.priority import Prioritizer
from cpr.recovery.run.progress import RunProgress


class RowSaves:
    """Chooses between row saves and bases.

    The portion of lost samples counts as if the whole table was saved each time that as many rows as it has
    have been: a base is such a moment, and so is every 1/ratio-th row save (as in the CPR paper, it is not
    weighted by priority). A row save in between counts for nothing, though it makes a loss smaller.

    Args:
        checkpointer: that saves; prepared.
        progress: of the run; is told of the moments that count.
        prioritizer: knows which rows deserve saving.
        share: of a table's rows with which a row save counts.
        needs_base: whether the next save is a base; the same on all ranks.
    """

    def __init__(
        self,
        checkpointer: Checkpointer,
        progress: RunProgress,
        prioritizer: Prioritizer,
        share: float,
        needs_base: bool,
    ) -> None:
        self._checkpointer, self._progress, self._prioritizer = checkpointer, progress, prioritizer
        self.needs_base = needs_base
        """Whether the next periodic save is a base; the same on all ranks."""
        self._per_table = math.ceil(1 / share)
        self._last: tuple[Save, int] | None = None
        """The save whose outcome nobody has asked for, and its step."""
        self._is_under_way = False
        """Whether it is for the prioritizer."""

    def step(self) -> None:
        """A training step is complete: what is saved is known as soon as it is, and outlives this worker."""
        if self._is_under_way and self._last is not None and self._last[0].manifest is not None:
            self._is_under_way = False
            self._prioritizer.confirm()

    def get_ready(self) -> bool:
        """Let what became of the last save count; on all ranks, before another periodic save.

        Returns:
            Whether that can begin now; the same on all ranks.

        Raises:
            SaveFailedError: the last one has failed; that counts all the same.
        """
        is_free = True
        try:
            is_free = self._checkpointer.is_free()
        finally:
            if is_free:
                self.note_outcome()
        return is_free

    def note(self) -> None:
        """A periodic save is about to begin."""
        if not self.needs_base:
            self._progress.note_row_save()
        if self.needs_base or self._progress.row_saves_since >= self._per_table:
            self._progress.note_save()

    def save_all(self, moment: Moment, timeout_s: float | None = None) -> Save | None:
        """Begin a base, at a moment that counts and was noted; as `Checkpointer.save`."""
        save = None
        try:
            save = self._checkpointer.save(moment, timeout_s=timeout_s)
        finally:
            if save is None:
                self._progress.forget_save(self._step)
        if save is not None:
            self.note_outcome()  # of the one before, which is over
            self._prioritizer.begin_full_save()
            self._last, self._is_under_way = (save, self._step), True
            self.needs_base = False
        return save

    def save(self) -> Save | None:
        """Begin a row save that was noted, unless a base is needed; as `Checkpointer.save_rows`."""
        assert not self.needs_base
        began, save = time.perf_counter(), None
        rows = self._prioritizer.rows_to_save()
        try:
            save = self._checkpointer.save_rows(rows, began=began)
        finally:
            if save is None:
                self._prioritizer.take_back()
                self._progress.forget_save(self._step)
        if save is not None:
            self._last, self._is_under_way = (save, self._step), True
        return save

    def note_outcome(self) -> None:
        """Let what became of the last save count, if that is known; on all ranks, when they agree on it."""
        if self._last is None or not self._last[0].done:
            return
        self.step()
        (save, step), self._last = self._last, None
        if save.manifest is None:
            self._is_under_way = False
            self._prioritizer.take_back()
            self.needs_base |= save.kind == "base"
            self._progress.forget_save(step)
        if save.error is not None and not self._checkpointer.has_base:
            self.needs_base = True

    @property
    def _step(self) -> int:
        return self._progress.steps_done
