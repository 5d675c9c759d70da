"""Publication of a worker's state after every step, so that its successor can continue from there."""

import logging
from collections.abc import Sequence
from contextlib import ExitStack

from torch import nn
from torch.optim import Optimizer

from cpr.checkpoint.checkpointer import Checkpointer
from cpr.recovery.run.progress import RunProgress
from cpr.recovery.worker.memory import WorkerMemory
from cpr.recovery.worker.replicated_state import live_tree
from cpr.rendezvous import WorkerGroup
from cpr.resident.copy_out import CopyOut, SigtermHook
from cpr.resident.segment import Segment
from cpr.shards import before_updates
from cpr.shards.shard import TableShard

logger = logging.getLogger(__name__)


class Publisher:
    """Keeps a worker's memory ready for its successor, from `restore` to the end of the worker.

    Raises:
        NotEnoughMemoryError: there is no room for copies of tables that do not live in shared memory.
    """

    def __init__(
        self,
        memory: WorkerMemory,
        checkpointer: Checkpointer,
        progress: RunProgress,
        worker_group: WorkerGroup,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
    ) -> None:
        assert memory.segment is not None
        self._segment: Segment = memory.segment
        self._checkpointer, self._progress, self._worker_group = checkpointer, progress, worker_group
        self.is_unsaved = self._segment.is_unsaved
        """Whether the newest save has failed, so that the memory must be kept."""
        self._saved_before = checkpointer.newest_step
        self._copy_out = CopyOut(self._segment, checkpointer.shards, self._seal)
        self._exits = ExitStack()
        self._exits.enter_context(before_updates(model, optimizers, self._note_update))
        if self._copy_out.num_bytes:
            memory.home.check_room(self._copy_out.num_bytes)
            self._exits.enter_context(SigtermHook(self._copy_out.run))

    def publish(self) -> None:
        """Copy the replicated state into shared memory after a step; it counts at once."""
        segment, steps_done = self._segment, self._progress.steps_done
        segment.replica.write(steps_done, live_tree(self._checkpointer))
        segment.status.step_finished = steps_done
        segment.status.beat()

    def note_saves(self, are_failing: bool) -> None:
        """Mark the memory as unsaved while saves fail: then it stays even if the run is not restarted."""
        newest = self._checkpointer.newest_step
        if are_failing and not self.is_unsaved:
            self._segment.mark_unsaved(newest)
            self.is_unsaved, self._saved_before = True, newest
        elif self.is_unsaved and not are_failing and newest != self._saved_before:
            self._segment.clear_unsaved()
            self.is_unsaved = False

    def note_epoch(self) -> None:
        """Record the ownership of the directory, which a save may have claimed only now."""
        if epoch := self._checkpointer.ownership.epoch:
            self._segment.status.epoch = epoch

    def copy_out(self) -> None:
        """Copy tables that do not live in shared memory, if there are any, at the end of training."""
        try:
            self._copy_out.finish()
        except Exception:
            logger.exception("tables that do not live in shared memory could not be copied there")

    def close(self) -> None:
        """Stop watching the model and the stop signal."""
        self._exits.close()

    def _note_update(self) -> None:
        self._segment.status.update_begun = self._progress.steps_done + 1

    def _seal(self, shards: Sequence[TableShard]) -> None:
        self._segment.seal(
            session_id=self._worker_group.session_id,
            rank=self._worker_group.rank,
            world_size=self._worker_group.world_size,
            generation=self._worker_group.generation,
            shards=shards,
        )
