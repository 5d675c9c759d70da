"""Which states a checkpoint directory holds: its saves, followed back from each one to a base.

A state is a base and the row saves up to some save, every one of them the parent of the next. A save names
its parent by number and by the digest of the parent's manifest, so a gap, a copy, a stranger or a rewritten
save breaks the chain at that place; what is older still counts. A save of an owner that had been replaced
does not count at all (`cpr.checkpoint.ownership.records`). Only manifests are read here, no rows: whether the
files behind them are intact shows when they are loaded or verified.
"""

from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

from cpr.checkpoint.format.manifest import SAVES, Manifest, Parent, TableEntry, numbers_of, save_folder
from cpr.checkpoint.ownership.records import Owner, fence
from cpr.checkpoint.storage.base import Storage, read_file
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
    def newest_row_step(self) -> int:
        """Training step of its newest row; later than `step` where training went on during the copying."""
        return max((entry.last_step for save in self.saves for entry in save.rows), default=self.step)

    def without_chunks(self) -> "State":
        """The same state, its manifests without the entries of chunks."""
        return State(tuple(save.without_chunks() for save in self.saves))

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
    """Never committed, or by an owner that had been replaced: no sign of damage. The next owner of the
    directory removes it."""
    folder: str = ""
    """Of the save, relative to the checkpoint directory; empty where `reason` is about several."""


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
            rejected[sequence] = Rejected(sequence, f"{save.path} {fault}", folder=save.folder)
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


def is_committed(storage: Storage, folder: str) -> bool:
    """Whether a save has a manifest, of whatever content.

    Args:
        storage: the checkpoint directory.
        folder: of the save.
    """
    return "manifest.json" in storage.list(folder)


def committed(storage: Storage) -> list[tuple[int, int]]:
    """Sequence and epoch of all saves that count, those included whose manifest may turn out to be damaged.

    Raises:
        CheckpointError: the storage fails.
    """
    current, _ = _current_folders(storage)
    with ThreadPoolExecutor(READERS, thread_name_prefix="cpr-manifests") as pool:
        found = pool.map(lambda numbers: is_committed(storage, save_folder(*numbers)), current)
        return [numbers for numbers, is_there in zip(current, found, strict=True) if is_there]


def _age(state: State) -> tuple[int, int]:
    return max(state.newest.merged, default=state.sequence), state.sequence


def _read_saves(storage: Storage) -> tuple[dict[int, Manifest], dict[int, Rejected], list[Rejected]]:
    """All saves with a manifest, those without a usable one, and folders that repeat another's number."""
    saves: dict[int, Manifest] = {}
    rejected: dict[int, Rejected] = {}
    current, others = _current_folders(storage)
    with ThreadPoolExecutor(READERS, thread_name_prefix="cpr-manifests") as pool:
        found = pool.map(lambda numbers: _read_save(storage, *numbers), current)
        for (sequence, _), save in zip(current, found, strict=True):
            if isinstance(save, Manifest):
                saves[sequence] = save
            else:
                rejected[sequence] = save
    return saves, rejected, others


def _current_folders(storage: Storage) -> tuple[list[tuple[int, int]], list[Rejected]]:
    """Sequence and epoch of saves of the directory's owners, and folders that are none."""
    numbered: list[tuple[int, int]] = []
    others: list[Rejected] = []
    for name in storage.list(SAVES):
        numbers = numbers_of(name)
        if numbers is None:
            continue
        folder = save_folder(*numbers)
        if folder == f"{SAVES}/{name}":
            numbered.append(numbers)
        else:
            reason = f"{SAVES}/{name} is a copy: that save belongs in {folder}; remove one of the two"
            others.append(Rejected(numbers[0], reason))
    replaced = _of_replaced_owners(numbered, fence(storage))
    others += [
        Rejected(
            sequence,
            f"{save_folder(sequence, epoch)} is of epoch {epoch}: its owner had been replaced when it was "
            "written, so it does not count",
            unfinished=True,
            folder=save_folder(sequence, epoch),
        )
        for sequence, epoch in sorted(replaced)
    ]
    return [numbers for numbers in numbered if numbers not in replaced], others


def _of_replaced_owners(numbered: Iterable[tuple[int, int]], owner: Owner | None) -> set[tuple[int, int]]:
    """Those that were written when a newer owner had taken the directory.

    Args:
        numbered: sequence and epoch of saves.
        owner: whose record lists the older saves that count; None where the record is damaged or nobody ever
            wrote one: then it is the epochs of later saves that tell, as they never fall.
    """
    if owner is not None:
        return {numbers for numbers in numbered if not owner.counts(*numbers)}
    replaced, highest = set(), 0
    for sequence, epoch in sorted(numbered, key=lambda numbers: (numbers[0], -numbers[1])):
        if epoch < highest:
            replaced.add((sequence, epoch))
        highest = max(highest, epoch)
    return replaced


def _read_save(storage: Storage, sequence: int, epoch: int) -> Manifest | Rejected:
    folder = save_folder(sequence, epoch)
    path = f"{folder}/manifest.json"
    try:
        data = _read_manifest(storage, folder)
        if data is None:
            reason = f"{path} is not there: the save was never finished"
            return Rejected(sequence, reason, unfinished=True, folder=folder)
        manifest = Manifest.from_json(data, path)
    except CorruptFileError as error:  # after any other error the save may be sound
        return Rejected(sequence, str(error), folder=folder)
    if (manifest.sequence, manifest.epoch) != (sequence, epoch):
        return Rejected(
            sequence,
            f"{path} says that it is save {manifest.sequence} of epoch {manifest.epoch}: its folder was "
            "copied or renamed, and counting it would lay old rows over newer ones",
            folder=folder,
        )
    return manifest


def _read_manifest(storage: Storage, folder: str) -> bytes | None:
    try:
        return read_file(storage, f"{folder}/manifest.json")
    except CorruptFileError:
        if is_committed(storage, folder):
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
