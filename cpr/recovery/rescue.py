"""Rescue: saves the memory of a dead run without its model, its process group, or its checkpoint directory.

The assessment of a recovery tells which state is the newest, and which memory belongs to it.
"""

import os
import socket
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cpr.checkpoint.catalog.chain import find_states
from cpr.checkpoint.format.manifest import Manifest
from cpr.checkpoint.format.part import RankPart, tables_of
from cpr.checkpoint.ownership.records import Owner, newest_owner
from cpr.checkpoint.save.single_process import Progress, write_base, write_rows
from cpr.checkpoint.save.writer_thread import RankWriter
from cpr.checkpoint.storage.base import Storage
from cpr.errors import MismatchError, ResidentMemoryError
from cpr.extent import Extent
from cpr.recovery.decide.assessment import Assessment, SegmentReport, WorkerReport, assess
from cpr.recovery.decide.inventory import (
    PROGRESS_STATE,
    Inventory,
    bring_to_steps,
    examine,
    note_damaged_mirrors,
)
from cpr.recovery.decide.lineage import Directory, SavedState
from cpr.recovery.worker.memory import Claimed, Counters
from cpr.resident.home import Home
from cpr.shards.shard import TableShard


@dataclass(frozen=True)
class Rescued:
    """Whole tables and the newest state of a dead run."""

    session_id: str
    epoch: int
    """Epoch of the directory's ownership under which the run trained."""
    common: Mapping[str, Any]
    """State that all ranks share."""
    own: Mapping[int, Any]
    """Per-rank states, by rank."""
    shards: Sequence[TableShard]
    """Views of the memory that cover every table once."""
    step: int
    interrupted: bool
    """Whether rows had begun to change in the next step."""
    world_size: int

    @property
    def num_bytes(self) -> int:
        """Bytes of all rows."""
        return sum(column.nbytes for shard in self.shards for column in shard.columns.values())


@contextmanager
def opened(folder: Path) -> Iterator[Rescued]:
    """Open the memory of a run; during the block no other process takes or frees it.

    Raises:
        ResidentMemoryError: the memory is in use or damaged, or part of it is on another node.
    """
    claimed: list[Claimed] = []
    found, refused = Home(folder.name, folder.parent.parent).find()
    try:
        for segment in found:
            layout = segment.layout
            if layout is not None and segment.claim():
                claimed.append(Claimed.from_segment(segment, layout))
            else:
                refused.append(f"{segment.name}: taken by another process")
        if not claimed:
            why = "; ".join(refused) or "it is empty"
            raise ResidentMemoryError(f"{folder} holds nothing that could be saved: {why}")
        newest = max(claimed, key=lambda each: each.heartbeat_ns).layout.session_id
        yield _put_together([each for each in claimed if each.layout.session_id == newest], refused)
    finally:
        for each in claimed:
            each.segment.release()


def save(rescued: Rescued, storage: Storage, progress: Progress = lambda _: None) -> Manifest:
    """Write the rescued state as a full checkpoint.

    Args:
        rescued: from `opened`.
        storage: a checkpoint directory, without saves or with older ones of the same tables.
        progress: called with the bytes of table rows written since the last call.

    Raises:
        MismatchError: the directory holds newer saves, of other tables, or of another run.
        LockedError: a run that is alive writes there.
        CheckpointError: something cannot be written; then nothing counts as saved.
    """
    _next_save(storage, rescued, newest_owner(storage))  # a refusal must not take the directory
    return write_base(
        storage,
        lambda lock: _next_save(storage, rescued, lock.previous),
        lambda writer: _write(rescued, writer, progress),
        moment="rolling" if rescued.interrupted else "consistent",
        step=rescued.step,
        world_size=rescued.world_size,
    )


def _put_together(claimed: Sequence[Claimed], refused: Sequence[str]) -> Rescued:
    found = Inventory(WorkerReport(rank=0, host=socket.gethostname(), pid=os.getpid()))
    segments = tuple(examine(each, found) for each in claimed)
    found.report = replace(found.report, segments=segments)
    state = assess([found.report], Directory())
    while note_damaged_mirrors(state, found):
        state = assess([found.report], Directory())
    if state.slot is None or state.slot_of is None:
        raise ResidentMemoryError("no worker of this run had finished a step: there is nothing to be saved")
    if state.missing:
        raise ResidentMemoryError(_missing(state, refused))
    known = {**state.counters, **bring_to_steps(state, found, claimed)}
    tree = found.trees[state.slot_of[1]]
    tree["common"]["registered"][PROGRESS_STATE]["to_skip"] += state.interrupted
    counters = {name: dict(values) for name, values in known.items()}
    return Rescued(
        session_id=claimed[0].layout.session_id,
        epoch=state.epoch,
        common=tree["common"],
        own={
            each.old_rank: tree["own"]
            for each, tree in zip(found.report.segments, found.trees, strict=True)
            if tree is not None and tree["own"] and _is_of_state(each, state)
        },
        shards=[*_sharded(state, found, counters), *_replicated(tree["replicated"], counters)],
        step=state.slot.step,
        interrupted=state.interrupted,
        world_size=state.old_world_size,
    )


def _is_of_state(segment: SegmentReport, state: Assessment) -> bool:
    """Whether the per-rank states in a segment are those of the state that is rescued."""
    assert state.slot is not None
    if segment.is_mirror:
        return segment.old_rank not in state.missing and segment.old_rank in state.mirrored
    return segment.slot is not None and segment.slot.is_of_moment(state.slot)


def _missing(state: Assessment, refused: Sequence[str]) -> str:
    lost = [f"rank {rank}" for rank in sorted(state.missing)]
    also = f" (not used: {'; '.join(refused)})" if refused else ""
    return (
        f"the memory of {', '.join(lost)} of {state.old_world_size} is not whole on this machine, and a save "
        f"needs all rows{also}. What to do: if the rest is on another node, nothing can save it as a whole; "
        "resume from the newest save of the run, and free this memory: cpr clean --yes --unsaved"
    )


def _sharded(state: Assessment, found: Inventory, counters: Counters) -> Iterator[TableShard]:
    """The newest memory of each part of the sharded tables; the parts must cover whole tables."""
    taken: dict[str, list[Extent]] = {}
    for held in sorted(state.held, key=lambda each: (each.generation, each.step), reverse=True):
        extents = taken.setdefault(held.extent.table_fqn, [])
        if not any(held.extent.overlap(each) for each in extents):
            extents.append(held.extent)
            yield _shard(held.extent, found.columns[held.index], counters)
    for table, extents in taken.items():
        rows, cols = extents[0].table_shape
        here = sum(each.num_rows * each.num_cols for each in extents)
        if here != rows * cols:
            raise ResidentMemoryError(
                f"memory holds {here} of the {rows * cols} weights of table {table}: it cannot be saved as a "
                "whole. What to do: resume from the newest save of the run"
            )


def _replicated(saved: Mapping[str, Mapping[str, Tensor]], counters: Counters) -> Iterator[TableShard]:
    """Data-parallel tables, of which every worker had a whole copy, from their columns by shard name."""
    for name, columns in saved.items():
        rows, cols = columns["weights"].shape
        extent = Extent.of_table(name.rpartition("/")[0], (rows, cols))
        yield _shard(extent, columns, counters)


def _shard(extent: Extent, columns: Mapping[str, Tensor], counters: Counters) -> TableShard:
    known = counters.get(extent.table_fqn, {})
    return TableShard(
        table_fqn=extent.table_fqn,
        table_shape=extent.table_shape,
        row_offset=extent.row_offset,
        col_offset=extent.col_offset,
        replicated=False,
        weights=columns["weights"],
        optimizer_state={name: column for name, column in columns.items() if name != "weights"},
        counters={name: torch.tensor(value) for name, value in known.items()},
    )


def _next_save(storage: Storage, rescued: Rescued, owner: Owner | None) -> tuple[int, str]:
    """Sequence number and run of the next save; a directory with saves must be of this run, and older."""
    states, refused = find_states(storage)
    numbers = [*(state.sequence for state in states), *(each.sequence for each in refused)]
    if not states:
        return max(numbers, default=-1) + 1, uuid.uuid4().hex
    newest = states[0].newest
    shapes = {shard.table_fqn: shard.table_shape for shard in rescued.shards}
    if owner is None or owner.session != rescued.session_id:
        raise MismatchError(
            f"this memory is not of the run that saved last in {storage.uri}"
            f"{f' ({owner})' if owner else ''}. What to do: save it in an empty directory (--out)"
        )
    if owner.finished is not None:
        raise MismatchError(
            f"the run in {storage.uri} has finished at step {owner.finished}: this memory is not needed. "
            "What to do: free it with `cpr clean --yes --unsaved`"
        )
    why = Directory(newest=SavedState.of(states[0]), owner=owner, session_id=rescued.session_id).why_stale(
        rescued.epoch, rescued.step
    )
    if why is None and shapes != {fqn: (table.rows, table.cols) for fqn, table in newest.tables.items()}:
        why = "of other tables"
    if why is not None:
        raise MismatchError(
            f"this memory is {why} in {storage.uri}. What to do: save it in an empty directory (--out)"
        )
    return max(numbers) + 1, newest.run_id


def _write(rescued: Rescued, writer: RankWriter, progress: Progress) -> RankPart:
    last_step = rescued.step + rescued.interrupted
    for shard in rescued.shards:
        write_rows(writer, shard.extent, shard.row_offset, shard.columns, last_step, progress)
    writer.write_state(rescued.common, None)
    for rank, state in sorted(rescued.own.items()):
        writer.write_state(state, rank)
    return writer.finish(tables_of(rescued.shards))
