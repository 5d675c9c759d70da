"""The rows that training changes, for all shards of a worker: before it does, and since they were taken."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

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
        self._seen: list[Tensor | None] = [None] * len(self._groups)
        """Rows of the newest pass of each group."""
        self._changed: list[list[Tensor]] = [[] for _ in self._groups]
        self._counts = [0] * len(self._groups)
        self._hooks = Hooks()
        told: set[int | None] = set()
        self._hooks.enter_context(watch_lookups([group for group, _ in self._groups], self._see))
        for number, (group, _) in enumerate(self._groups):
            hook = partial(self._after_forward, number)
            self._hooks.enter_context(group.emb_module.register_forward_hook(hook))
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
        taken: Rows = {}
        for number in range(len(self._groups)):
            changed = self._changed[number]
            self._changed[number], self._counts[number] = [], 0
            if not changed:
                continue
            taken |= self._by_shard(number, changed[0] if len(changed) == 1 else unique_rows(changed))
        for shard in self.whole:
            taken[shard] = torch.arange(self._shards[shard].num_rows)
        return taken

    def close(self) -> None:
        """Stop watching the model."""
        self._hooks.remove()

    def _see(self, number: int, lookups: Lookups) -> None:
        self._seen[number] = lookups.rows

    def _after_forward(self, number: int, module: nn.Module, inputs: Any, output: Any) -> None:
        rows, self._seen[number] = self._seen[number], None
        if rows is not None and rows.numel() and output.requires_grad:
            output.register_hook(lambda _: self._note(number, rows))

    def _watch(self, columns: RowColumns, watcher: Callable[[Tensor], object]) -> None:
        columns.watchers.append(watcher)
        self._hooks.callback(columns.watchers.remove, watcher)

    def _note_rows_of(self, number: int, table: int, rows: Tensor) -> None:
        self._note(number, rows + self._layouts[number].first_rows[table])

    def _note(self, number: int, rows: Tensor) -> None:
        changed, rows = self._changed[number], unique_rows([rows.cpu()])
        self._before(self._by_shard(number, rows))
        changed.append(rows)
        self._counts[number] += rows.numel()
        num_rows = self._layouts[number].first_rows[-1]
        if self._counts[number] > max(COMPACT_ABOVE, 2 * num_rows):
            self._changed[number] = [unique_rows(changed)]
            self._counts[number] = self._changed[number][0].numel()

    def _by_shard(self, number: int, joint: Tensor) -> Rows:
        """Divide joint rows of a group, ascending without duplicates, by shard."""
        first_rows, shards = self._layouts[number].first_rows, self._groups[number][1]
        edges = torch.searchsorted(joint, torch.tensor(first_rows, dtype=torch.int64)).tolist()
        found: Rows = {}
        for table, shard in enumerate(shards):
            rows = joint[edges[table] : edges[table + 1]] - first_rows[table]
            if shard is not None and rows.numel():
                found[shard] = rows
        return found


def united(one: Mapping[int, Tensor], other: Mapping[int, Tensor]) -> Rows:
    """The rows that are in one or the other, by shard."""
    both = {shard: unique_rows([one[shard], other[shard]]) for shard in one.keys() & other.keys()}
    return {**one, **other, **both}
