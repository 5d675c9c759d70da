"""Describes a checkpoint directory from its manifests alone; `describe_text` formats the description."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

from cpr.checkpoint.catalog.chain import State, own_states
from cpr.checkpoint.format.manifest import WEIGHTS, Manifest
from cpr.checkpoint.ownership.records import Owner, newest_owner
from cpr.checkpoint.storage.base import Storage


@dataclass(frozen=True, kw_only=True)
class SaveInfo:
    """Summary of one committed save."""

    sequence: int
    kind: str
    moment: str
    step: int
    num_bytes: int
    created: str
    age_s: float
    codec: str | None
    """Codec of the save's weights; None if it has no rows."""
    max_error: float
    merged: Sequence[int]
    """Sequences of the saves that a merged base was made from."""


@dataclass(frozen=True, kw_only=True)
class TableInfo:
    """Summary of one table in the newest state."""

    fqn: str
    rows: int
    cols: int
    dtype: str
    weight_bytes: int
    optimizer_state: dict[str, int]
    """Bytes of each optimizer state, by name."""
    newest_behind_steps: int
    """Training steps between the most recently saved rows and the state; 0 for rows that are newer than the
    state, as in a rolling save, which copies rows while training continues."""
    oldest_behind_steps: int
    """The same for the rows saved first: an upper bound, as each of them may have been saved again since."""


@dataclass(frozen=True, kw_only=True)
class RefusedInfo:
    """Summary of a save that is not loadable."""

    sequence: int
    reason: str
    unfinished: bool


@dataclass(frozen=True, kw_only=True)
class Description:
    """Summary of a checkpoint directory."""

    uri: str
    run_id: str | None
    world_size: int | None
    num_states: int
    num_bytes: int
    chain: Sequence[SaveInfo]
    """Base and row saves of the newest state, oldest first; empty if nothing is loadable."""
    older: Sequence[SaveInfo]
    """All other saves that count, newest first."""
    tables: Sequence[TableInfo]
    refused: Sequence[RefusedInfo]
    owner: Owner | None
    """The last owner of the directory; None: no process ever took it, or only versions without owners."""

    def to_json(self) -> dict[str, Any]:
        """The description as plain dicts and lists."""
        return asdict(self)


def describe(storage: Storage, now: datetime) -> Description | None:
    """Describe a directory by its manifests; None if it holds no save at all."""
    states, refused = own_states(storage)
    if not states and not refused:
        return None
    saves = {save.sequence: save for state in states for save in state.saves}
    newest = states[0] if states else None
    chain = newest.saves if newest else ()
    others = sorted(saves.keys() - {save.sequence for save in chain}, reverse=True)
    return Description(
        uri=storage.uri,
        run_id=newest.newest.run_id if newest else None,
        world_size=newest.newest.world_size if newest else None,
        num_states=len(states),
        num_bytes=sum(save.num_bytes for save in saves.values()),
        chain=tuple(_save(save, now) for save in chain),
        older=tuple(_save(saves[sequence], now) for sequence in others),
        tables=tuple(_table(fqn, newest) for fqn in sorted(newest.newest.tables)) if newest else (),
        refused=tuple(
            RefusedInfo(sequence=save.sequence, reason=save.reason, unfinished=save.unfinished)
            for save in refused
        ),
        owner=newest_owner(storage),
    )


def _save(save: Manifest, now: datetime) -> SaveInfo:
    codecs = sorted({entry.codec for entry in save.rows})
    return SaveInfo(
        sequence=save.sequence,
        kind=save.kind,
        moment=save.moment,
        step=save.step,
        num_bytes=save.num_bytes,
        created=save.created,
        age_s=(now - datetime.fromisoformat(save.created)).total_seconds(),
        codec=", ".join(codecs) or None,
        max_error=max((entry.max_error for entry in save.rows), default=0.0),
        merged=tuple(save.merged),
    )


def _table(fqn: str, state: State) -> TableInfo:
    entry = state.newest.tables[fqn]
    files = [file for save in state.saves for file in save.rows if file.table_fqn == fqn]
    newest = max((file.last_step for file in files), default=state.step)
    oldest = min((file.first_step for file in files), default=state.step)
    sizes = {
        name: entry.rows * (1 if column.per_row else entry.cols) * column.item_bytes
        for name, column in entry.columns.items()
    }
    return TableInfo(
        fqn=fqn,
        rows=entry.rows,
        cols=entry.cols,
        dtype=entry.columns[WEIGHTS].dtype,
        weight_bytes=sizes.pop(WEIGHTS),
        optimizer_state=sizes,
        newest_behind_steps=max(0, state.step - newest),
        oldest_behind_steps=max(0, state.step - oldest),
    )
