"""Batches cut into parts with some of the samples each."""

from collections.abc import Sequence

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from data.batch import Batch


def half_sizes(num_samples: int) -> tuple[int, int]:
    """Samples of the two halves of a batch; with an odd number the first has one more.

    Raises:
        ValueError: there is nothing to halve.
    """
    if num_samples < 2:
        raise ValueError(
            "train.pipeline=waves halves the batch of each rank, which has one sample: let "
            "data.global_batch_size be at least twice the number of ranks, or choose prefetch"
        )
    return num_samples - num_samples // 2, num_samples // 2


def parts_of(batch: Batch, sizes: Sequence[int]) -> list[Batch]:
    """Cut a batch into parts with so many samples, in their order."""
    sparse = _sparse_parts(batch.sparse, sizes)
    dense, labels = torch.split(batch.dense, list(sizes)), torch.split(batch.labels, list(sizes))
    parts = zip(dense, sparse, labels, sizes, strict=True)
    return [
        Batch(dense, bags, labels, num_valid=size, weight=batch.weight) for dense, bags, labels, size in parts
    ]


def _sparse_parts(sparse: KeyedJaggedTensor, sizes: Sequence[int]) -> list[KeyedJaggedTensor]:
    keys, num_samples = sparse.keys(), sum(sizes)
    lengths = sparse.lengths().view(len(keys), num_samples)
    bounds = sparse.offsets()[:-1].view(len(keys), num_samples)
    bounds = torch.cat([bounds, bounds[:, -1:] + lengths[:, -1:]], dim=1)  # of each feature's bags
    values, weights = sparse.values(), sparse.weights_or_none()
    parts, first = [], 0
    for size in sizes:
        spans = bounds[:, [first, first + size]].tolist()
        chosen = [slice(begin, end) for begin, end in spans]
        parts.append(
            KeyedJaggedTensor(
                keys=keys,
                values=torch.cat([values[span] for span in chosen]),
                lengths=lengths[:, first : first + size].reshape(-1),
                weights=None if weights is None else torch.cat([weights[span] for span in chosen]),
                stride=size,
            )
        )
        first += size
    return parts
