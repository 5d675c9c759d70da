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
from cpr.mirror.copy import DeadCopy
from cpr.mirror.pieces import NUMBERS
from cpr.mirror.undo import go_back, reachable_steps
from cpr.recovery.decide.assessment import Assessment, SegmentReport, ShardReport, Slot, WorkerReport
from cpr.recovery.run.progress import losses_in
from cpr.recovery.worker.memory import Claimed, WorkerMemory, counters_in
from cpr.resident.segment import Segment
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
    copies: list[DeadCopy | None] = field(default_factory=list)
    """Each segment as a mirror; None: it is none, or a damaged one."""


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
    copy: DeadCopy | None = None
    try:
        copy = DeadCopy(segment) if layout.is_mirror else None
        if copy is not None and any(NUMBERS in shard.columns for shard in layout.shards):
            copy.bring_to(copy.steps[0])  # which rows it holds differs between moments
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
    slot, tree, mirror = None, None, dict[str, Any]()
    steps: tuple[int, ...] = ()
    step_finished, epoch = segment.status.step_finished, segment.status.epoch
    try:
        if copy is not None:
            tree, steps, epoch = copy.newest_state(), copy.steps, copy.epoch
            step_finished = steps[0]
            mirror = {"samples": tree["samples"], "share": tree["mirror"]["share"]}
        elif not layout.is_mirror and (read := segment.replica.read()) is not None:
            tree = read[1]
            slot = _slot(read[0], tree["common"]["registered"][PROGRESS_STATE])
            steps = reachable_steps(segment)
    except DamagedMemoryError as error:
        problems.append(str(error))
    found.trees.append(tree)
    found.copies.append(copy)
    return SegmentReport(
        old_rank=layout.rank,
        old_world_size=layout.world_size,
        generation=layout.generation,
        epoch=epoch,
        step_finished=step_finished,
        steps=steps,
        update_begun=segment.status.update_begun,
        pid=claimed.pid,
        left_ns=claimed.left_ns,
        heartbeat_ns=claimed.heartbeat_ns,
        reason=claimed.reason,
        has_stopped=claimed.has_stopped,
        shards=tuple(shards),
        whole_bytes=layout.outside_bytes
        + sum(column.num_bytes for shard in layout.shards for column in shard.columns.values()),
        slot=slot,
        counters=counters_in(tree) if tree is not None else {},
        problem="; ".join(problems) or None,
        is_mirror=layout.is_mirror,
        **mirror,
    )


def note_damaged_mirrors(found: Assessment, own: Inventory) -> bool:
    """Look at all rows of the mirrors that would be used; damaged ones are reported as such from now on.

    Returns:
        Whether this worker holds a damaged one, so that reports must be assessed again.
    """
    segments = list(own.report.segments)
    for at, copy in enumerate(own.copies):
        if copy is not None and (own.report.rank, at) in found.brought_to:
            try:
                copy.check()
            except DamagedMemoryError as error:
                segments[at] = replace(segments[at], problem=str(error))
    is_changed = tuple(segments) != own.report.segments
    own.report = replace(own.report, segments=tuple(segments))
    return is_changed


def bring_to_steps(
    found: Assessment, own: Inventory, claimed: Sequence[Claimed]
) -> dict[str, Mapping[str, float]]:
    """Bring the memory that this worker holds to the steps that the assessment has chosen.

    Trees and slots in `own` are those of these steps afterwards.

    Returns:
        Counters of tables' optimizers at the common step, by table and name; empty without such a step.

    Raises:
        DamagedMemoryError: memory differs from what was written.
        UnreadableMemoryError: it cannot be read now.
    """
    segments, counters = list(own.report.segments), dict[str, Mapping[str, float]]()
    for at, report in enumerate(segments):
        step = found.brought_to.get((own.report.rank, at))
        if step is None:
            continue
        segment, copy = claimed[at].segment, own.copies[at]
        if copy is not None:
            copy.bring_to(step)
        else:
            go_back(segment, step)
            segments[at] = replace(report, slot=found.slot)
        if step != report.step_finished:
            own.trees[at] = _tree(segment) if copy is None else copy.state()
        if found.common_step is not None:
            counters |= counters_in(own.trees[at])
    own.report = replace(own.report, segments=tuple(segments))
    return counters


def _tree(segment: Segment) -> Any:
    read = segment.replica.read()
    assert read is not None
    return read[1]


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
