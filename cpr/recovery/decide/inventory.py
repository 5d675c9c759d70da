"""Inventory of one worker: the memory that it holds, read and checked, and the shards that it needs."""

import json
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from cpr.checkpoint.format.tree_file import dtype_name
from cpr.errors import DamagedMemoryError, UnreadableMemoryError
from cpr.extent import Extent
from cpr.mirror.copy import finish_writing
from cpr.mirror.pieces import NUMBERS
from cpr.recovery.decide.assessment import SegmentReport, ShardReport, Slot, WorkerReport
from cpr.recovery.run.progress import losses_in
from cpr.recovery.worker.memory import Claimed, WorkerMemory, counters_in
from cpr.shards.shard import TableShard, bytes_per_row

PROGRESS_STATE = "recovery"
"""Name of `RunProgress` among the registered states."""


@dataclass(frozen=True, eq=False)
class ChosenSlots:
    """The rows of a mirror that holds only some, and where they are among its columns."""

    rows: Tensor
    """Row ids of the table, int64 `[n]`, ascending."""
    slots: Tensor
    """int64 `[n]`."""


@dataclass
class Inventory:
    """Memory that a worker holds: a report that all ranks get, and tensors and states that stay local."""

    report: WorkerReport
    columns: list[Mapping[str, Tensor]] = field(default_factory=list)
    """Columns of each shard that is held, in the order of the report's segments and shards."""
    extents: list[Extent] = field(default_factory=list)
    """Extents of the same shards."""
    chosen: dict[int, ChosenSlots] = field(default_factory=dict)
    """Of shards that hold only some rows, by their number among the columns: which row is where."""
    trees: list[Any] = field(default_factory=list)
    """Replicated state of each segment; None where there is none."""


def take_inventory(memory: WorkerMemory, shards: Sequence[TableShard], rank: int, adopted: bool) -> Inventory:
    """Look at what this worker holds, and which shards of the new model it needs.

    `adopted`: whether the model's tables live, unchanged, in the memory of the first claimed segment.
    """
    found = Inventory(WorkerReport(rank=rank, host=socket.gethostname(), pid=os.getpid()))
    try:
        segments = tuple(examine(claimed, found) for claimed in memory.claimed)
    except UnreadableMemoryError as error:
        found.report = replace(found.report, unreadable=str(error))
        return found
    found.report = replace(
        found.report,
        segments=segments,
        shards=tuple(
            replace(
                _report(shard.extent, shard.columns),
                in_segment=memory.segment is not None and memory.segment.holds(shard),
            )
            for shard in shards
            if not shard.replicated
        ),
        adopted=adopted,
        refused=tuple(memory.refused),
    )
    return found


def refuse_unreadable(reports: Sequence[WorkerReport]) -> None:
    """End this generation on all ranks: continuing without memory that may be whole would lose training.

    Raises:
        UnreadableMemoryError: some worker cannot read its memory now.
    """
    for report in reports:
        if report.unreadable is not None:
            raise UnreadableMemoryError(f"rank {report.rank} on {report.host}: {report.unreadable}")


def examine(claimed: Claimed, found: Inventory) -> SegmentReport:
    """Report one segment, and add its content to `found`.

    Raises:
        UnreadableMemoryError: the segment cannot be read now, or was written by another version.
    """
    segment, layout = claimed.segment, claimed.layout
    problems: list[str] = []
    shards: list[ShardReport] = []
    try:
        if layout.is_mirror:
            finish_writing(segment)
        for held in segment.held_shards():
            columns = dict(held.columns)
            numbers = columns.pop(NUMBERS, None)
            if numbers is not None:
                found.chosen[len(found.columns)] = _chosen_slots(held.extent, numbers)
            shards.append(replace(_report(held.extent, columns), is_chosen=numbers is not None))
            found.extents.append(held.extent)
            found.columns.append(columns)
    except DamagedMemoryError as error:
        problems.append(str(error))
    slot, tree, samples, mirror = None, None, None, dict[str, Any]()
    try:
        read = segment.replica.read()
        if read is not None and layout.is_mirror:
            samples = read[1]["samples"] if read[0] == segment.status.step_finished else None
            tree = read[1]
            mirror = tree["mirror"]
        elif read is not None:
            step, tree = read
            slot = _slot(step, tree["common"]["registered"][PROGRESS_STATE])
    except DamagedMemoryError as error:
        problems.append(str(error))
    found.trees.append(tree)
    return SegmentReport(
        old_rank=layout.rank,
        old_world_size=layout.world_size,
        generation=layout.generation,
        epoch=segment.status.epoch,
        step_finished=segment.status.step_finished,
        update_begun=segment.status.update_begun,
        pid=claimed.pid,
        left_ns=claimed.left_ns,
        heartbeat_ns=claimed.heartbeat_ns,
        reason=claimed.reason,
        diverged=claimed.diverged,
        shards=tuple(shards),
        whole_bytes=layout.outside_bytes
        + sum(column.num_bytes for shard in layout.shards for column in shard.columns.values()),
        slot=slot,
        counters=counters_in(tree) if tree is not None else {},
        problem="; ".join(problems) or None,
        is_mirror=layout.is_mirror,
        samples=samples,
        **mirror,
    )


def _slot(step: int, progress: Mapping[str, Any]) -> Slot:
    return Slot(
        went_back=progress["went_back"],
        generation=progress["generation"],
        step=step,
        num_recoveries=sum(each.get("finished", True) for each in json.loads(progress["recoveries"])),
        progress_generation=progress["progress_generation"],
        losses=losses_in(progress),
    )


def _chosen_slots(extent: Extent, numbers: Tensor) -> ChosenSlots:
    """Which rows are in the slots of a mirror, from its column `NUMBERS`.

    Raises:
        DamagedMemoryError: a number stands twice, or is of no row of the table.
    """
    slots = torch.nonzero(numbers).view(-1)
    rows, order = (numbers[slots] - 1 + extent.row_offset).sort()
    fits = not rows.numel() or (rows[0] >= extent.row_offset and rows[-1] < extent.table_shape[0])
    if not fits or not bool((rows.diff() > 0).all()):
        raise DamagedMemoryError(f"the rows in the mirror of {extent.name} are not those of a shard")
    return ChosenSlots(rows, slots[order])


def _report(extent: Extent, columns: Mapping[str, Tensor]) -> ShardReport:
    return ShardReport(
        extent=extent,
        columns=tuple((name, dtype_name(columns[name]), columns[name].dim()) for name in sorted(columns)),
        bytes_per_row=sum(bytes_per_row(column) for column in columns.values()),
    )
