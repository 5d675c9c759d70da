"""Checks the ids of a batch against the rows of their tables, before ranks exchange them.

An id beyond its table would train another row: in the host lookup's joint table the next table's rows lie
there, and FBGEMM's lookup reads row 0 with a warning. The exchange divides ids of row-wise tables by the rows
of a piece, so that later checks could not name the id.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from operator import le
from typing import Any, Final
from weakref import WeakSet

import numpy as np
import torch
from torch import Tensor, nn
from torchrec.distributed.types import ShardedModule
from torchrec.modules.embedding_configs import BaseEmbeddingConfig, PoolingType
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dlrm.comm.late import LateScalars

_ANY_ID: Final = torch.iinfo(torch.int64)
_UNSIGNED: Final = {torch.int32: np.uint32, torch.int64: np.uint64}


class IdBounds:
    """Refuses batches with ids that a table does not have; `tables` are those whose ids are rows."""

    def __init__(self, tables: Iterable[BaseEmbeddingConfig]) -> None:
        self._tables: dict[str, BaseEmbeddingConfig] = {}
        """The smallest table of each feature."""
        for table in tables:
            for feature in table.feature_names:
                smallest = self._tables.get(feature, table)
                self._tables[feature] = min(table, smallest, key=lambda each: each.num_embeddings)
        self._last: dict[tuple[torch.dtype, tuple[str, ...]], list[int]] = {}
        self._ranges: dict[tuple[tuple[str, ...], torch.device], Tensor] = {}
        self._results: LateScalars[KeyedJaggedTensor] = LateScalars(on_gpu=True)
        self._checked: WeakSet[KeyedJaggedTensor] = WeakSet()

    def watch(self, model: nn.Module) -> None:
        """Check every `KeyedJaggedTensor` that a sharded model looks up, once, before any of it is sent."""
        for module in model.modules():
            if isinstance(module, ShardedModule):
                module.register_forward_pre_hook(self._check_arguments, with_kwargs=True, prepend=True)

    def check(self, sparse: KeyedJaggedTensor) -> None:
        """Check all ids of a batch; features without a table here may have any.

        On a GPU, those of the batch before: the host would have to wait for the GPU. There FBGEMM itself
        reads row 0 for an id beyond its table, and the batch that is checked last is not refused.

        Raises:
            ValueError: an id is negative or beyond its table; names table, feature and id.
        """
        ids = sparse.values()
        if ids.device.type != "cpu":
            self._check_late(sparse, ids)
        elif ids.numel() and not self._is_within(sparse, ids):
            self._refuse(sparse)

    def _is_within(self, sparse: KeyedJaggedTensor, ids: Tensor) -> bool:
        # one NumPy call and lists, because each call costs more than the ids do; as an unsigned number, a
        # negative id is beyond every table
        offsets, last = sparse.offset_per_key(), self._last_ids(sparse.keys(), ids.dtype)
        begins = offsets[:-1]
        if len(set(offsets)) < len(offsets):  # reduceat needs at least one id per feature
            kept = [place for place, (begin, end) in enumerate(pairwise(offsets)) if begin < end]
            begins, last = [begins[place] for place in kept], [last[place] for place in kept]
        highest = np.maximum.reduceat(ids.numpy().view(_UNSIGNED[ids.dtype]), begins)
        return all(map(le, highest.tolist(), last))

    def _check_late(self, sparse: KeyedJaggedTensor, ids: Tensor) -> None:
        """Refuse the batch before, and begin to check this one: its result on a GPU is read a batch later."""
        keys = tuple(sparse.keys())
        if (keys, ids.device) not in self._ranges:  # a copy to a GPU for each batch would wait for it
            ranges = torch.tensor([self._range(feature) for feature in keys], device=ids.device)
            self._ranges[keys, ids.device] = ranges
        counts = torch.tensor(sparse.length_per_key()).to(ids.device, non_blocking=True)
        every = self._ranges[keys, ids.device].repeat_interleave(counts, dim=0, output_size=ids.numel())
        low, high = every.unbind(1)
        previous = self._results.give(((ids < low) | (ids > high)).any().view(1), sparse)
        if previous is not None and any(previous[0]):
            self._refuse(previous[1])

    def _last_ids(self, features: Sequence[str], dtype: torch.dtype) -> list[int]:
        """Return the last valid id of each feature.

        A feature without a table gets the largest unsigned number of the dtype's width.
        """
        key = (dtype, tuple(features))
        if key not in self._last:
            most = torch.iinfo(dtype).max
            self._last[key] = [
                min(self._range(feature)[1], most) if feature in self._tables else 2 * most + 1
                for feature in features
            ]
        return self._last[key]

    def _range(self, feature: str) -> tuple[int, int]:
        table = self._tables.get(feature)
        return (_ANY_ID.min, _ANY_ID.max) if table is None else (0, table.num_embeddings - 1)

    def _refuse(self, sparse: KeyedJaggedTensor) -> None:
        for feature, ids in zip(sparse.keys(), sparse.values().split(sparse.length_per_key()), strict=True):
            first, last = self._range(feature)
            wrong = ids[(ids < first) | (ids > last)]
            if wrong.numel():
                table = self._tables[feature]
                is_sum = getattr(table, "pooling", None) == PoolingType.SUM  # what dynamic tables support
                more = f", or let ids be any numbers: tables.dynamic=['{feature}']" if is_sum else ""
                raise ValueError(
                    f"feature {feature} has the id {int(wrong[0])}, but its table {table.name} has the rows "
                    f"0 to {last} ({wrong.numel()} of {ids.numel()} ids of this rank's batch are wrong). "
                    "What to do: train on the data that the tables were made for, prepare it again (python "
                    f"-m data.prepare) if its manifest is not right{more}"
                )

    def _check_arguments(self, model: nn.Module, args: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        for each in (*args, *named.values()):
            if isinstance(each, KeyedJaggedTensor) and each not in self._checked:
                self.check(each)
                self._checked.add(each)
