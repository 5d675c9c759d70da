"""Inventory of one worker: the memory that it holds, read and checked, and the shards that it needs."""

import json
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from cpr.checkpoint.format.tree_file import dtype_name
from cpr.errors import DamagedMemoryError, UnreadableMemoryError
from cpr.extent import Extent
from cpr.mirror.copy import finish_writing
from cpr.recovery.decide.assessment import SegmentReport, ShardReport, Slot, WorkerReport
from cpr.recovery.run.progress import losses_in
from cpr.recovery.worker.memory import Claimed, WorkerMemory, counters_in
from cpr.shards.shard import TableShard, bytes_per_row

PROGRESS_STATE = "recovery"
"""Name of `RunProgress` among the registered states."""


@dataclass
class Inventory:
    """Memory that a worker holds: a report that all ranks get, and tensors and states that stay local."""

    report: WorkerReport
    columns: list[Mapping[str, Tensor]] = field(default_factory=list)
    """Columns of each shard that is held, in the order of the report's segments and shards."""
    extents: list[Extent] = field(default_factory=list)
    """Extents of the same shards."""
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
            shards.append(_report(held.extent, held.columns))
            found.extents.append(held.extent)
            found.columns.append(held.columns)
    except DamagedMemoryError as error:
        problems.append(str(error))
    slot, tree, samples, rounded = None, None, None, 0
    try:
        read = segment.replica.read()
        if read is not None and layout.is_mirror:
            samples = read[1]["samples"] if read[0] == segment.status.step_finished else None
            tree = read[1]
            rounded = tree["mirror"]["rounded"]
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
        rounded=rounded,
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


def _report(extent: Extent, columns: Mapping[str, Tensor]) -> ShardReport:
    return ShardReport(
        extent=extent,
        columns=tuple((name, dtype_name(columns[name]), columns[name].dim()) for name in sorted(columns)),
        bytes_per_row=sum(bytes_per_row(column) for column in columns.values()),
    )
