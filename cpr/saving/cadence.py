"""When a save is due: at a fixed interval, or at one that follows measured costs of saves and failures."""

import logging
from typing import Final, Protocol

from cpr.checkpoint.collectives import RankGroup, on_rank
from cpr.estimator.planning.interval import IntervalRule, RunMeasurements
from cpr.recovery.run.progress import RunProgress
from cpr.saving.history_writer import HistoryWriter

FIRST_STEPS: Final = 10
"""Steps until the first save of a run that chooses its interval: that save tells what saves cost."""
SOON_STEPS: Final = 8
"""Steps after a failure until an interrupted save is repeated: not at once, in case it caused the failure."""
PATIENCE: Final = 8
"""While a save is under way, the question is asked again after this part of the interval."""

logger = logging.getLogger(__name__)


class Pace(Protocol):
    """Decides when to save. All ranks ask once after each step, and get the same answer."""

    def is_due(self, steps_done: int) -> bool:
        """Whether to save now, after so many training steps."""


class FixedPace:
    """A save at a fixed interval.

    Args:
        every_steps: interval of whole tables; 0: never.
        share: share r of the rows that a save holds. Saves then come every r * `every_steps` (rounded, at
            least 1): as many bytes in the same time, in smaller portions (CPR paper).
        steps_done: training steps done now.
        saved_at: training steps done at the newest save; 0: there is none. If a failure interrupted a later
            one, that is made up for after `SOON_STEPS`.
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
        is_due = steps_done % self.every_steps == 0 or steps_done == self._make_up_at
        if is_due:
            self._make_up_at = None
        return is_due


class AutoPace:
    """An interval that follows the recent costs of saves and the rate of node losses.

    Rank 0 decides for all, with one small collective when a save would be due by the interval so far. No save
    begins while another is under way. Changes are logged with their reason.

    Args:
        rule: chooses the interval.
        group: all ranks; used for nothing else at the same time.
        progress: of the run.
        writer: has the measured history; on rank 0.
        saved_at: training steps done at the newest save; 0: there is none.
        share: share of the rows that a save holds, as for `FixedPace`.
    """

    def __init__(
        self,
        rule: IntervalRule,
        group: RankGroup,
        progress: RunProgress,
        writer: HistoryWriter | None,
        *,
        saved_at: int,
        share: float = 1.0,
    ) -> None:
        self._rule, self._group, self._progress, self._writer = rule, group, progress, writer
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
        """The best interval in steps, and whether a save is under way; on rank 0."""
        writer = self._writer
        assert writer is not None
        history = writer.history
        save = history.lately.row_save or history.lately.whole_save
        if save is None or not history.step_s:
            return FIRST_STEPS, writer.is_saving
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
            rows = "" if self._share == 1 else f", with {self._share:.3g} of the rows in each"
            logger.info("%s. That is %s steps from save to save%s", choice.reason, f"{every:,}", rows)
        self._interval_s = choice.interval_s
        return every, writer.is_saving
