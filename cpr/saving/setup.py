"""What the user says about saving, and the saves that come of it."""

import os
from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn
from torch.optim import Optimizer

from cpr.checkpoint.checkpointer import Checkpointer
from cpr.checkpoint.collectives import RankGroup, on_rank
from cpr.checkpoint.format.manifest import Moment
from cpr.checkpoint.storage.base import Storage
from cpr.estimator.planning.interval import IntervalRule
from cpr.fields import check_fields
from cpr.priority import Prioritizer, PriorityConfig
from cpr.recovery.restore.restorer import Restorer
from cpr.recovery.run.progress import RunProgress
from cpr.resident.segment import Segment
from cpr.saving.cadence import AutoPace, FixedPace, Pace
from cpr.saving.history_writer import HistoryWriter
from cpr.saving.periodic import Saves
from cpr.saving.row_saves import RowSaves
from cpr.saving.tracking import open_prioritizer, saved_share, settle_in


@dataclass(frozen=True, kw_only=True)
class SavePlan:
    """How a run saves; see `cpr.PartialRecovery`."""

    every: int | IntervalRule
    moment: Moment
    priority: PriorityConfig | None
    total_samples: int | None
    give_up_after_s: float | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        if isinstance(self.every, int) and self.every < 0:
            raise ValueError(
                f"save_every_steps is {self.every}; give a number of steps, or 0 to save only at the end"
            )
        if self.priority is not None and self.every == 0:
            raise ValueError(
                "priority chooses rows for periodic saves, and there are none: set save_every_steps, or do "
                "without priority"
            )
        if self.total_samples is not None and self.total_samples <= 0:
            raise ValueError(
                f"total_samples is {self.total_samples}; give a positive number, or None if unknown"
            )
        if self.give_up_after_s is not None and not self.give_up_after_s > 0:
            raise ValueError(
                f"give_up_after_s is {self.give_up_after_s}; give a positive number of seconds, or None"
            )
        if isinstance(self.every, IntervalRule):
            if self.total_samples is None:
                raise ValueError("an interval that follows a target PLS needs total_samples: give it as well")
            if self.every.mean_time_to_failure_s is None:
                raise ValueError(
                    "an interval that is chosen before the first failure needs an idea of how often nodes "
                    "are lost: give mean_time_to_failure_s (`cpr plan` reads it from a log of failures)"
                )

    @property
    def row_share(self) -> float:
        """The share of a table's rows with which a periodic save counts."""
        return 1.0 if self.priority is None else saved_share(self.priority)


class Keeper:
    """Opens the saves of a worker: first, before its memory is sealed, what tracks rows, and then the rest.

    Args:
        plan: what the user wants.
        checkpointer: that saves.
        progress: of the run.
        group: all ranks.
    """

    def __init__(
        self, plan: SavePlan, checkpointer: Checkpointer, progress: RunProgress, group: RankGroup
    ) -> None:
        self._plan, self._checkpointer, self._progress, self._group = plan, checkpointer, progress, group
        self._prioritizer: Prioritizer | None = None

    def track(
        self, model: nn.Module, optimizers: Sequence[Optimizer], segment: Segment, adopted: bool
    ) -> None:
        """Track rows from now on, if it is wanted; arguments as of `open_prioritizer`."""
        if self._plan.priority is not None:
            self._prioritizer = open_prioritizer(
                model, self._plan.priority, optimizers, self._checkpointer.shards, segment, adopted
            )
            self._checkpointer.register("priority", self._prioritizer, per_rank=True)

    def open(self, restorer: Restorer, storage: Storage) -> Saves:
        """The saves that follow a beginning. Called by all ranks, when the checkpointer is prepared.

        Args:
            restorer: has brought everything into place.
            storage: of the checkpoint, where the diary is kept.
        """
        plan, progress = self._plan, self._progress
        rows = None if self._prioritizer is None else self._row_saves(self._prioritizer, restorer)
        diary: HistoryWriter | None = None

        def begin_diary() -> None:
            nonlocal diary
            diary = HistoryWriter(
                storage,
                progress,
                self._checkpointer.ownership.check,
                nodes=num_nodes(self._group.world_size),
                samples_total=plan.total_samples,
                row_share=plan.row_share,
            )

        on_rank(self._group, 0, begin_diary)
        saved_at = self._checkpointer.newest_step or 0
        pace: Pace
        if isinstance(plan.every, IntervalRule):
            group = self._checkpointer.agreement
            pace = AutoPace(plan.every, group, progress, diary, saved_at=saved_at, share=plan.row_share)
        else:
            pace = FixedPace(plan.every, plan.row_share, steps_done=progress.steps_done, saved_at=saved_at)
        limit_s = plan.give_up_after_s
        return Saves(self._checkpointer, progress, pace, plan.moment, rows, diary, limit_s)

    def _row_saves(self, prioritizer: Prioritizer, restorer: Restorer) -> RowSaves:
        """Row saves that go on from this beginning; all ranks agree on whether a base comes first."""
        story, shards = self._progress.recoveries[-1], self._checkpointer.shards
        settle_in(prioritizer, story, shards, restorer.restored, restorer.fell_back)
        can_go_on = self._group.gather(prioritizer.is_complete and self._checkpointer.has_base)
        return RowSaves(
            self._checkpointer,
            self._progress,
            prioritizer,
            share=self._plan.row_share,
            needs_base=not all(can_go_on),
        )

    def close(self) -> None:
        """Track no longer."""
        if self._prioritizer is not None:
            self._prioritizer.close()


def num_nodes(world_size: int) -> int:
    """Failure domains: torchrun's agents, or else what the environment says of how many ranks a node has."""
    nodes = int(os.environ.get("GROUP_WORLD_SIZE", "0"))
    return nodes or max(1, world_size // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
