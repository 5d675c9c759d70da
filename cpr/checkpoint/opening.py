"""Opening a directory: finding the newest state that loads, and taking the directory for writing.

Both are done by all ranks together; rank 0 looks and tells the others.
"""

import logging
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from cpr.checkpoint.chain import Rejected, State, find_states
from cpr.checkpoint.lock import DirectoryLock
from cpr.checkpoint.manifest import save_folder
from cpr.checkpoint.ranks import RankGroup
from cpr.checkpoint.storage import Storage
from cpr.errors import CheckpointError, MismatchError, NoUsableStateError

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True)
class Claim:
    """A directory that this run writes to."""

    run_id: str
    next_sequence: int
    states: tuple[State, ...]
    """Of this run, newest first."""
    lock: DirectoryLock | None
    """Held by rank 0."""


def load_newest(
    storage: Storage, group: RankGroup, attempt: Callable[[State], T]
) -> tuple[State, T, list[Rejected]] | None:
    """Load the newest state that loads on every rank.

    Args:
        storage: of the checkpoint.
        group: all ranks.
        attempt: loads a state on this rank; raises `CheckpointError` if it cannot.

    Returns:
        The state, what `attempt` gave for it, and what was rejected before it; None if nothing was saved.

    Raises:
        MismatchError: what is saved is not of this model.
        NoUsableStateError: there are saves, but none loads; lists why.
    """
    states, rejected = _on_rank_0(group, lambda: find_states(storage))
    for state in states:
        result, problem = _try(attempt, state)
        problems = [found for found in group.gather(problem) if found is not None]
        if not problems:
            assert result is not None
            return state, result, rejected
        if mismatch := next((found for found in problems if isinstance(found, MismatchError)), None):
            raise mismatch
        rejected.append(Rejected(sequence=state.sequence, reason=str(problems[0])))
        if group.rank == 0:
            logger.warning("save %d cannot be loaded: %s; trying an older one", state.sequence, problems[0])
    rejected = [entry for entry in rejected if not entry.unfinished]
    if rejected:
        reasons = "\n".join(f"  save {entry.sequence}: {entry.reason}" for entry in rejected)
        raise NoUsableStateError(f"no state in {storage.uri} can be loaded:\n{reasons}")
    return None


def claim(storage: Storage, group: RankGroup, loaded: State | None) -> Claim:
    """Take the directory for writing and sweep what unfinished saves have left in it.

    Args:
        storage: of the checkpoint.
        group: all ranks.
        loaded: the state that this run goes on from; None: it begins anew.

    Raises:
        LockedError: another run that is alive writes there.
        MismatchError: the directory holds saves that this run has not loaded.
    """
    lock: DirectoryLock | None = None

    def take() -> tuple[str, int, list[State]]:
        nonlocal lock
        run_id = loaded.newest.run_id if loaded else uuid.uuid4().hex
        lock = DirectoryLock(storage, run_id)
        lock.acquire()
        try:
            return run_id, *_survey(storage, run_id, loaded)
        except BaseException:
            lock.release()
            raise

    run_id, next_sequence, states = _on_rank_0(group, take)
    return Claim(run_id, next_sequence, tuple(states), lock)


def _survey(storage: Storage, run_id: str, loaded: State | None) -> tuple[int, list[State]]:
    sequences = [int(name) for name in storage.list("saves") if name.isdecimal()]
    finished = [sequence for sequence in sequences if _is_finished(storage, sequence)]
    if finished and loaded is None:
        raise MismatchError(
            f"{storage.uri} holds saves of an earlier run (the newest is {max(finished)}): "
            "load them to go on from there, or choose an empty directory"
        )
    for sequence in set(sequences) - set(finished):
        storage.delete(save_folder(sequence))
    states, _ = find_states(storage, run_id)
    return max(sequences, default=-1) + 1, states


def _is_finished(storage: Storage, sequence: int) -> bool:
    return "manifest.json" in storage.list(save_folder(sequence))


def _try(attempt: Callable[[State], T], state: State) -> tuple[T | None, CheckpointError | None]:
    try:
        return attempt(state), None
    except CheckpointError as error:
        return None, error


def _on_rank_0(group: RankGroup, function: Callable[[], T]) -> T:
    """What rank 0's call gives, on every rank; or its error."""
    result: tuple[T | None, CheckpointError | None] = (None, None)
    if group.rank == 0:
        try:
            result = (function(), None)
        except CheckpointError as error:
            result = (None, error)
    value, failure = group.broadcast(result)
    if failure is not None:
        raise failure
    return value  # type: ignore[return-value]  # without an error there is a value
