"""Replicated state: everything that all workers have alike, as one tree that each keeps in shared memory.

The tree holds dense parameters, registered states, data-parallel tables with their optimizer state, and the
counters of all tables' optimizers. A live tree refers to live tensors; one that was read owns its memory.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from cpr.checkpoint.checkpointer import Checkpointer
from cpr.checkpoint.collectives import RankGroup, on_rank
from cpr.checkpoint.format.tree_file import read_state, write_state
from cpr.errors import MismatchError

Counters = Mapping[str, Mapping[str, float]]
"""Counters of tables' optimizers, by table and name."""


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
