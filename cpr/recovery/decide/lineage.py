"""Checks that surviving memory descends from the newest save of its checkpoint directory.

Memory carries the epoch under which it was trained (`cpr.checkpoint.ownership.records`). Meanwhile other
workers may have taken the directory, trained and saved. A node that was cut off, or a run that was paused and
replaced, must not overwrite their rows when it returns.
"""

import logging
import socket
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from cpr.checkpoint.catalog.chain import State
from cpr.checkpoint.catalog.ownership import retry_reads
from cpr.checkpoint.catalog.resolve import find_newest, on_rank_0
from cpr.checkpoint.checkpointer import Checkpointer
from cpr.checkpoint.collectives import RankGroup
from cpr.checkpoint.ownership.records import Owner, newest_owner
from cpr.checkpoint.storage.base import Storage
from cpr.errors import AlreadyFinishedError, CheckpointError, LockedError, MismatchError, RunFinished
from cpr.rendezvous import WorkerGroup
from cpr.resident.cleanup import find_unsaved

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class SavedState:
    """The newest state of a checkpoint directory."""

    sequence: int
    epoch: int
    step: int
    """Training steps done."""
    base_step: int
    """Training steps done at the full save that it builds on: some of its rows may be as old as that."""

    @classmethod
    def of(cls, state: State) -> "SavedState":
        """Describe a state by its newest save."""
        return cls(
            sequence=state.sequence, epoch=state.newest.epoch, step=state.step, base_step=state.saves[0].step
        )


@dataclass(frozen=True, kw_only=True)
class Directory:
    """What all ranks know about the checkpoint directory when they decide how to start."""

    newest: SavedState | None = None
    """None: nothing was saved."""
    owner: Owner | None = None
    """The previous owner, before these workers."""
    session_id: str = ""
    """Session of these workers."""
    is_own: bool = False
    """Whether the saves were made by a launch of this very run, which these workers continue."""

    @property
    def owner_epoch(self) -> int:
        """Epoch of the previous owner; 0 if there was none."""
        return 0 if self.owner is None else self.owner.epoch

    def why_stale(self, epoch: int, step: int, *, is_mirror: bool = False) -> str | None:
        """Why memory must not be used any more; None if it descends from the newest save.

        Args:
            epoch: of the memory.
            step: training steps that are in the memory.
            is_mirror: whether only rows are taken from it, which may be newer than many of a row save.
        """
        saved, owner = self.newest, self.owner
        if saved is not None and (
            saved.epoch > epoch or (saved.base_step if is_mirror else saved.step) > step
        ):
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
    """Claim the checkpoint directory. While it cannot be written to, live memory is enough to continue.

    Called by all ranks.

    Args:
        checkpointer: of the directory; has neither saved nor loaded.
        worker_group: of the workers.
        resumes: whether a new run loads what is saved.

    Raises:
        RunFinished: the run has finished without these workers, after `raise_if_finished` looked.
        LockedError: another run uses the directory.
        MismatchError: the directory holds saves, and these workers belong to a run that must not load them.
        CheckpointError: the directory cannot be written to, and no memory survived.
    """
    ownership = checkpointer.ownership
    if not resumes and not has_memory(worker_group) and not _is_own(ownership.last_owner(), worker_group):
        # asked before the claim, which would take the directory from a run that may only be paused
        state = checkpointer.newest_state()
        if state is not None:
            raise MismatchError(
                f"{checkpointer.uri} holds save {state.sequence}, which this run has not loaded: resume "
                "it to go on from there, or choose an empty directory"
            )
    try:
        ownership.claim(lambda owner: not _has_finished_without(owner, worker_group))
    except AlreadyFinishedError as error:
        _log_finished(checkpointer.uri, error.step, worker_group)
        raise RunFinished(error.step) from None
    except LockedError:
        raise
    except CheckpointError as error:
        if not worker_group.continues or not has_memory(worker_group):
            raise
        if worker_group.rank == 0:
            logger.error("%s. Training continues from memory, and saving is tried again", error)
        ownership.read_previous_owner()
    newest = checkpointer.newest_state()
    return Directory(
        newest=None if newest is None else SavedState.of(newest),
        owner=ownership.previous,
        session_id=worker_group.session_id,
        is_own=_is_own(ownership.previous, worker_group),
    )


def refuse_unsaved(checkpointer: Checkpointer, root: Path | None = None) -> None:
    """Refuse to resume from a save where newer state of the same run is in a machine's memory, unsaved.

    Called by all ranks of a new launch, before it takes the directory: then that memory could not be saved
    there any more.

    Args:
        checkpointer: of the directory; has neither saved nor loaded.
        root: memory file system; None: the default one.

    Raises:
        MismatchError: there is such memory; says how to save or free it.
        CheckpointError: the directory cannot be read.
    """
    owner, newest = checkpointer.ownership.last_owner(), checkpointer.newest_state()
    if owner is None or owner.finished is not None:
        return
    found = find_unsaved(checkpointer.uri, owner.session, -1 if newest is None else newest.step, root)
    everywhere = checkpointer.agreement.gather(None if found is None else (socket.gethostname(), found))
    for host, folder in filter(None, everywhere):
        saved = "nothing is saved" if newest is None else f"the newest save is of step {newest.step}"
        raise MismatchError(
            f"{folder} on {host} holds the state of the run in {checkpointer.uri} that its last launch could "
            f"not save; {saved}. What to do: `cpr rescue {folder.name} --out {checkpointer.uri}` on that "
            "machine saves it, and then the run resumes from there; or `cpr clean --yes --unsaved` frees it, "
            "and the run resumes from what is saved"
        )


def note_launches(checkpointer: Checkpointer, worker_group: WorkerGroup, *, resumes: bool) -> None:
    """Record in the directory which launches its next saves belong to. Called by all ranks."""
    try:
        continues = resumes or worker_group.continues
        checkpointer.ownership.note_launches(worker_group.launches, continues=continues)
    except CheckpointError as error:
        if worker_group.rank == 0:
            logger.warning("the launch of this run could not be recorded: %s", error)


def raise_if_finished(storage: Storage, group: RankGroup, worker_group: WorkerGroup) -> None:
    """Leave if the run that these workers continue has finished without them. Called by all ranks.

    Raises:
        RunFinished: the run has finished.
        CheckpointError: the directory cannot be read.
    """
    if not worker_group.continues:
        return
    owner = on_rank_0(group, retry_reads(partial(newest_owner, storage)))
    if owner is not None and owner.finished is not None and _has_finished_without(owner, worker_group):
        _log_finished(storage.uri, owner.finished, worker_group)
        raise RunFinished(owner.finished)


def _has_finished_without(owner: Owner, worker_group: WorkerGroup) -> bool:
    """Whether the finished run of an owner is the one that these workers continue.

    Otherwise they belong to a new run on a finished directory, whose first workers died early.
    """
    return worker_group.continues and (has_memory(worker_group) or _is_own(owner, worker_group))


def _log_finished(uri: str, step: int, worker_group: WorkerGroup) -> None:
    if worker_group.rank == 0:
        logger.warning(
            "the run in %s finished at step %d: nothing is left to train, and nothing is written", uri, step
        )


def must_start_over(storage: Storage, group: RankGroup, worker_group: WorkerGroup) -> bool:
    """Whether memory is lost and nothing was saved that could replace it. Called by all ranks.

    Known before the model is built, so that no tables are adopted which would have to be given up again.
    """
    held = [
        segment
        for info in worker_group.infos
        for segment in info.held
        if segment.session_id == worker_group.session_id
    ]
    newest = max(held, key=lambda each: each.generation, default=None)
    if newest is None or {each.rank for each in held} >= set(range(newest.world_size)):
        return False
    return find_newest(storage, group)[0] is None


def has_memory(worker_group: WorkerGroup) -> bool:
    """Whether any of the workers found memory of their run."""
    return any(info.held for info in worker_group.infos)


def _is_own(owner: Owner | None, worker_group: WorkerGroup) -> bool:
    """Whether these workers continue a run of which a launch owned the directory."""
    if owner is None or not worker_group.continues:
        return False
    return not worker_group.launches.isdisjoint(owner.launches)
