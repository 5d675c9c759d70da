"""What a worker does at every moment so that the next one can go on from here."""

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
from cpr.resident.copy_out import CopyOut, LastCall
from cpr.resident.segment import Segment
from cpr.shards import before_updates
from cpr.shards.shard import TableShard

logger = logging.getLogger(__name__)


class Publisher:
    """Keeps a worker's memory fit to be taken over; from `restore` to the end of the worker.

    Args:
        memory: of this worker.
        checkpointer: knows the model and what is registered.
        progress: of the run.
        worker_group: of this generation.
        model: its tables are watched.
        optimizers: ordinary ones that update tables.

    Raises:
        NotEnoughMemoryError: tables that do not live in shared memory would find no room there.
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
        self._checkpointer, self._progress, self._meeting = checkpointer, progress, worker_group
        self.is_unsaved = self._segment.is_unsaved
        """Whether the run could not save what is here, and has not since."""
        self._saved_before = checkpointer.newest_step
        self._copy_out = CopyOut(self._segment, checkpointer.shards, self._seal)
        self._exits = ExitStack()
        self._exits.enter_context(before_updates(model, optimizers, self._note_update))
        if self._copy_out.num_bytes:
            memory.home.check_room(self._copy_out.num_bytes)
            self._exits.enter_context(LastCall(self._copy_out.run))

    def publish(self) -> None:
        """A step is complete: what all ranks have alike is copied beside the tables, and counts at once."""
        segment, steps_done = self._segment, self._progress.steps_done
        segment.replica.write(steps_done, live_tree(self._checkpointer))
        segment.status.step_finished = steps_done
        segment.status.beat()

    def note_saves(self, are_failing: bool) -> None:
        """Whether what is here can be saved: if not, the memory stays even when nobody restarts the run."""
        newest = self._checkpointer.newest_step
        if are_failing and not self.is_unsaved:
            self.is_unsaved = self._segment.is_unsaved = True
            self._saved_before = newest
        elif self.is_unsaved and not are_failing and newest != self._saved_before:
            self.is_unsaved = self._segment.is_unsaved = False

    def note_epoch(self) -> None:
        """Saves may have taken the directory only now: what they save descends from this memory."""
        if epoch := self._checkpointer.ownership.epoch:
            self._segment.status.epoch = epoch

    def copy_out(self) -> None:
        """Training is over: copy tables that do not live in shared memory, if there are any."""
        try:
            self._copy_out.finish()
        except Exception:
            logger.exception("tables that do not live in shared memory could not be copied there")

    def close(self) -> None:
        """Watch no longer."""
        self._exits.close()

    def _note_update(self) -> None:
        self._segment.status.update_begun = self._progress.steps_done + 1

    def _seal(self, shards: Sequence[TableShard]) -> None:
        self._segment.seal(
            session_id=self._meeting.session_id,
            rank=self._meeting.rank,
            world_size=self._meeting.world_size,
            generation=self._meeting.generation,
            shards=shards,
        )
