"""Observation of the table rows that training looks up, for the trackers of `cpr.priority`.

After the input exchange, a worker has exactly the ids that it looks up in its shards, for all sharding types.
A hook on each FBGEMM module passes them on as `Lookups`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import accumulate
from typing import Any, Self

import torch
from torch import Tensor, nn

from cpr.shards.groups import Hooks, TableGroup


@dataclass(frozen=True, eq=False, kw_only=True)
class LookupLayout:
    """Joint row space of an FBGEMM module, which concatenates its tables."""

    table_rows: tuple[int, ...]
    """Number of rows of each table."""
    feature_tables: tuple[int, ...]
    """Table of each feature; several features may share a table."""
    device: torch.device
    """Device of the ids."""

    @classmethod
    def of(cls, group: TableGroup) -> Self:
        """The layout of a module."""
        tbe = group.emb_module
        rows = tuple(table.weights.shape[0] for table in group.tables)
        tables = _feature_tables(tbe, rows)
        return cls(table_rows=rows, feature_tables=tables, device=tbe.hash_size_cumsum.device)

    @cached_property
    def first_rows(self) -> tuple[int, ...]:
        """Joint row of each table's first row, and the number of joint rows."""
        return tuple(accumulate(self.table_rows, initial=0))

    @cached_property
    def first_row_of_features(self) -> Tensor:
        """Joint row of the first row of each feature's table: int64 `[F]`."""
        return self.by_feature(self.first_rows)

    def by_feature(self, of_tables: Sequence[int]) -> Tensor:
        """Map a number per table to a number per feature: int64 `[F]`."""
        return torch.tensor([of_tables[table] for table in self.feature_tables], device=self.device)


class Spread:
    """Distribution of the lookups of a pass over the features, with cached results.

    Args:
        ends: feature `f` has the lookups `ends[f]` to before `ends[f + 1]`; int64 `[F + 1]`.
        num_lookups: the last of `ends`.
    """

    def __init__(self, ends: Tensor, num_lookups: int) -> None:
        self.ends = ends
        self._num_lookups = num_lookups
        self._expanded: dict[Tensor, Tensor] = {}  # by identity of the tensor
        self._samples: dict[tuple[int, int], Spread] = {}

    def expand(self, of_features: Tensor) -> Tensor:
        """Map a number per feature, `[F]`, to a number per lookup, `[N]`; do not modify either."""
        if of_features not in self._expanded:
            self._expanded[of_features] = self._expand(of_features)
        return self._expanded[of_features]

    def every(self, period: int, first: int) -> "Spread":
        """Spread of the lookups `first`, `first + period`, ... only."""
        if (period, first) not in self._samples:
            ends = (self.ends + (period - 1 - first)).div(period, rounding_mode="floor").clamp_(min=0)
            num = len(range(first, self._num_lookups, period))
            self._samples[period, first] = Spread(ends, num)
        return self._samples[period, first]

    def lookups(self, layout: LookupLayout, ids: Tensor) -> "Lookups":
        """Make the `Lookups` of a pass from its ids, which are spread over the features like this."""
        return Lookups(layout=layout, ids=ids, ends=self.ends, spreads=Spreads(self))

    def _expand(self, of_features: Tensor) -> Tensor:
        nums = self.ends.diff()
        if of_features.device.type == "cpu":  # repeat_interleave would wake all threads
            return torch.cat([one.expand(num) for one, num in zip(of_features, nums.tolist(), strict=True)])
        # a given size avoids waiting for the GPU
        return of_features.repeat_interleave(nums, output_size=self._num_lookups)


class Spreads:
    """Cache of the last spread, as batches with one id per feature all have the same spread.

    Args:
        last: spread of the previous pass, if there is one.
    """

    def __init__(self, last: Spread | None = None) -> None:
        self._last = last

    def of(self, ends: Tensor, num_lookups: int) -> Spread:
        """Return the last spread if its `ends` are equal, or a new one.

        On a GPU only the same tensor counts as equal, because comparing values would wait for it.
        """
        last = self._last
        if last is not None and (last.ends is ends or (ends.is_cpu and torch.equal(last.ends, ends))):
            return last
        self._last = Spread(ends.clone(), num_lookups)
        return self._last


@dataclass(frozen=True, eq=False, kw_only=True)
class Lookups:
    """Lookups of one forward pass of an FBGEMM module, feature by feature."""

    layout: LookupLayout
    ids: Tensor
    """Rows in this rank's pieces of the tables, one a lookup, with repetitions: int32 or int64 `[N]`."""
    ends: Tensor
    """Feature `f` has the lookups `ends[f]` to before `ends[f + 1]`; int64 `[F + 1]`, valid only during the
    pass."""
    spreads: Spreads = field(default_factory=Spreads)
    """Cache over passes."""

    @cached_property
    def spread(self) -> Spread:
        """Spread over features."""
        return self.spreads.of(self.ends, self.ids.numel())

    @property
    def rows(self) -> Tensor:
        """Joint rows (`LookupLayout`), int64 `[N]`."""
        return self.ids + self.expand(self.layout.first_row_of_features)

    def expand(self, of_features: Tensor) -> Tensor:
        """See `Spread.expand`."""
        return self.spread.expand(of_features)

    def every(self, period: int, first: int) -> "Lookups":
        """The lookups `first`, `first + period`, ... only."""
        return self.spread.every(period, first).lookups(self.layout, self.ids[first::period])


def watch_lookups(
    groups: Sequence[TableGroup],
    callback: Callable[[int, Lookups], object],
    is_wanted: Callable[[int], bool] = lambda number: True,
) -> Hooks:
    """Call `callback` with the lookups of each training pass in the rows of this rank.

    The callback runs once for each FBGEMM module and pass, in the thread of the backward pass, when the
    gradient of the module's output is there and before it changes any row. So a lookup counts in the step
    that trains its rows, even if a schedule makes it earlier, and evaluation not at all. It never waits for a
    GPU.

    Args:
        groups: from `table_groups`. Their `forward` may be replaced, before or later.
        callback: receives the number of the group in `groups`, and the lookups. Must be fast, as it runs in
            every step.
        is_wanted: asked in each forward pass of training, with the number of the group, whether the callback
            is to be called; a pass that is not wanted costs next to nothing.

    Returns:
        The hooks, to be removed.
    """
    hooks = Hooks()
    for number, group in enumerate(groups):
        hook = _lookup_hook(LookupLayout.of(group), partial(callback, number), partial(is_wanted, number))
        hooks.enter_context(group.emb_module.register_forward_hook(hook, with_kwargs=True))
    return hooks


def _lookup_hook(
    layout: LookupLayout, callback: Callable[[Lookups], object], is_wanted: Callable[[], bool]
) -> Callable[..., None]:
    spreads = Spreads()

    def after_forward(tbe: nn.Module, args: tuple[Any, ...], named: dict[str, Any], output: Any) -> None:
        if not (tbe.training and output.requires_grad and is_wanted()):
            return

        def with_gradient(_: Tensor) -> None:
            given = dict(zip(("indices", "offsets"), args, strict=False)) | named
            ends = feature_ends(layout, given)
            callback(Lookups(layout=layout, ids=given["indices"], ends=ends, spreads=spreads))

        output.register_hook(with_gradient)  # a new tensor each pass, so the hook needs no removal

    return after_forward


def _feature_tables(tbe: Any, rows: Sequence[int]) -> tuple[int, ...]:
    """Find the table of each feature; in modules without a map, by the first row that the feature reads."""
    if hasattr(tbe, "feature_table_map"):
        return tuple(tbe.feature_table_map)
    starts = tbe.hash_size_cumsum[:-1].tolist()
    # among tables with the same first row, all but the last are empty and have no lookups
    table_at = {first: table for table, first in enumerate(accumulate(rows[:-1], initial=0))}
    return tuple(table_at[first] for first in starts)


def feature_ends(layout: LookupLayout, given: Mapping[str, Any]) -> Tensor:
    """Find where the lookups of each feature end, int64 `[F + 1]`, from the arguments of an FBGEMM module."""
    offsets: Tensor = given["offsets"]
    sizes = given.get("batch_size_per_feature_per_rank")
    num_features, num_bags = len(layout.feature_tables), offsets.numel() - 1
    if sizes is not None:  # each feature has a batch size of its own
        ends = offsets[[0, *accumulate(sum(of_ranks) for of_ranks in sizes)]]
    elif num_bags:
        ends = offsets[:: num_bags // num_features]
    else:
        ends = offsets.new_zeros(num_features + 1)
    return ends.to(torch.int64)
