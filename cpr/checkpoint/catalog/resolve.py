"""Opening a directory: finding the newest state that loads, and taking the directory for writing.

Both are done by all ranks together; rank 0 looks and tells the others.
"""

import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import TypeVar

from cpr.checkpoint.catalog.chain import Rejected, State, find_states, own_states
from cpr.checkpoint.collectives import RankGroup, on_rank, shareable
from cpr.checkpoint.format.manifest import Manifest
from cpr.checkpoint.storage.base import Storage
from cpr.errors import CorruptFileError, MismatchError, NoUsableStateError

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True)
class Survey:
    """What a run finds in the directory that it will write to."""

    next_sequence: int
    committed: tuple[Manifest, ...]
    """Saves of this run that are known to be good, oldest first."""


def load_newest(
    storage: Storage, group: RankGroup, attempt: Callable[[State], T]
) -> tuple[State, T, list[Rejected]] | None:
    """Load the newest state that loads on every rank.

    A directory belongs to the run that began it; saves of others in it are strangers.

    Args:
        storage: of the checkpoint.
        group: all ranks.
        attempt: loads a state on this rank; raises `CorruptFileError` or `MismatchError` if it cannot.

    Returns:
        The state, what `attempt` gave for it, and the newer saves that were rejected; None if nothing was
        ever saved.

    Raises:
        MismatchError: what is saved is not of this model.
        NoUsableStateError: there are saves, but none loads; lists why.
        CheckpointError: the storage cannot be read. No older state is tried then: nothing is wrong with the
            newest.
    """
    states: list[State] = []

    def look() -> tuple[int, list[Rejected]]:
        found, refused = own_states(storage)
        states.extend(found)
        return len(found), refused

    num_states, rejected = on_rank_0(group, look)
    rejected = [entry for entry in rejected if not entry.unfinished]
    mismatch: MismatchError | None = None
    for number in range(num_states):
        state = group.broadcast(states[number] if states else None)
        newer = sorted(
            (entry for entry in rejected if entry.sequence > state.sequence), key=lambda each: each.sequence
        )
        result, problem = _try(attempt, state)
        problems = [found for found in group.gather(problem) if found is not None]
        if not problems:
            assert result is not None
            _tell(group, storage, state, newer)
            return state, result, newer
        for found in problems:
            if not isinstance(found, CorruptFileError | MismatchError):
                raise found
            mismatch = mismatch or (found if isinstance(found, MismatchError) else None)
        rejected.append(Rejected(sequence=state.sequence, reason=str(problems[0])))
    if mismatch is not None:
        raise mismatch
    if rejected:
        reasons = "\n".join(f"  save {entry.sequence}: {entry.reason}" for entry in rejected)
        raise NoUsableStateError(f"no state in {storage.uri} can be loaded:\n{reasons}")
    return None


def find_newest(storage: Storage, group: RankGroup) -> tuple[State | None, list[Rejected]]:
    """The newest state of a directory as its manifests tell, and the finished saves that are newer than it.

    No rows are read. Called by all ranks; rank 0 alone gets the entries of chunks.

    Raises:
        CheckpointError: the storage cannot be read.
    """

    def look() -> tuple[State | None, list[Rejected]]:
        states, rejected = own_states(storage)
        newest = states[0] if states else None
        return newest, [
            entry
            for entry in rejected
            if not entry.unfinished and (newest is None or entry.sequence > newest.sequence)
        ]

    def shorten(found: tuple[State | None, list[Rejected]]) -> tuple[State | None, list[Rejected]]:
        newest, rejected = found
        return None if newest is None else newest.without_chunks(), rejected

    return _in_full_on_rank_0(group, look, shorten)


def survey(
    storage: Storage, group: RankGroup, run_id: str, loaded: State | None, rejected: Collection[int]
) -> Survey:
    """Look at a directory that is locked, and sweep what unfinished saves have left in it.

    Args:
        storage: of the checkpoint.
        group: all ranks.
        run_id: of this run.
        loaded: the state that this run goes on from; None: it begins anew.
        rejected: sequences of saves that could not be loaded; they are neither counted nor deleted.

    Raises:
        MismatchError: the directory holds saves that this run has not seen.
    """

    def shorten(found: Survey) -> Survey:
        return replace(found, committed=tuple(save.without_chunks() for save in found.committed))

    return _in_full_on_rank_0(group, lambda: _survey(storage, run_id, loaded, rejected), shorten)


def _in_full_on_rank_0(group: RankGroup, look: Callable[[], T], shorten: Callable[[T], T]) -> T:
    """What rank 0 finds; the others hear of it in short."""
    found: list[T] = []

    def look_and_shorten() -> T:
        found.append(look())
        return found[0] if group.world_size == 1 else shorten(found[0])

    heard = on_rank_0(group, look_and_shorten)
    return found[0] if found else heard


def on_rank_0(group: RankGroup, function: Callable[[], T]) -> T:
    """What rank 0's call gives, on every rank; or its error, whatever that is."""
    return on_rank(group, 0, function)


def _survey(storage: Storage, run_id: str, loaded: State | None, rejected: Collection[int]) -> Survey:
    states, refused = find_states(storage)
    saves = {save.sequence: save for state in states for save in state.saves}
    there = saves.keys() | {each.sequence for each in refused}
    finished = saves.keys() | {each.sequence for each in refused if not each.unfinished}
    newest = max(finished - set(rejected), default=-1)
    if newest > (loaded.sequence if loaded else -1):
        raise MismatchError(
            f"{storage.uri} holds save {newest}, which this run has not loaded: load it to go on from there, "
            "or choose an empty directory"
        )
    for each in refused:
        if each.unfinished:
            storage.delete(each.folder)
    good = {
        save.sequence: save
        for state in states
        if state.newest.run_id == run_id and not any(save.sequence in rejected for save in state.saves)
        for save in state.saves
    }
    return Survey(max(there, default=-1) + 1, tuple(good[key] for key in sorted(good)))


def _try(attempt: Callable[[State], T], state: State) -> tuple[T | None, Exception | None]:
    try:
        return attempt(state), None
    except Exception as error:  # the others wait to hear how it went
        return None, shareable(error)


def _tell(group: RankGroup, storage: Storage, state: State, newer: list[Rejected]) -> None:
    if newer and group.rank == 0:
        reasons = "; ".join(f"save {entry.sequence}: {entry.reason}" for entry in newer)
        logger.warning(
            "%s: fell back to save %d of step %d, because newer ones cannot be loaded: %s",
            storage.uri,
            state.sequence,
            state.step,
            reasons,
        )
