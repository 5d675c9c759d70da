"""When a save is due: every so many steps, or as often as what the run has measured makes worth while."""

import logging
from typing import Final, Protocol

from cpr.checkpoint.collectives import RankGroup, on_rank
from cpr.estimator.planning.interval import IntervalRule, RunMeasurements
from cpr.recovery.run.progress import RunProgress
from cpr.saving.history_writer import HistoryWriter

FIRST_STEPS: Final = 10
"""Steps until the first save of a run that chooses its interval: it tells what a save costs."""
SOON_STEPS: Final = 8
"""After a failure, until a save that it broke off is tried again: not at once, in case it was the reason."""
PATIENCE: Final = 8
"""While a save is under way, a run asks again after this part of the interval."""

logger = logging.getLogger(__name__)


class Pace(Protocol):
    """Says when to save. All ranks ask alike, once after each step, and get the same answer."""

    def is_due(self, steps_done: int) -> bool:
        """Whether to save now, after so many training steps."""


class FixedPace:
    """A save every so many steps.

    Args:
        every_steps: from one whole table to the next; 0: never.
        share: of the rows that a save holds. With a share r, saves come every r * `every_steps` (rounded, at
            least 1): as many bytes in the same time, in smaller portions (CPR paper).
        steps_done: where training goes on.
        saved_at: training steps done at the newest save; 0: there is none. If the one that was due after it
            was broken off by a failure, it is made up for after `SOON_STEPS` instead of an interval.
    """

    def __init__(
        self, every_steps: int, share: float = 1.0, *, steps_done: int = 0, saved_at: int = 0
    ) -> None:
        self.every_steps = every = max(1, round(share * every_steps)) if every_steps else 0
        is_missing = every > 0 and saved_at < steps_done // every * every
        self._make_up_at = steps_done + SOON_STEPS if is_missing else None

    def is_due(self, steps_done: int) -> bool:
        """Whether to save now, after so many training steps."""
        if not self.every_steps:
            return False
        is_regular = steps_done % self.every_steps == 0
        is_due = is_regular or steps_done == self._make_up_at
        if is_due:
            self._make_up_at = None
        return is_due


class AutoPace:
    """An interval that follows what saves cost lately and how often nodes are lost. Rank 0 decides for all.

    That takes one small collective when a save would be due by the interval so far. No save begins while
    another is under way. A change is logged with its reason.

    Args:
        rule: chooses.
        group: all ranks; used for nothing else at the same time.
        progress: of the run.
        diary: what was measured; on rank 0.
        saved_at: training steps done at the newest save; 0: there is none.
        share: of the rows that a save holds, as for `FixedPace`.
    """

    def __init__(
        self,
        rule: IntervalRule,
        group: RankGroup,
        progress: RunProgress,
        diary: HistoryWriter | None,
        *,
        saved_at: int,
        share: float = 1.0,
    ) -> None:
        self._rule, self._group, self._progress, self._diary = rule, group, progress, diary
        self._share, self._saved_at = share, saved_at
        self._interval_s: float | None = None
        self._ask_at = progress.steps_done + FIRST_STEPS

    def is_due(self, steps_done: int) -> bool:
        """Whether to save now, after so many training steps."""
        if steps_done < self._ask_at:
            return False
        every, is_saving = on_rank(self._group, 0, self._decide)
        due_at = self._saved_at + every
        if is_saving or steps_done < due_at:
            self._ask_at = max(due_at, steps_done + max(1, every // PATIENCE))
            return False
        self._saved_at, self._ask_at = steps_done, steps_done + every
        return True

    def _decide(self) -> tuple[int, bool]:
        """Steps from save to save by all that is known, and whether one is under way; on rank 0."""
        diary = self._diary
        assert diary is not None
        history = diary.history
        save = history.lately.row_save or history.lately.whole_save
        if save is None or not history.step_s:
            return FIRST_STEPS, diary.is_saving
        total = history.samples_total
        measured = RunMeasurements(
            nodes=history.nodes,
            blocked_s=save.blocked_s / save.share,
            save_s=save.seconds / save.share,
            share=save.share,
            elapsed_s=history.elapsed_s,
            nodes_lost=sum(each.nodes_lost for each in history.failures),
            pls=self._progress.pls_total or 0.0,
            share_left=max(0.0, 1 - self._progress.samples_done / total) if total else 1.0,
        )
        choice = self._rule.next_interval(measured, self._interval_s)
        every = max(1, round(self._share * choice.interval_s / history.step_s))
        if choice.changed:
            what = "" if self._share == 1 else f", with {self._share:.3g} of the rows in each"
            logger.info("%s. That is %s steps from save to save%s", choice.reason, f"{every:,}", what)
        self._interval_s = choice.interval_s
        return every, diary.is_saving
