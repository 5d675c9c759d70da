"""Being told which table rows training looks up: what trackers of priority count (`cpr.priority`).

A shard's worker gets, after the input exchange, exactly the ids that it looks up itself, whatever the
sharding kind. They pass here on their way: each forward pass of an FBGEMM module leaves them as `Lookups`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from cpr.shards.groups import TableGroup


@dataclass(frozen=True, eq=False, kw_only=True)
class LookupLayout:
    """How the tables of an FBGEMM module lie in its joint row space: one after the other."""

    table_rows: tuple[int, ...]
    """Rows of each table."""
    feature_tables: tuple[int, ...]
    """Table of each feature; several features may share one."""
    device: torch.device
    """Where ids arrive."""

    @classmethod
    def of(cls, group: TableGroup) -> Self:
        """The layout of a module."""
        tbe = group.emb_module
        rows = tuple(table.weights.shape[0] for table in group.tables)
        tables = _feature_tables(tbe, rows)
        return cls(table_rows=rows, feature_tables=tables, device=tbe.hash_size_cumsum.device)

    @cached_property
    def first_rows(self) -> tuple[int, ...]:
        """Joint row of each table's first row, and at last the number of joint rows."""
        return tuple(accumulate(self.table_rows, initial=0))

    @cached_property
    def first_row_of_features(self) -> Tensor:
        """Int64 `[F]`."""
        return self.by_feature(self.first_rows)

    def by_feature(self, of_tables: Sequence[int]) -> Tensor:
        """A number of each table as that of each feature: int64 `[F]`."""
        return torch.tensor([of_tables[table] for table in self.feature_tables], device=self.device)


@dataclass(frozen=True, eq=False, kw_only=True)
class Lookups:
    """What one forward pass of an FBGEMM module looks up, in its order: feature by feature."""

    layout: LookupLayout
    ids: Tensor
    """Rows within their tables (this rank's pieces of them), int64 `[N]`, one for each lookup: an id that
    comes several times is there several times."""
    ends: Tensor
    """Feature `f` looks up `ids[ends[f]:ends[f + 1]]`; int64 `[F + 1]`."""

    @property
    def rows(self) -> Tensor:
        """Joint rows of the module (`LookupLayout`), int64 `[N]`."""
        return self.ids + self.expand(self.layout.first_row_of_features)

    def expand(self, of_features: Tensor) -> Tensor:
        """A number of each feature, `[F]`, as that of each lookup, `[N]`."""
        # the size is given, or a GPU would be waited for
        return of_features.repeat_interleave(self.ends.diff(), output_size=self.ids.numel())

    def every(self, period: int, first: int) -> "Lookups":
        """Only lookups `first`, `first + period`, ... of these."""
        ends = (self.ends + (period - 1 - first)).div(period, rounding_mode="floor").clamp_(min=0)
        return Lookups(layout=self.layout, ids=self.ids[first::period].contiguous(), ends=ends)


class LookupHooks:
    """What `watch_lookups` has hooked into a model."""

    def __init__(self) -> None:
        self._handles: list[RemovableHandle] = []

    def remove(self) -> None:
        """Call no more."""
        while self._handles:
            self._handles.pop().remove()

    def __enter__(self) -> Self:
        """The hooks, removed at the end of the block."""
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def hook_module(self, group: TableGroup, callback: Callable[[Lookups], object]) -> None:
        """Hook into an FBGEMM module."""
        layout = LookupLayout.of(group)

        def after_forward(tbe: nn.Module, args: tuple[Any, ...], named: dict[str, Any], output: Any) -> None:
            if tbe.training and torch.is_grad_enabled():
                callback(_lookups(layout, args, named))

        self._handles.append(group.emb_module.register_forward_hook(after_forward, with_kwargs=True))


def watch_lookups(groups: Sequence[TableGroup], callback: Callable[[int, Lookups], object]) -> LookupHooks:
    """Have `callback` called with what each forward pass of training looks up in the rows of this rank.

    It is called once for each FBGEMM module and pass, in the thread that trains, after FBGEMM's own check has
    put ids in bounds and before any row changes. Evaluation (`eval()` or without gradients) does not call it.
    On a GPU nothing is waited for.

    Args:
        groups: to watch, of `table_groups`. Their `forward` may be replaced, before or later.
        callback: gets the number of the group among `groups`, and what was looked up. Quick, for it runs in
            every step.
    """
    hooks = LookupHooks()
    for number, group in enumerate(groups):
        hooks.hook_module(group, lambda lookups, number=number: callback(number, lookups))  # type: ignore[misc]
    return hooks


def _feature_tables(tbe: Any, rows: Sequence[int]) -> tuple[int, ...]:
    """Table of each feature; modules of unfused tables keep no list, but where each feature's rows begin."""
    if hasattr(tbe, "feature_table_map"):
        return tuple(tbe.feature_table_map)
    starts = tbe.hash_size_cumsum[:-1].tolist()
    # of tables that begin at the same row, all but the last are empty, and nothing is looked up in them
    table_at = {first: table for table, first in enumerate(accumulate(rows[:-1], initial=0))}
    return tuple(table_at[first] for first in starts)


def _lookups(layout: LookupLayout, args: Sequence[Any], named: dict[str, Any]) -> Lookups:
    given = dict(zip(("indices", "offsets"), args, strict=False)) | named
    offsets = given["offsets"].to(torch.int64)
    sizes = given.get("batch_size_per_feature_per_rank")
    num_features, num_bags = len(layout.feature_tables), offsets.numel() - 1
    if sizes is not None:  # batches of a size of their own
        bags = torch.tensor([0, *accumulate(sum(of_ranks) for of_ranks in sizes)], device=offsets.device)
        ends = offsets[bags]
    elif num_bags:
        ends = offsets[:: num_bags // num_features]
    else:
        ends = offsets.new_zeros(num_features + 1)
    return Lookups(layout=layout, ids=given["indices"].to(torch.int64), ends=ends)
