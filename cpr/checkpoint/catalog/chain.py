"""The states of a checkpoint directory: each save, followed back to the full checkpoint that it builds on.

A state is a base (a full checkpoint) and the row saves (delta checkpoints) up to some save, each the parent
of the next. A save names its parent by number and by the digest of the parent's manifest, so a gap, a copy, a
save of another run or a rewritten save breaks the chain at that place; older states still count. A save of an
owner that had been replaced does not count at all (`cpr.checkpoint.ownership.records`). Only manifests are
read here, no rows: loading or verifying shows whether the other files are intact.
"""

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

from cpr.checkpoint.format.manifest import SAVES, Manifest, Parent, TableEntry, numbers_of, save_folder
from cpr.checkpoint.ownership.records import Owner, fence
from cpr.checkpoint.storage.base import Storage, read_file
from cpr.errors import CorruptFileError

READERS: Final = 16
"""Manifests that are read at a time: on object stores the wait for each answer takes longest."""

ManifestCache = dict[tuple[int, int], Manifest]
"""Manifests by sequence and epoch that were read before. A committed manifest never changes, because no two
owners write to the same folder, so only the lists of saves and owners have to be read again."""


@dataclass(frozen=True)
class State:
    """A loadable state: a save with all saves that it builds on."""

    saves: tuple[Manifest, ...]
    """The base, then the row saves on top of it in order."""

    @property
    def newest(self) -> Manifest:
        """The last save, which gives the state its step and everything that is not a table."""
        return self.saves[-1]

    @property
    def sequence(self) -> int:
        """Sequence of the last save."""
        return self.newest.sequence

    @property
    def step(self) -> int:
        """Training steps done."""
        return self.newest.step

    @property
    def newest_row_step(self) -> int:
        """Training step of the newest row; later than `step` if training continued during copying."""
        return max((entry.last_step for save in self.saves for entry in save.rows), default=self.step)

    def without_chunks(self) -> "State":
        """The same state with manifests that lack the entries of chunks."""
        return State(tuple(save.without_chunks() for save in self.saves))

    @property
    def num_bytes(self) -> int:
        """Bytes of all files of all its saves, without the manifests."""
        return sum(save.num_bytes for save in self.saves)


@dataclass(frozen=True)
class Rejected:
    """A save that cannot be loaded as a state, with the reason."""

    sequence: int
    reason: str
    """Message that names the file, the fault, and its consequence."""
    unfinished: bool = False
    """Whether the save was never committed, or was written by an owner that had been replaced. That is no
    damage; the next owner of the directory removes the save."""
    folder: str = ""
    """Folder of the save, relative to the checkpoint directory; empty where `reason` is about several."""


def find_states(
    storage: Storage, run_id: str | None = None, cache: ManifestCache | None = None
) -> tuple[list[State], list[Rejected]]:
    """Follow every save of a directory back to its base.

    Two saves may have the same parent (after a fallback to an older state, training continues from there), so
    states can share saves. A merged base ranks right after the newest save that it was made from. Only saves
    of `run_id` are accepted; None: of any run, but never a mixture in one state.

    Returns:
        All states, newest first, and all saves that are not loadable, newest first. Folders of `saves/` that
        have no number as their name are ignored.

    Raises:
        CheckpointError: the storage fails, for the directory or for a single manifest. No older state is
            returned then, because the save that cannot be read now may be sound.
    """
    return _resolve(*_read_saves(storage, cache), run_id)


def own_states(storage: Storage, cache: ManifestCache | None = None) -> tuple[list[State], list[Rejected]]:
    """Find the states of the run that a directory belongs to (that of its oldest save); see `find_states`."""
    found = _read_saves(storage, cache)
    states, rejected = _resolve(*found, None)
    saves = {save.sequence: save.run_id for state in states for save in state.saves}
    if len(set(saves.values())) > 1:
        return _resolve(*found, saves[min(saves)])
    return states, rejected


def states_of_step(states: Sequence[State], step: int, uri: str) -> list[State]:
    """The states of a training step, in the order of `states`.

    Raises:
        ValueError: there is none; lists the steps that there are.
    """
    found = [state for state in states if state.step == step]
    if not found:
        steps = ", ".join(map(str, sorted({state.step for state in states}))) or "none"
        raise ValueError(f"{uri} has no state of step {step}; steps that can be loaded: {steps}")
    return found


def _resolve(
    saves: Mapping[int, Manifest],
    without_manifest: Mapping[int, Rejected],
    others: Sequence[Rejected],
    run_id: str | None,
) -> tuple[list[State], list[Rejected]]:
    rejected = dict(without_manifest)
    states: dict[int, State] = {}
    for sequence, save in sorted(saves.items()):
        fault = _fault(save, saves, rejected, run_id)
        if fault:
            rejected[sequence] = Rejected(sequence, f"{save.path} {fault}", folder=save.folder)
        else:
            parent = save.parent
            older = states[parent.sequence].saves if parent else ()
            states[sequence] = State((*older, save))
    refused = sorted((*rejected.values(), *others), key=lambda save: save.sequence, reverse=True)
    return sorted(states.values(), key=_age, reverse=True), refused


def is_committed(storage: Storage, folder: str) -> bool:
    """Whether the save in a folder has a manifest, which may be damaged."""
    return "manifest.json" in storage.list(folder)


def committed(storage: Storage) -> list[tuple[int, int]]:
    """Sequence and epoch of all committed saves, including those with a damaged manifest.

    Only folders are listed: a new owner calls this while it takes the directory, which must be short.
    """
    current, _ = _current_folders(storage)
    with ThreadPoolExecutor(READERS, thread_name_prefix="cpr-manifests") as pool:
        found = pool.map(lambda numbers: is_committed(storage, save_folder(*numbers)), current)
        return [numbers for numbers, is_there in zip(current, found, strict=True) if is_there]


def _age(state: State) -> tuple[int, int]:
    return max(state.newest.merged, default=state.sequence), state.sequence


def _read_saves(
    storage: Storage, cache: ManifestCache | None
) -> tuple[dict[int, Manifest], dict[int, Rejected], list[Rejected]]:
    """Saves with a usable manifest, those without one, and all other folders, whose numbers may be taken."""
    saves: dict[int, Manifest] = {}
    rejected: dict[int, Rejected] = {}
    known = {} if cache is None else cache
    current, others = _current_folders(storage)
    with ThreadPoolExecutor(READERS, thread_name_prefix="cpr-manifests") as pool:
        found = pool.map(lambda numbers: known.get(numbers) or _read_save(storage, *numbers), current)
        for numbers, save in zip(current, found, strict=True):
            if isinstance(save, Manifest):
                saves[numbers[0]] = known[numbers] = save
            else:
                rejected[numbers[0]] = save
    return saves, rejected, others


def _current_folders(storage: Storage) -> tuple[list[tuple[int, int]], list[Rejected]]:
    """Sequence and epoch of the saves that owners of the directory wrote, and all other numbered folders."""
    numbered: list[tuple[int, int]] = []
    others: list[Rejected] = []
    for name in storage.list(SAVES):
        numbers = numbers_of(name)
        if numbers is None:
            continue
        folder = save_folder(*numbers)
        # A name such as `1` for save 00000001 comes from a copy by hand: the properly named folder counts.
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
    """Of saves by sequence and epoch, those that an owner wrote after a newer one had taken the directory.

    The record of `owner` lists the older saves that count. Where there is none, or it is damaged, a save
    counts if no earlier save has a higher epoch, as epochs never fall.
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
        manifest = Manifest.from_json(read_file(storage, path), path)
    except CorruptFileError as error:  # any other error says nothing about the save and is raised
        # Only a listing tells a save without a manifest from one whose manifest cannot be read.
        if is_committed(storage, folder):
            return Rejected(sequence, str(error), folder=folder)
        reason = f"{path} is not there: the save was never finished"
        return Rejected(sequence, reason, unfinished=True, folder=folder)
    if (manifest.sequence, manifest.epoch) != (sequence, epoch):
        return Rejected(
            sequence,
            f"{path} says that it is save {manifest.sequence} of epoch {manifest.epoch}: its folder was "
            "copied or renamed, and counting it would lay old rows over newer ones",
            folder=folder,
        )
    return manifest


def _fault(
    save: Manifest, saves: Mapping[int, Manifest], rejected: Mapping[int, Rejected], run_id: str | None
) -> str | None:
    """Why a save is not loadable as a state; None if it is. Older saves have been judged already."""
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
