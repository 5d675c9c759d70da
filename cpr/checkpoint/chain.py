"""Which states a checkpoint directory holds: its saves, followed back from each one to a base.

A state is a base and the row saves up to some save, every one of them the parent of the next. A save names
its parent by number and by the digest of the parent's manifest, so a gap, a copy, a stranger or a rewritten
save breaks the chain at that place; what is older still counts. Only manifests are read here, no rows:
whether the files behind them are intact shows when they are loaded or verified.
"""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

from cpr.checkpoint.manifest import Manifest, Parent, TableEntry, manifest_path, save_folder
from cpr.checkpoint.storage import Storage, read_file
from cpr.errors import CorruptFileError

READERS: Final = 16
"""Manifests that are read at a time: on object stores the wait for each answer is what takes long."""


@dataclass(frozen=True)
class State:
    """Everything that one committed save stands for."""

    saves: tuple[Manifest, ...]
    """The base, then the row saves on top of it in order; the last one is the save itself."""

    @property
    def newest(self) -> Manifest:
        """The save that gives the state its step and everything that is no table."""
        return self.saves[-1]

    @property
    def sequence(self) -> int:
        """Sequence of the newest save."""
        return self.newest.sequence

    @property
    def step(self) -> int:
        """Training steps done."""
        return self.newest.step

    @property
    def num_bytes(self) -> int:
        """Of all files of all its saves, without the manifests."""
        return sum(save.num_bytes for save in self.saves)


@dataclass(frozen=True)
class Rejected:
    """A save that gives no state, and why."""

    sequence: int
    reason: str
    """Names the file, what is wrong, and what it means."""
    unfinished: bool = False
    """Never committed: an interrupted save, no sign of damage. The next owner of the directory removes it."""


def find_states(storage: Storage, run_id: str | None = None) -> tuple[list[State], list[Rejected]]:
    """Follow every save of a directory back to its base.

    Two saves may have the same parent (after falling back to an older state, training goes on from there), so
    states can share saves. A base made by merging ranks right after the newest save that went into it.

    Args:
        storage: the checkpoint directory.
        run_id: accept saves of this run alone; None: of any run, but never a mixture in one state.

    Returns:
        All states, newest first, and all saves that give none, newest first. Folders of `saves/` that are not
        called by a number are not looked at.

    Raises:
        CheckpointError: the storage fails, for the directory or for a single manifest. No state is given
            then: one that leaves out a save which is only out of reach would be older than what was saved.
    """
    saves, rejected, copies = _read_saves(storage)
    states: dict[int, State] = {}
    for sequence, save in sorted(saves.items()):
        fault = _fault(save, saves, rejected, run_id)
        if fault:
            rejected[sequence] = Rejected(sequence, f"{manifest_path(sequence)} {fault}")
        else:
            parent = save.parent
            older = states[parent.sequence].saves if parent else ()
            states[sequence] = State((*older, save))
    refused = sorted((*rejected.values(), *copies), key=lambda save: save.sequence, reverse=True)
    return sorted(states.values(), key=_age, reverse=True), refused


def own_states(storage: Storage) -> tuple[list[State], list[Rejected]]:
    """As `find_states`, of the run whose directory it is: that of the oldest save. All others are strangers.

    Raises:
        CheckpointError: as there.
    """
    states, rejected = find_states(storage)
    saves = {save.sequence: save.run_id for state in states for save in state.saves}
    if len(set(saves.values())) > 1:
        return find_states(storage, saves[min(saves)])
    return states, rejected


def is_finished(storage: Storage, sequence: int) -> bool:
    """Whether a save has a manifest, of whatever content."""
    folder, _, name = manifest_path(sequence).rpartition("/")
    return name in storage.list(folder)


def _age(state: State) -> tuple[int, int]:
    return max(state.newest.merged, default=state.sequence), state.sequence


def _read_saves(storage: Storage) -> tuple[dict[int, Manifest], dict[int, Rejected], list[Rejected]]:
    """All saves with a manifest, those without a usable one, and folders that repeat another's number."""
    saves: dict[int, Manifest] = {}
    rejected: dict[int, Rejected] = {}
    copies: list[Rejected] = []
    numbered: list[int] = []
    for name in storage.list("saves"):
        if name.isascii() and name.isdigit():
            folder = save_folder(int(name))
            if folder == f"saves/{name}":
                numbered.append(int(name))
            else:
                reason = (
                    f"saves/{name} is a copy: save {int(name)} belongs in {folder}; remove one of the two"
                )
                copies.append(Rejected(int(name), reason))
    with ThreadPoolExecutor(READERS, thread_name_prefix="cpr-manifests") as pool:
        found = pool.map(lambda sequence: _read_save(storage, sequence), numbered)
        for sequence, save in zip(numbered, found, strict=True):
            if isinstance(save, Manifest):
                saves[sequence] = save
            else:
                rejected[sequence] = save
    return saves, rejected, copies


def _read_save(storage: Storage, sequence: int) -> Manifest | Rejected:
    path = manifest_path(sequence)
    try:
        data = _read_manifest(storage, sequence)
        if data is None:
            return Rejected(sequence, f"{path} is not there: the save was never finished", unfinished=True)
        manifest = Manifest.from_json(data, path)
    except CorruptFileError as error:  # after any other error the save may be sound
        return Rejected(sequence, str(error))
    if manifest.sequence != sequence:
        return Rejected(
            sequence,
            f"{path} says that it is save {manifest.sequence}: its folder was copied or renamed, and "
            "counting it would lay old rows over newer ones",
        )
    return manifest


def _read_manifest(storage: Storage, sequence: int) -> bytes | None:
    path = manifest_path(sequence)
    try:
        return read_file(storage, path)
    except CorruptFileError:
        if is_finished(storage, sequence):
            raise
        return None


def _fault(
    save: Manifest, saves: Mapping[int, Manifest], rejected: Mapping[int, Rejected], run_id: str | None
) -> str | None:
    """Why a save gives no state; None when it does. The saves before it have been judged already."""
    if run_id is not None and save.run_id != run_id:
        return f"is of run {save.run_id}, not of run {run_id}: another run wrote to this directory"
    if save.kind == "base":
        whole = save.parent is None and save.base == save.sequence
        return None if whole else "calls itself a base and yet builds on another save: no writer makes that"
    if save.parent is None:
        return "is a row save that names no parent: there is nothing to lay its rows upon"
    return _broken_link(save, save.parent, saves, rejected)


def _broken_link(
    save: Manifest, parent: Parent, saves: Mapping[int, Manifest], rejected: Mapping[int, Rejected]
) -> str | None:
    if parent.sequence >= save.sequence:
        return f"builds on save {parent.sequence}, which comes after it: the order of the saves is wrong"
    for role, sequence in (("lies on base", save.base), ("builds on save", parent.sequence)):
        if sequence not in saves and sequence not in rejected:
            return f"{role} {sequence}, which is missing: its rows are lost, and there is a gap"
        if sequence in rejected:
            state = "was never finished" if rejected[sequence].unfinished else "cannot be used itself"
            return f"{role} {sequence}, which {state}"
    return _misfit(save, parent, saves[parent.sequence])


def _misfit(save: Manifest, parent: Parent, older: Manifest) -> str | None:
    whose = f"its parent, save {older.sequence},"
    if save.run_id != older.run_id:
        return f"is of run {save.run_id}, {whose} of run {older.run_id}: one of them is a stranger"
    if parent.digest != older.file_digest:
        return (
            f"builds on a save {older.sequence} whose manifest has digest {parent.digest}, but the one here "
            f"has {older.file_digest}: one of the two is a stranger or was written again"
        )
    if save.base != older.base:
        return f"lies on base {save.base}, {whose} on base {older.base}: the order of the saves is wrong"
    if save.step < older.step:
        return f"is of step {save.step}, {whose} of step {older.step}: the order of the saves is wrong"
    return _different_tables(save.tables, older.tables, whose)


def _different_tables(
    tables: Mapping[str, TableEntry], older: Mapping[str, TableEntry], whose: str
) -> str | None:
    for fqn in sorted(tables.keys() | older.keys()):
        mine, theirs = _layout(tables.get(fqn)), _layout(older.get(fqn))
        if mine != theirs:
            return f"has table {fqn} as {mine}, {whose} as {theirs}: they are of different models"
    return None


def _layout(table: TableEntry | None) -> str:
    if table is None:
        return "absent"
    columns = (
        f"{name} {column.dtype} per {'row' if column.per_row else 'element'}"
        for name, column in sorted(table.columns.items())
    )
    return f"{table.rows} x {table.cols} ({', '.join(columns)})"
