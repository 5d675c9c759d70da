"""Assembles the batches of a window from its rows, with one gather per column for the whole window.

A window is stored as `[batches, features, batch_size]`, so that the feature-major values of each batch are a
contiguous slice without a copy. Multi-hot features, whose bags differ in length, are joined batch by batch.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from data.batch import Batch
from data.loader.columns import Column, Positions, Rows, join
from data.loader.order import Window


class Assembler:
    """Assembles the batches of one rank.

    Args:
        keys: names of the features, in manifest order.
        batch_size: samples in a batch, `B`, the mean of all ranks'.
        pin_memory: put batches into page-locked memory.
    """

    def __init__(self, keys: Sequence[str], batch_size: int, pin_memory: bool) -> None:
        self._keys = list(keys)
        self._index_per_key = {key: index for index, key in enumerate(keys)}
        self._mean_size, self._pin_memory = batch_size, pin_memory
        # with one id per bag, all batches of a size share the same lengths and offsets
        self._shared = self._lengths_and_offsets(batch_size)

    def batches(self, pieces: Sequence[Rows], window: Window) -> list[Batch]:
        """Assemble the batches of a window.

        Args:
            pieces: the rows `window.rows`, in that order, in one or more pieces.
            window: order of these rows in the batches.
        """
        order, size = window.order, window.batch_size
        num_batches, num_dense = len(order) // size, len(pieces[0].dense)
        labels = self._empty(num_batches, size, dtype=torch.float32)
        labels.numpy().reshape(-1)[:] = join([piece.label for piece in pieces]).take(order).values
        dense = self._empty(num_batches, size, num_dense, dtype=torch.float32)
        dense_rows = dense.numpy().reshape(len(order), num_dense)
        for index in range(num_dense):
            dense_rows[:, index] = join([piece.dense[index] for piece in pieces]).take(order).values
        features = range(len(self._keys))
        ids = [join([piece.ids[index] for piece in pieces]).take(order) for index in features]
        weights = []
        if any(column is not None for column in pieces[0].weights):
            weights = [_weights(pieces, index, order, ids[index]) for index in features]
        assemble = self._one_hot if all(column.offsets is None for column in ids) else self._multi_hot
        sparse = assemble(ids, weights, num_batches, size)
        return [
            Batch(
                dense=dense[index],
                sparse=sparse[index],
                labels=labels[index],
                num_valid=min(size, window.num_valid - index * size),
                weight=size / self._mean_size,
            )
            for index in range(num_batches)
        ]

    def _one_hot(
        self, ids: Sequence[Column], weights: Sequence[Column], num_batches: int, size: int
    ) -> list[KeyedJaggedTensor]:
        def stacked(columns: Sequence[Column], dtype: torch.dtype) -> Sequence[torch.Tensor]:
            values = self._empty(num_batches, len(columns), size, dtype=dtype)
            for index, column in enumerate(columns):
                values.numpy()[:, index] = column.values.reshape(num_batches, -1)
            return values.view(num_batches, -1).unbind()

        if self._shared[0].numel() != len(ids) * size:
            self._shared = self._lengths_and_offsets(size)
        ones, counting = self._shared
        lengths = [size] * len(ids)
        weights_per_batch = stacked(weights, torch.float32) if weights else [None] * num_batches
        return [
            self._jagged(values, each, ones, counting, lengths, size)
            for values, each in zip(stacked(ids, torch.int64), weights_per_batch, strict=True)
        ]

    def _multi_hot(
        self, ids: Sequence[Column], weights: Sequence[Column], num_batches: int, size: int
    ) -> list[KeyedJaggedTensor]:
        lengths = self._empty(num_batches, len(ids), size)
        for index, column in enumerate(ids):
            lengths.numpy()[:, index] = column.lengths().reshape(num_batches, -1)
        bounds = [column.bounds(size) for column in ids]

        def joined(columns: Sequence[Column], batch: int, dtype: torch.dtype) -> torch.Tensor:
            bags = [
                column.values[bound[batch] : bound[batch + 1]]
                for column, bound in zip(columns, bounds, strict=True)
            ]
            values = self._empty(sum(map(len, bags)), dtype=dtype)
            np.concatenate(bags, out=values.numpy())
            return values

        made = []
        for batch in range(num_batches):
            batch_lengths = lengths[batch].view(-1)
            offsets = self._empty(len(batch_lengths) + 1)
            offsets[0] = 0
            np.cumsum(batch_lengths.numpy(), out=offsets.numpy()[1:])
            length_per_key = [int(bound[batch + 1] - bound[batch]) for bound in bounds]
            values = joined(ids, batch, torch.int64)
            batch_weights = joined(weights, batch, torch.float32) if weights else None
            made.append(self._jagged(values, batch_weights, batch_lengths, offsets, length_per_key, size))
        return made

    def _jagged(
        self,
        values: torch.Tensor,
        weights: torch.Tensor | None,
        lengths: torch.Tensor,
        offsets: torch.Tensor,
        length_per_key: list[int],
        size: int,
    ) -> KeyedJaggedTensor:
        """Make a jagged tensor with the caches that TorchRec would compute, or copy from a GPU."""
        return KeyedJaggedTensor(
            keys=self._keys,
            values=values,
            weights=weights,
            lengths=lengths,
            offsets=offsets,
            stride=size,
            length_per_key=length_per_key,
            offset_per_key=[0, *np.cumsum(length_per_key).tolist()],
            index_per_key=self._index_per_key,
        )

    def _lengths_and_offsets(self, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Of bags of one id each, in a batch of `size` samples."""
        num_bags = len(self._keys) * size
        ones, counting = self._empty(num_bags), self._empty(num_bags + 1)
        torch.ones(num_bags, out=ones)
        torch.arange(num_bags + 1, out=counting)
        return ones, counting

    def _empty(self, *shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, pin_memory=self._pin_memory)


def _weights(pieces: Sequence[Rows], index: int, order: Positions, ids: Column) -> Column:
    """Weights of the ids of a feature, whose rows were gathered in `order`; ones if it has none."""
    columns = [column for piece in pieces if (column := piece.weights[index]) is not None]
    return join(columns).take(order) if columns else Column(np.ones(len(ids.values), np.float32), ids.offsets)
