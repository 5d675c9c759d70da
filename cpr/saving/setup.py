"""Settings of saving, and construction of a worker's saves and row tracking from them."""

import json
import os
import zlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor, nn
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
from cpr.recovery.run.report import LIVE, Recovery
from cpr.resident.segment import Segment
from cpr.saving.cadence import AutoPace, FixedPace, Pace
from cpr.saving.history_writer import HistoryWriter
from cpr.saving.periodic import Saves
from cpr.saving.row_saves import RowSaves
from cpr.shards.shard import TableShard


@dataclass(frozen=True, kw_only=True)
class SaveSettings:
    """How a run saves; see `cpr.PartialRecovery` for the fields."""

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
        """Share of a table's rows that a periodic save counts for."""
        if self.priority is None or self.priority.scheme == "touched":
            return 1.0  # a save of all rows that changed is as good as one of the whole table
        return self.priority.ratio


class SavesBuilder:
    """Builds the saves of a worker: the tracker of rows before its memory is sealed, all else afterwards."""

    def __init__(
        self, settings: SaveSettings, checkpointer: Checkpointer, progress: RunProgress, group: RankGroup
    ) -> None:
        self._settings, self._checkpointer = settings, checkpointer
        self._progress, self._group = progress, group
        self._prioritizer: Prioritizer | None = None

    def track(
        self, model: nn.Module, optimizers: Sequence[Optimizer], segment: Segment, adopted: bool
    ) -> None:
        """Track rows from now on, if row saves are wanted.

        Trackers live in the worker's segment, and continue those of the previous worker. Trackers of tables
        on a GPU live there, and end with the worker: then the next save is a full one.

        Args:
            model: its lookups are watched.
            optimizers: ordinary ones that update tables.
            segment: of the worker's tables; not sealed yet.
            adopted: whether the tables are those of the previous worker, unchanged.

        Raises:
            NotEnoughMemoryError: there is no room; says what to change.
        """
        config, shards = self._settings.priority, self._checkpointer.shards
        if config is None:
            return
        signature = f"{zlib.crc32(json.dumps(asdict(config)).encode()):08x}"

        def allocate(name: str, dtype: torch.dtype, numel: int) -> Tensor:
            return segment.companion(f"{name}-{signature}", dtype, numel, adopt=adopted)[0]

        on_gpu = any(shard.weights.is_cuda for shard in shards)
        self._prioritizer = Prioritizer(
            model, config, optimizers, shards=shards, allocate=None if on_gpu else allocate
        )
        self._checkpointer.register("priority", self._prioritizer, per_rank=True)

    def build(self, restorer: Restorer, storage: Storage) -> Saves:
        """Build the saves; called by all ranks, when the checkpointer is prepared."""
        settings, progress = self._settings, self._progress
        rows = None if self._prioritizer is None else self._row_saves(self._prioritizer, restorer)
        writer: HistoryWriter | None = None

        def open_history() -> None:
            nonlocal writer
            writer = HistoryWriter(
                storage,
                progress,
                self._checkpointer.ownership.check,
                nodes=num_nodes(self._group.world_size),
                samples_total=settings.total_samples,
                row_share=settings.row_share,
            )

        on_rank(self._group, 0, open_history)
        saved_at, share = self._checkpointer.newest_step or 0, settings.row_share
        pace: Pace
        if isinstance(settings.every, IntervalRule):
            group = self._checkpointer.agreement
            pace = AutoPace(settings.every, group, progress, writer, saved_at=saved_at, share=share)
        else:
            pace = FixedPace(settings.every, share, steps_done=progress.steps_done, saved_at=saved_at)
        limit_s = settings.give_up_after_s
        return Saves(self._checkpointer, progress, pace, settings.moment, rows, writer, limit_s)

    def _row_saves(self, prioritizer: Prioritizer, restorer: Restorer) -> RowSaves:
        """Row saves that continue from here; all ranks agree on whether a full save comes first."""
        story, shards = self._progress.recoveries[-1], self._checkpointer.shards
        settle_trackers(prioritizer, story, shards, restorer.restored, restorer.fell_back)
        can_continue = self._group.gather(prioritizer.is_complete and self._checkpointer.has_base)
        return RowSaves(
            self._checkpointer,
            self._progress,
            prioritizer,
            share=self._settings.row_share,
            needs_base=not all(can_continue),
        )

    def close(self) -> None:
        """Stop tracking rows."""
        if self._prioritizer is not None:
            self._prioritizer.close()


def settle_trackers(
    prioritizer: Prioritizer,
    story: Recovery,
    shards: Collection[TableShard],
    restored: Mapping[str, Sequence[tuple[int, int]]],
    fell_back: bool = False,
) -> None:
    """Bring row trackers up to date after a start; afterwards `is_complete` tells whether they are reliable.

    Rows from the checkpoint are equal to saved ones, so their trackers are reset. Rows that stayed in place
    keep theirs. What has changed in rows that moved between workers is unknown.

    Args:
        prioritizer: of this worker.
        story: report of this start.
        shards: of this worker.
        restored: row intervals from the checkpoint in a partial recovery, by shard name.
        fell_back: whether the next saves build on an older save than the one since which the trackers count,
            or those rows come from an older one.
    """
    if story.kind not in LIVE:
        prioritizer.forget_all()
    elif fell_back:
        prioritizer.doubt()
    elif not prioritizer.is_complete:  # new memory, or unreliable before
        if all(_is_whole(shard, restored) for shard in shards if shard.table_fqn in prioritizer.prioritised):
            prioritizer.forget_all()
    elif any(origin.moved or origin.mirrored for origin in story.sources):
        prioritizer.doubt()
    else:
        for name, ranges in restored.items():
            prioritizer.forget(name, ranges)


def _is_whole(shard: TableShard, restored: Mapping[str, Sequence[tuple[int, int]]]) -> bool:
    return sum(end - begin for begin, end in restored.get(shard.name, ())) == shard.num_rows


def num_nodes(world_size: int) -> int:
    """Number of failure domains: torchrun's agents, or else world size by ranks per node."""
    nodes = int(os.environ.get("GROUP_WORLD_SIZE", "0"))
    return nodes or max(1, world_size // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
