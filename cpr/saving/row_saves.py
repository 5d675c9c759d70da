"""Row saves: saves of the most important rows on top of a full save, which the file format calls a base.

Rows of a failed save keep their priority. All ranks decide equally whether a full save is due.
"""

import math
import time

from cpr.checkpoint.checkpointer import Checkpointer
from cpr.checkpoint.format.manifest import Moment
from cpr.checkpoint.save.writer_thread import Save
from cpr.priority import Prioritizer
from cpr.recovery.run.progress import RunProgress


class RowSaves:
    """Decides whether the next save is a row save or a full one, and which rows a row save holds.

    The portion of lost samples counts as if the whole table was saved whenever as many rows as it has were
    saved: by a full save, and by every 1/ratio-th row save (as in the CPR paper, which does not weight rows
    by priority). Row saves in between count for nothing, although they make losses smaller.

    Args:
        checkpointer: writes the saves; prepared.
        progress: of the run; counts the saves.
        prioritizer: knows which rows to save.
        share: share of a table's rows that a row save counts for.
        needs_base: whether the next save must be full; the same on all ranks.
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
        """Whether the next periodic save must be full; the same on all ranks."""
        self._per_table = math.ceil(1 / share)
        self._last: tuple[Save, int] | None = None
        """The save whose outcome was not noted yet, and its step."""
        self._is_under_way = False
        """Whether the prioritizer waits for its outcome."""

    def step(self) -> None:
        """Tell the prioritizer of a committed save as soon as possible: its counters survive this worker."""
        if self._is_under_way and self._last is not None and self._last[0].manifest is not None:
            self._is_under_way = False
            self._prioritizer.confirm()

    def get_ready(self) -> bool:
        """Note the outcome of the last save, on all ranks, before another periodic save.

        Returns:
            Whether a save can begin now; the same on all ranks.

        Raises:
            SaveFailedError: the last save has failed; its outcome is noted all the same.
        """
        is_free = True
        try:
            is_free = self._checkpointer.is_free()
        finally:
            if is_free:
                self.note_outcome()
        return is_free

    def note(self) -> None:
        """Count the periodic save that is about to begin."""
        if not self.needs_base:
            self._progress.note_row_save()
        if self.needs_base or self._progress.row_saves_since >= self._per_table:
            self._progress.note_save()

    def save_all(self, moment: Moment, timeout_s: float | None = None) -> Save | None:
        """Begin a full save like `Checkpointer.save`; one that cannot begin is no longer counted."""
        save = None
        try:
            save = self._checkpointer.save(moment, timeout_s=timeout_s)
        finally:
            if save is None:
                self._progress.forget_save(self._step)
        if save is not None:
            self.note_outcome()  # of the previous save, which is over
            self._prioritizer.begin_full_save()
            self._last, self._is_under_way = (save, self._step), True
            self.needs_base = False
        return save

    def save(self) -> Save | None:
        """Begin a save of the rows the prioritizer chooses; one that cannot begin is no longer counted."""
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
        """Note the outcome of the last save, if it is known; on all ranks, when it is known on all."""
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
