"""Publication of a worker's state after every step, and what its successor does with it.

Replicated state is all that workers have alike, as one tree that each keeps in shared memory: dense
parameters, registered states, data-parallel tables with their optimizer state, and the counters of all
tables' optimizers. A live tree refers to live tensors; one that was read owns its memory.
"""

import logging
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from cpr.checkpoint.checkpointer import Checkpointer
from cpr.checkpoint.collectives import RankGroup, on_rank
from cpr.checkpoint.format.tree_file import read_state, write_state
from cpr.errors import MismatchError
from cpr.recovery.run.progress import RunProgress
from cpr.recovery.worker.memory import WorkerMemory
from cpr.rendezvous import WorkerGroup
from cpr.resident.copy_out import CopyOut, SigtermHook
from cpr.resident.segment import Segment
from cpr.shards import before_updates
from cpr.shards.shard import TableShard

Counters = Mapping[str, Mapping[str, float]]
"""Counters of tables' optimizers, by table and name."""

logger = logging.getLogger(__name__)


class Publisher:
    """Keeps a worker's memory ready for its successor, from `restore` to the end of the worker.

    Raises:
        NotEnoughMemoryError: there is no room for copies of tables that do not live in shared memory.
    """

    def __init__(
        self,
        memory: WorkerMemory,
        checkpointer: Checkpointer,
        progress: RunProgress,
        worker_group: WorkerGroup,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
    ) -> None:
        assert memory.segment is not None
        self._segment: Segment = memory.segment
        self._checkpointer, self._progress, self._worker_group = checkpointer, progress, worker_group
        self.is_unsaved = self._segment.is_unsaved
        """Whether the newest save has failed, so that the memory must be kept."""
        self._saved_before = checkpointer.newest_step
        self._copy_out = CopyOut(self._segment, checkpointer.shards, self._seal)
        self._exits = ExitStack()
        self._exits.enter_context(before_updates(model, optimizers, self._note_update))
        if self._copy_out.num_bytes:
            memory.home.check_room(self._copy_out.num_bytes)
            self._exits.enter_context(SigtermHook(self._copy_out.run))

    def publish(self) -> None:
        """Copy the replicated state into shared memory after a step; it counts at once."""
        segment, steps_done = self._segment, self._progress.steps_done
        segment.replica.write(steps_done, live_tree(self._checkpointer))
        segment.status.step_finished = steps_done
        segment.status.beat()

    def note_saves(self, are_failing: bool) -> None:
        """Mark the memory as unsaved while saves fail: then it stays even if the run is not restarted."""
        newest = self._checkpointer.newest_step
        if are_failing and not self.is_unsaved:
            self._segment.mark_unsaved(newest)
            self.is_unsaved, self._saved_before = True, newest
        elif self.is_unsaved and not are_failing and newest != self._saved_before:
            self._segment.clear_unsaved()
            self.is_unsaved = False

    def note_epoch(self) -> None:
        """Record the ownership of the directory, which a save may have claimed only now."""
        if epoch := self._checkpointer.ownership.epoch:
            self._segment.status.epoch = epoch

    def copy_out(self) -> None:
        """Copy tables that do not live in shared memory, if there are any, at the end of training."""
        try:
            self._copy_out.finish()
        except Exception:
            logger.exception("tables that do not live in shared memory could not be copied there")

    def close(self) -> None:
        """Stop watching the model and the stop signal."""
        self._exits.close()

    def _note_update(self) -> None:
        self._segment.status.update_begun = self._progress.steps_done + 1

    def _seal(self, shards: Sequence[TableShard]) -> None:
        self._segment.seal(
            session_id=self._worker_group.session_id,
            rank=self._worker_group.rank,
            world_size=self._worker_group.world_size,
            generation=self._worker_group.generation,
            shards=shards,
        )


def live_tree(checkpointer: Checkpointer) -> dict[str, Any]:
    """Make the tree of a model and its registered states as of now."""
    return {
        "common": checkpointer.state.common(checkpointer.steps_done),
        "own": checkpointer.state.own(),
        "replicated": {shard.name: shard.columns for shard in checkpointer.shards if shard.replicated},
        "counters": {shard.table_fqn: dict(shard.counters) for shard in checkpointer.shards},
    }


def share_tree(group: RankGroup, tree: dict[str, Any] | None, source: int) -> dict[str, Any]:
    """Broadcast the newest tree from `source`, which holds it, to the workers that lack it."""
    if all(group.gather(tree is not None)):
        assert tree is not None
        return tree
    buffer = _Buffer()

    def write() -> None:
        assert tree is not None
        write_state(buffer, {**tree, "own": {}, "counters": {}})  # these differ by rank

    on_rank(group, source, write)
    data = torch.frombuffer(buffer.data, dtype=torch.uint8) if group.rank == source else None
    received = group.broadcast_bytes(data, source)
    if tree is not None:
        return tree
    shared: dict[str, Any] = read_state(received.numpy().data)
    return shared


class _Buffer:
    """A sink in memory."""

    def __init__(self) -> None:
        self.data = bytearray()

    def write(self, data: memoryview) -> None:
        self.data += data


@torch.no_grad()
def put_back(
    checkpointer: Checkpointer,
    tree: Mapping[str, Any],
    own: Mapping[str, Any] | None,
    gone: Sequence[Mapping[str, Any]] = (),
) -> None:
    """Put a tree of any worker into the live model: everything but the rows of sharded tables, and counters.

    Per-rank states are `own`, of this very rank if known, and those of ranks that are `gone`, from memory
    that this worker holds.

    Raises:
        MismatchError: the tree is of another model.
    """
    checkpointer.state.check(tree["common"])
    checkpointer.state.apply(tree["common"], own, gone)
    replicated = [shard for shard in checkpointer.shards if shard.replicated]
    checkpointer.create_optimizer_state(
        {each.table_fqn: tree["replicated"].get(each.name, ()) for each in replicated}
    )
    for shard in replicated:
        saved = tree["replicated"].get(shard.name)
        if saved is None:
            raise MismatchError(f"no worker holds the replicated table {shard.table_fqn}")
        for name, column in shard.columns.items():
            if name not in saved or saved[name].shape != column.shape:
                raise MismatchError(f"{name} of {shard.table_fqn} is not as the workers before had it")
            column.copy_(saved[name])
        shard.invalidate()


@torch.no_grad()
def put_counters(checkpointer: Checkpointer, counters: Counters) -> None:
    """Set the known counters of tables' optimizers; after loading rows, which brings older counters."""
    for shard in checkpointer.shards:
        for name, value in counters.get(shard.table_fqn, {}).items():
            if name in shard.counters:
                shard.counters[name].fill_(value)
        shard.invalidate()


def counters_in(tree: Mapping[str, Any]) -> Counters:
    """Extract the counters of a tree as numbers."""
    return {
        table: {name: value.item() for name, value in counters.items()}
        for table, counters in tree["counters"].items()
    }
