"""Whether memory that outlived a worker may be used: if it descends from the newest save of its directory.

Memory carries the epoch under which it was trained (`cpr.checkpoint.ownership.records`). While it lay there,
others may have taken the directory, trained on and saved: a node that was cut off and comes back, or a run
that was paused and replaced, must not lay its rows over theirs.
"""

import logging
from collections.abc import Collection
from dataclasses import dataclass
from functools import partial

from cpr.checkpoint.catalog.chain import State
from cpr.checkpoint.catalog.ownership import retry_reads
from cpr.checkpoint.catalog.resolve import on_rank_0
from cpr.checkpoint.checkpointer import Checkpointer
from cpr.checkpoint.collectives import RankGroup
from cpr.checkpoint.ownership.records import Owner, newest_owner
from cpr.checkpoint.storage.base import Storage
from cpr.errors import CheckpointError, LockedError, MismatchError, RunFinished
from cpr.rendezvous import WorkerGroup

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class SavedState:
    """The newest state of a directory that counts."""

    sequence: int
    epoch: int
    step: int
    """Training steps done."""

    @classmethod
    def of(cls, state: State) -> "SavedState":
        """Of a state's newest save."""
        return cls(sequence=state.sequence, epoch=state.newest.epoch, step=state.step)


@dataclass(frozen=True, kw_only=True)
class Directory:
    """What all ranks know of the checkpoint directory when they decide how to begin."""

    newest: SavedState | None = None
    """None: nothing was saved."""
    owner: Owner | None = None
    """Who owned it before these workers; None: nobody."""
    session_id: str = ""
    """Of these workers."""

    @property
    def owner_epoch(self) -> int:
        """Of whoever owned it before these workers; 0: of nobody."""
        return 0 if self.owner is None else self.owner.epoch

    def is_of_launches(self, launches: Collection[str]) -> bool:
        """Whether its saves are known to be of workers of one of these launches."""
        return self.owner is not None and not set(launches).isdisjoint(self.owner.launches)

    def why_stale(self, epoch: int, step: int) -> str | None:
        """Why memory must not be used any more; None if it descends from the newest save.

        Args:
            epoch: of the memory.
            step: training steps that are in it.
        """
        saved, owner = self.newest, self.owner
        if saved is not None and (saved.epoch > epoch or saved.step > step):
            return (
                f"of step {step} (epoch {epoch}), but save {saved.sequence} of step {saved.step} (epoch "
                f"{saved.epoch}) was made after it"
            )
        if owner is not None and owner.epoch > epoch and owner.session != self.session_id:
            return (
                f"of step {step} (epoch {epoch}), but {owner} has owned the directory since then (epoch "
                f"{owner.epoch})"
            )
        return None


def take_directory(checkpointer: Checkpointer, worker_group: WorkerGroup, *, resumes: bool) -> Directory:
    """Own the checkpoint directory; where it cannot be written to, memory is enough to go on for a while.

    Called by all ranks.

    Args:
        checkpointer: of the directory; has neither saved nor loaded.
        worker_group: of the workers.
        resumes: whether a new run goes on from what is saved.

    Raises:
        LockedError: another run uses it.
        MismatchError: it holds saves, and these workers belong to a run that is to begin at the beginning.
        CheckpointError: it cannot be written to, and nothing outlived the workers before.
    """
    ownership = checkpointer.ownership
    has_memory = any(info.held for info in worker_group.infos)
    if not resumes and not has_memory:
        # before the directory is taken from a run that may only be paused
        before = Directory(owner=ownership.last_owner())
        is_own = worker_group.continues and before.is_of_launches(worker_group.launches)
        if not is_own and (state := checkpointer.newest_state()) is not None:
            raise MismatchError(
                f"{checkpointer.uri} holds save {state.sequence}, which this run has not loaded: resume "
                "it to go on from there, or choose an empty directory"
            )
    try:
        ownership.claim()
    except LockedError:
        raise
    except CheckpointError as error:
        if not worker_group.continues or not has_memory:
            raise
        if worker_group.rank == 0:
            logger.error("%s. Training continues from memory, and saving is tried again", error)
        ownership.read_previous_owner()
    newest = checkpointer.newest_state()
    return Directory(
        newest=None if newest is None else SavedState.of(newest),
        owner=ownership.previous,
        session_id=worker_group.session_id,
    )


def note_launches(checkpointer: Checkpointer, worker_group: WorkerGroup, *, resumes: bool) -> None:
    """Saves that follow are of what launched these workers: they have begun. Called by all ranks."""
    try:
        continues = resumes or worker_group.continues
        checkpointer.ownership.note_launches(worker_group.launches, continues=continues)
    except CheckpointError as error:
        if worker_group.rank == 0:
            logger.warning("what launched this run could not be noted: %s", error)


def raise_if_finished(storage: Storage, group: RankGroup, worker_group: WorkerGroup) -> None:
    """Leave if the run that these workers continue has reached its end meanwhile. Called by all ranks.

    Args:
        storage: the checkpoint directory of the run.
        group: all ranks.
        worker_group: of the workers.

    Raises:
        RunFinished: it has.
        CheckpointError: the directory cannot be read.
    """
    if not worker_group.continues:
        return
    owner = on_rank_0(group, retry_reads(partial(newest_owner, storage)))
    if owner is None or owner.finished is None:
        return
    has_memory = any(info.held for info in worker_group.infos)
    if has_memory or not worker_group.launches.isdisjoint(
        owner.launches
    ):  # else it is a new run that was restarted
        if worker_group.rank == 0:
            logger.warning(
                "the run in %s finished at step %d: nothing is left to train, and nothing is written",
                storage.uri,
                owner.finished,
            )
        raise RunFinished(owner.finished)
