"""The rows that training changes, for all shards of a worker: before it does, and since they were taken."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Final

import numpy as np
import torch
from torch import Tensor, nn

from cpr.mirror.pieces import unique_rows
from cpr.shards.groups import Hooks, table_groups
from cpr.shards.lookups import LookupLayout, Lookups, watch_lookups
from cpr.shards.row_columns import RowColumns, row_columns
from cpr.shards.shard import TableShard
from cpr.shards.updates import UPDATED_IN_FORWARD

COMPACT_ABOVE: Final = 1 << 20
"""Row numbers that are kept with repetitions; more than these, and than the table's rows, are made unique."""

Rows = dict[int, Tensor]
"""Rows by number of the shard: int64 `[n]`, from 0 in the shard, ascending, without duplicates."""


class ChangedRows:
    """Notes which rows of a worker's shards training changes.

    Rows count as changed from the moment at which their gradient is there, as fused optimizers change the
    rows that a pass has looked up, and no others. So a pass whose backward pass comes much later is noted
    then, and evaluation not at all. Owners of additional columns tell of theirs.

    Args:
        model: with the tables.
        shards: of this rank. Of those that are not `updated_in_backward`, nor told of by an owner of columns,
            all rows count as changed.
        before: called with rows before they change; not told of those of `whole` shards.
    """

    def __init__(
        self,
        model: nn.Module,
        shards: Sequence[TableShard],
        before: Callable[[Rows], object] = lambda rows: None,
    ) -> None:
        numbers = {shard.extent: number for number, shard in enumerate(shards)}
        self._shards, self._before = shards, before
        self._groups = [
            (group, [numbers.get(table.extent) for table in group.tables])
            for group in table_groups(model)
            if any(table.extent in numbers for table in group.tables)
        ]
        self._layouts = [LookupLayout.of(group) for group, _ in self._groups]
        self._changed: list[Rows] = []
        """Of each pass since they were taken, or of several together."""
        self._count, self._num_rows = 0, sum(shard.num_rows for shard in shards)
        self._hooks = Hooks()
        told: set[int | None] = set()
        self._hooks.enter_context(watch_lookups([group for group, _ in self._groups], self._see))
        for number, (group, _) in enumerate(self._groups):
            for table, columns in row_columns(group.emb_module).items():
                self._watch(columns, partial(self._note_rows_of, number, table))
                if group.emb_module.optimizer not in UPDATED_IN_FORWARD:
                    told.add(self._groups[number][1][table])
        self.whole = [
            number
            for number, live in enumerate(shards)
            if not live.updated_in_backward and number not in told
        ]
        """Numbers of the shards of which all rows count as changed, always."""

    def take(self) -> Rows:
        """Return the changed rows, and forget them; called between two steps."""
        taken = united(*self._changed)
        self._changed, self._count = [], 0
        for shard in self.whole:
            taken[shard] = torch.arange(self._shards[shard].num_rows)
        return taken

    def close(self) -> None:
        """Stop watching the model."""
        self._hooks.remove()

    def _see(self, number: int, lookups: Lookups) -> None:
        if lookups.ids.numel():
            self._note(number, lookups.rows)

    def _watch(self, columns: RowColumns, watcher: Callable[[Tensor], object]) -> None:
        columns.watchers.append(watcher)
        self._hooks.callback(columns.watchers.remove, watcher)

    def _note_rows_of(self, number: int, table: int, rows: Tensor) -> None:
        self._note(number, rows + self._layouts[number].first_rows[table])

    def _note(self, number: int, rows: Tensor) -> None:
        changed = self._by_shard(number, unique_rows([rows.cpu()]))
        self._before(changed)
        self._changed.append(changed)
        self._count += rows.numel()
        if self._count > max(COMPACT_ABOVE, 2 * self._num_rows):
            self._changed = [united(*self._changed)]
            self._count = sum(each.numel() for each in self._changed[0].values())

    def _by_shard(self, number: int, joint: Tensor) -> Rows:
        """Divide joint rows of a group, ascending without duplicates, by shard."""
        first_rows, shards = self._layouts[number].first_rows, self._groups[number][1]
        edges = np.searchsorted(joint.numpy(), first_rows).tolist()  # takes half as long as torch's
        found: Rows = {}
        for table, shard in enumerate(shards):
            rows = joint[edges[table] : edges[table + 1]] - first_rows[table]
            if shard is not None and rows.numel():
                found[shard] = rows
        return found


def united(*several: Mapping[int, Tensor]) -> Rows:
    """The rows that are in any of these, by shard, in order."""
    found: dict[int, list[Tensor]] = {}
    for each in several:
        for shard, rows in each.items():
            found.setdefault(shard, []).append(rows)
    return {shard: rows[0] if len(rows) == 1 else unique_rows(rows) for shard, rows in sorted(found.items())}
