"""Exports one state of a checkpoint directory as files that other programs read.

The files are written to a folder with a temporary name, which is renamed at the end, so that an incomplete
export never looks finished. Everything that is read is verified, so after a damaged state the next older one
is tried.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cpr.checkpoint.catalog.chain import Rejected, State, own_states, states_of_step
from cpr.checkpoint.interop.full_model import NOTES_FILE, FullModel
from cpr.checkpoint.interop.increment import TableIncrement, write_increment
from cpr.checkpoint.interop.to_dcp import write_dcp
from cpr.checkpoint.interop.to_parquet import write_parquet
from cpr.checkpoint.interop.to_safetensors import write_safetensors
from cpr.checkpoint.storage.base import Storage
from cpr.checkpoint.storage.explain import explained
from cpr.checkpoint.storage.local import sync_folder
from cpr.errors import CorruptFileError, NoUsableStateError

Progress = Callable[[int], object]
Writer = Callable[[FullModel, Path, Progress], None]

WRITERS: Final[Mapping[str, Writer]] = {
    "dcp": write_dcp,
    "safetensors": write_safetensors,
    "parquet": write_parquet,
}
TABLES_ALONE: Final = frozenset({"parquet"})


@dataclass(frozen=True, kw_only=True)
class Exported:
    """Result of an export: the state, and the saves that were skipped."""

    state: State
    rejected: list[Rejected]
    """Newer saves that could not be exported, with the reason."""
    increment: Mapping[str, TableIncrement] | None = None
    """What an increment has of each table; None: a full model was written."""


def export(
    storage: Storage,
    to: str,
    out: Path,
    sequence: int | None = None,
    step: int | None = None,
    since: int | None = None,
    progress: Progress = lambda _: None,
    start: Progress = lambda _: None,
) -> Exported:
    """Write one state as a full model, or what it has changed: by default the newest whose files verify.

    Args:
        storage: the checkpoint directory.
        to: one of `WRITERS`.
        out: folder to make; may exist if it is empty.
        sequence: export the state of this save.
        step: export the newest state of this training step.
        since: write only what has changed since the states of this training step (`write_increment`).
        progress: called with the bytes of table rows written, or compared, since the last call.
        start: called with the total bytes of table rows, at each attempt.

    Raises:
        ValueError: `out` is in use, or there is no such state; lists those that there are. Or an increment
            cannot be made of these states; says what to do.
        CorruptFileError: the state of `sequence` is damaged.
        NoUsableStateError: all states are damaged; lists the reasons.
        CheckpointError: `out` cannot be written.
    """
    states, rejected = own_states(storage)
    if since is not None and to != "parquet":
        raise ValueError(
            "an increment holds tables alone, as Parquet: export it with --to parquet, and a full model, "
            f"without --since, with --to {to}"
        )
    every = states
    olders = [] if since is None or not states else _states_since(states, since, storage.uri)
    if sequence is not None:
        states = [_pick(states, rejected, sequence, storage.uri)]
    elif step is not None:
        states = states_of_step(states, step, storage.uri)
    if olders:
        states = _newer(states, olders[0], every, storage.uri)
    for state in states:
        increment = None
        with _appearing(out) as folder:
            try:
                if olders:
                    increment = write_increment(storage, olders, state, every, folder, progress, start)
                else:
                    _write_full(FullModel(storage, state), to, folder, progress, start)
            except CorruptFileError as error:
                if sequence is not None:
                    raise
                rejected.append(Rejected(state.sequence, str(error)))
                shutil.rmtree(folder)
                continue
        newer = [save for save in rejected if save.sequence > state.sequence and not save.unfinished]
        return Exported(state=state, rejected=newer, increment=increment)
    reasons = "\n".join(f"  save {save.sequence}: {save.reason}" for save in rejected)
    what = "state that could be exported: name a directory in which a run has saved"
    if olders:
        what = f"pair of states for an increment since step {since}: make a full export, without --since"
    raise NoUsableStateError(f"{storage.uri} holds no {what}\n{reasons}".rstrip())


def _states_since(states: Sequence[State], step: int, uri: str) -> list[State]:
    """The states of the step that a follower has, newest first; of equal ones the merged base alone."""
    found = [state for state in states if state.step == step]
    merged = {sequence for state in found for sequence in state.newest.merged[-1:]}
    if found:
        return [state for state in found if state.sequence not in merged]
    last = max(state.step for state in states)
    if step > last:
        raise ValueError(
            f"{uri} has no state of step {step} yet; its last is of step {last}. Give --since the step in "
            "the cpr-export.json or cpr-increment.json that the follower has"
        )
    steps = ", ".join(map(str, sorted({state.step for state in states})))
    raise ValueError(
        f"{uri} has no state of step {step}, without which it is not known what has changed; it has those of "
        f"steps {steps}. Saves older than the newest keep_last full ones are deleted: make a full export, "
        "without --since, and follow from its step; to follow less often, raise keep_last"
    )


def _newer(states: Sequence[State], older: State, every: Sequence[State], uri: str) -> list[State]:
    """Those of some states that are newer than the one that a follower has; itself if none is."""
    newer = [state for state in states if every.index(state) < every.index(older)]
    if not newer and older not in states:
        raise ValueError(
            f"save {states[0].sequence} of {uri}, at step {states[0].step}, is older than save "
            f"{older.sequence} at step {older.step}: give --since an earlier step, or make a full export"
        )
    return newer or [older]


def _write_full(model: FullModel, to: str, folder: Path, progress: Progress, start: Progress) -> None:
    start(model.num_bytes)
    WRITERS[to](model, folder, progress)
    _write_notes(model, folder / NOTES_FILE, with_state=to not in TABLES_ALONE)


def _pick(states: list[State], rejected: list[Rejected], sequence: int, uri: str) -> State:
    for state in states:
        if state.sequence == sequence:
            return state
    for save in rejected:
        if save.sequence == sequence:
            raise ValueError(f"save {sequence} gives no state: {save.reason}")
    known = ", ".join(str(state.sequence) for state in states) or "none"
    raise ValueError(f"{uri} has no save {sequence}; it has {known}")


@contextmanager
def _appearing(out: Path) -> Iterator[Path]:
    """A new folder that is renamed to `out` after the block if it still exists; removed after an error."""
    out = out.absolute()
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} is in use; name a folder that does not exist or is empty")
    unfinished = out.with_name(f"{out.name}.unfinished")
    if unfinished.exists():
        raise ValueError(
            f"{unfinished} is left from an export that was interrupted, or belongs to one that is running: "
            "remove it if none is"
        )
    try:
        with explained("writing", str(out)):
            unfinished.mkdir(parents=True)
            yield unfinished
            if unfinished.exists():
                unfinished.rename(out)
                sync_folder(out.parent)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise


def _write_notes(model: FullModel, path: Path, with_state: bool) -> None:
    notes = {key: value for key, value in model.notes.items() if with_state or key != "state"}
    with path.open("w") as file:
        json.dump(notes, file, indent=1)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    sync_folder(path.parent)
