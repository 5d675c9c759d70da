"""Being told which table rows training looks up: what trackers of priority count (`cpr.priority`).

A shard's worker gets, after the input exchange, exactly the ids that it looks up itself, whatever the
sharding kind. They pass here on their way: each forward pass of an FBGEMM module leaves them as `Lookups`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
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


class Spread:
    """How the lookups of a pass are spread over the features. What was made of it once is kept.

    Args:
        ends: feature `f` has the lookups `ends[f]` to before `ends[f + 1]`; int64 `[F + 1]`.
        num_lookups: the last of them.
    """

    def __init__(self, ends: Tensor, num_lookups: int) -> None:
        self.ends = ends
        self._num_lookups = num_lookups
        self._expanded: dict[Tensor, Tensor] = {}  # by the tensor itself, not by what is in it
        self._samples: dict[tuple[int, int], Spread] = {}

    def expand(self, of_features: Tensor) -> Tensor:
        """A number of each feature, `[F]`, as that of each lookup, `[N]`; neither is to be changed."""
        if of_features not in self._expanded:
            self._expanded[of_features] = self._expand(of_features)
        return self._expanded[of_features]

    def every(self, period: int, first: int) -> "Spread":
        """Of the lookups `first`, `first + period`, ... alone."""
        if (period, first) not in self._samples:
            ends = (self.ends + (period - 1 - first)).div(period, rounding_mode="floor").clamp_(min=0)
            num = len(range(first, self._num_lookups, period))
            self._samples[period, first] = Spread(ends, num)
        return self._samples[period, first]

    def lookups(self, layout: LookupLayout, ids: Tensor) -> "Lookups":
        """Lookups of these ids that are spread like this."""
        return Lookups(layout=layout, ids=ids, ends=self.ends, spreads=Spreads(self))

    def _expand(self, of_features: Tensor) -> Tensor:
        nums = self.ends.diff()
        if of_features.device.type == "cpu":  # where repeat_interleave wakes all threads for however little
            return torch.cat([one.expand(num) for one, num in zip(of_features, nums.tolist(), strict=True)])
        # the size is given, or the GPU would be waited for
        return of_features.repeat_interleave(nums, output_size=self._num_lookups)


class Spreads:
    """Spreads of passes. Batches of one id a feature are all spread alike: the last one is kept.

    Args:
        last: of the pass before, if there is one.
    """

    def __init__(self, last: Spread | None = None) -> None:
        self._last = last

    def of(self, ends: Tensor, num_lookups: int) -> Spread:
        """The spread of these ends; other tensors are not compared on a GPU, which would be waited for."""
        last = self._last
        if last is not None and (last.ends is ends or (ends.is_cpu and torch.equal(last.ends, ends))):
            return last
        self._last = Spread(ends.clone(), num_lookups)
        return self._last


@dataclass(frozen=True, eq=False, kw_only=True)
class Lookups:
    """What one forward pass of an FBGEMM module looks up, in its order: feature by feature."""

    layout: LookupLayout
    ids: Tensor
    """Rows within their tables (this rank's pieces of them), int64 `[N]`, one for each lookup: an id that
    comes several times is there several times."""
    ends: Tensor
    """Feature `f` has the lookups `ends[f]` to before `ends[f + 1]`; int64 `[F + 1]`, not to be kept."""
    spreads: Spreads = field(default_factory=Spreads)
    """Keep what was made of the ends of the pass before."""

    @cached_property
    def spread(self) -> Spread:
        """Over features."""
        return self.spreads.of(self.ends, self.ids.numel())

    @property
    def rows(self) -> Tensor:
        """Joint rows of the module (`LookupLayout`), int64 `[N]`."""
        return self.ids + self.expand(self.layout.first_row_of_features)

    def expand(self, of_features: Tensor) -> Tensor:
        """A number of each feature, `[F]`, as that of each lookup, `[N]`."""
        return self.spread.expand(of_features)

    def every(self, period: int, first: int) -> "Lookups":
        """Only lookups `first`, `first + period`, ... of these."""
        return self.spread.every(period, first).lookups(self.layout, self.ids[first::period])


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
        spreads = Spreads()

        def after_forward(tbe: nn.Module, args: tuple[Any, ...], named: dict[str, Any], output: Any) -> None:
            if not (tbe.training and torch.is_grad_enabled()):
                return
            given = dict(zip(("indices", "offsets"), args, strict=False)) | named
            ids = given["indices"].to(torch.int64)
            callback(Lookups(layout=layout, ids=ids, ends=feature_ends(layout, given), spreads=spreads))

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


def feature_ends(layout: LookupLayout, given: Mapping[str, Any]) -> Tensor:
    """Where the lookups of each feature end, from the arguments of an FBGEMM module: int64 `[F + 1]`."""
    offsets: Tensor = given["offsets"].to(torch.int64)
    sizes = given.get("batch_size_per_feature_per_rank")
    num_features, num_bags = len(layout.feature_tables), offsets.numel() - 1
    if sizes is not None:  # each feature has a batch size of its own
        return offsets[[0, *accumulate(sum(of_ranks) for of_ranks in sizes)]]
    if num_bags:
        return offsets[:: num_bags // num_features]
    return offsets.new_zeros(num_features + 1)
