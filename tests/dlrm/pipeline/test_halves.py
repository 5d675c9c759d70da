"""Parts of a batch have its samples, in order."""

import pytest
import torch

from dlrm.pipeline.halves import half_sizes, parts_of


def test_a_batch_of_one_sample_is_not_halved():
    with pytest.raises(ValueError, match=r"one sample: let data.global_batch_size be at least"):
        half_sizes(1)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("multi_hot", [False, True])
@pytest.mark.parametrize("size", [2, 5])
def test_parts_have_the_samples_of_the_batch(size, multi_hot, weighted, make_batch):
    batch = make_batch(size, seed=size, multi_hot=multi_hot, weighted=weighted)
    parts = parts_of(batch, half_sizes(size))
    assert [part.num_valid for part in parts] == [size - size // 2, size // 2]
    for name in ("dense", "labels"):
        assert torch.equal(torch.cat([getattr(part, name) for part in parts]), getattr(batch, name))
    for key in batch.sparse.keys():  # noqa: SIM118
        whole, bags = batch.sparse[key], [part.sparse[key] for part in parts]
        assert torch.equal(torch.cat([bag.lengths() for bag in bags]), whole.lengths())
        assert torch.equal(torch.cat([bag.values() for bag in bags]), whole.values())
        if weighted:
            assert torch.equal(torch.cat([bag.weights() for bag in bags]), whole.weights())
    assert parts[0].sparse.stride() == half_sizes(size)[0]
