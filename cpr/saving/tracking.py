"""What tells which rows deserve saving, in memory that outlives the worker like the tables."""

import json
import zlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from cpr.priority import Prioritizer, PriorityConfig
from cpr.recovery.run.report import Recovery
from cpr.resident.segment import Segment
from cpr.shards.shard import TableShard


def saved_share(config: PriorityConfig) -> float:
    """The share of a table's rows with which a row save counts; of all that were touched, it is the table."""
    return 1.0 if config.scheme == "touched" else config.ratio


def open_prioritizer(
    model: nn.Module,
    config: PriorityConfig,
    optimizers: Sequence[Optimizer],
    shards: Sequence[TableShard],
    segment: Segment,
    adopted: bool,
) -> Prioritizer:
    """A prioritizer whose trackers live in a worker's segment, and go on where those before them were.

    Trackers of tables on a GPU live there, and end with the worker: the next save is a base then.

    Args:
        model: its lookups are watched from now on.
        config: which rows.
        optimizers: ordinary ones that update tables.
        shards: of the model.
        segment: where its tables live; to be sealed after this.
        adopted: whether they are those of the worker before, as it left them.

    Raises:
        NotEnoughMemoryError: there is no room; says what to change.
    """
    signature = f"{zlib.crc32(json.dumps(asdict(config)).encode()):08x}"

    def allocate(name: str, dtype: torch.dtype, numel: int) -> Tensor:
        return segment.companion(f"{name}-{signature}", dtype, numel, adopt=adopted)[0]

    on_gpu = any(shard.weights.is_cuda for shard in shards)
    return Prioritizer(model, config, optimizers, shards=shards, allocate=None if on_gpu else allocate)


def settle_in(
    prioritizer: Prioritizer,
    story: Recovery,
    shards: Collection[TableShard],
    restored: Mapping[str, Sequence[tuple[int, int]]],
    fell_back: bool = False,
) -> None:
    """Bring the trackers to where the rows are; afterwards `is_complete` tells whether they can be believed.

    Rows that came from the checkpoint are as they are saved, and their state is known to be zero. Rows that
    stayed in place keep theirs. Of rows that moved between workers it is not known.

    Args:
        prioritizer: of this worker.
        story: of this beginning.
        shards: of this worker.
        restored: rows that came from the checkpoint while others went on, by the shard's name.
        fell_back: whether the saves that follow build on, or those rows came from, an older save than the one
            since which the trackers count.
    """
    if story.kind not in {"process", "partial"}:
        prioritizer.forget_all()
    elif fell_back:
        prioritizer.doubt()
    elif not prioritizer.is_complete:  # in new memory, or nobody knew before
        if all(_is_whole(shard, restored) for shard in shards if shard.table_fqn in prioritizer.prioritised):
            prioritizer.forget_all()
    elif any(origin.moved for origin in story.sources):
        prioritizer.doubt()
    else:
        for name, ranges in restored.items():
            prioritizer.forget(name, ranges)


def _is_whole(shard: TableShard, restored: Mapping[str, Sequence[tuple[int, int]]]) -> bool:
    return sum(end - begin for begin, end in restored.get(shard.name, ())) == shard.num_rows
