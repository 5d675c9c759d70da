"""Finds the state to load, collectively: rank 0 reads the manifests and tells the other ranks."""

import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from cpr.checkpoint.catalog.chain import (
    ManifestCache,
    Rejected,
    State,
    find_states,
    own_states,
    states_of_step,
)
from cpr.checkpoint.collectives import RankGroup, attempt_on_all, on_rank
from cpr.checkpoint.format.manifest import Manifest
from cpr.checkpoint.storage.base import Storage
from cpr.errors import CorruptFileError, MismatchError, NoUsableStateError

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True)
class CommittedSaves:
    """The saves of a run in the directory that it will write to."""

    next_sequence: int
    committed: tuple[Manifest, ...]
    """Sound saves of this run, oldest first."""


def load_newest(
    storage: Storage,
    group: RankGroup,
    attempt: Callable[[State], T],
    *,
    step: int | None = None,
    cache: ManifestCache | None = None,
) -> tuple[State, T, list[Rejected]] | None:
    """Load the newest state, or that of a training step, that loads on every rank.

    Only states of the run that the directory belongs to are tried, see `own_states`. `attempt` loads a state
    on this rank, and raises `CorruptFileError` or `MismatchError` if it cannot.

    Returns:
        The state, the result of `attempt`, and newer saves that were not loaded; None if there is no save.

    Raises:
        ValueError: there is no state of `step`; lists the steps that there are.
        MismatchError: the saves are of another model.
        NoUsableStateError: there are saves, but none loads; lists the reasons.
        CheckpointError: the storage cannot be read. No older state is tried then, because the newest one may
            be sound.
    """
    states: list[State] = []

    def look() -> tuple[int, list[Rejected]]:
        found, refused = own_states(storage, cache)
        if step is not None:
            chosen = states_of_step(found, step, storage.uri)
            passed_over = [state for state in found if state not in chosen]
            refused += [
                Rejected(state.sequence, f"it is of step {state.step}; step {step} was asked for")
                for state in passed_over
            ]
            found = chosen
        states.extend(found)
        return len(found), refused

    num_states, rejected = on_rank_0(group, look)
    rejected = [entry for entry in rejected if not entry.unfinished]
    mismatch: MismatchError | None = None
    for number in range(num_states):
        # One state at a time: usually the first one loads, and each may have millions of chunks.
        state = group.broadcast(states[number] if states else None)
        newer = sorted(
            (entry for entry in rejected if entry.sequence > state.sequence), key=lambda each: each.sequence
        )
        result, problems = attempt_on_all(group, partial(attempt, state))
        if not problems:
            assert result is not None
            if newer and step is None and group.rank == 0:
                logger.warning(
                    "%s: fell back to save %d of step %d, because newer ones cannot be loaded: %s",
                    storage.uri,
                    state.sequence,
                    state.step,
                    "; ".join(f"save {entry.sequence}: {entry.reason}" for entry in newer),
                )
            return state, result, newer
        for found in problems.values():
            if not isinstance(found, CorruptFileError | MismatchError):
                raise found
            mismatch = mismatch or (found if isinstance(found, MismatchError) else None)
        rejected.append(Rejected(sequence=state.sequence, reason=str(next(iter(problems.values())))))
    if mismatch is not None:
        raise mismatch
    if rejected:
        reasons = "\n".join(f"  save {entry.sequence}: {entry.reason}" for entry in rejected)
        raise NoUsableStateError(f"no state in {storage.uri} can be loaded:\n{reasons}")
    return None


def find_newest(
    storage: Storage, group: RankGroup, cache: ManifestCache | None = None
) -> tuple[State | None, list[Rejected]]:
    """The newest state according to the manifests, and the finished saves that are newer but not loadable.

    Reads no rows. Called by all ranks; rank 0 alone gets the entries of chunks.
    """

    def look() -> tuple[State | None, list[Rejected]]:
        states, rejected = own_states(storage, cache)
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


def sweep_and_list(
    storage: Storage,
    group: RankGroup,
    run_id: str,
    loaded: State | None,
    rejected: Collection[int],
    cache: ManifestCache | None = None,
) -> CommittedSaves:
    """Delete unfinished saves from a directory that this run owns, and list the run's committed saves.

    The run continues from `loaded`, or starts over if that is None. Saves of the sequences `rejected` were
    not loaded: they are neither listed nor deleted.

    Raises:
        MismatchError: the directory holds newer saves that this run has not loaded.
    """

    def look() -> CommittedSaves:
        states, refused = find_states(storage, cache=cache)
        saves = {save.sequence: save for state in states for save in state.saves}
        finished = saves.keys() | {each.sequence for each in refused if not each.unfinished}
        newest = max(finished - set(rejected), default=-1)
        if newest > (loaded.sequence if loaded else -1):
            raise MismatchError(
                f"{storage.uri} holds save {newest}, which this run has not loaded: load it to continue from "
                "there, or choose an empty directory"
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
        taken = saves.keys() | {each.sequence for each in refused}
        return CommittedSaves(max(taken, default=-1) + 1, tuple(good[key] for key in sorted(good)))

    def shorten(found: CommittedSaves) -> CommittedSaves:
        return replace(found, committed=tuple(save.without_chunks() for save in found.committed))

    return _in_full_on_rank_0(group, look, shorten)


def on_rank_0(group: RankGroup, function: Callable[[], T]) -> T:
    """Call a function on rank 0 and return its result, or raise its error, on every rank."""
    return on_rank(group, 0, function)


def _in_full_on_rank_0(group: RankGroup, look: Callable[[], T], shorten: Callable[[T], T]) -> T:
    """The result of `look` on rank 0; its short form elsewhere, as manifests may have millions of chunks."""
    found: list[T] = []

    def look_and_shorten() -> T:
        found.append(look())
        return found[0] if group.world_size == 1 else shorten(found[0])

    short = on_rank_0(group, look_and_shorten)
    return found[0] if found else short
