"""The one-pass selection of the largest magnitudes equals sorting, for any vector, bound and chunk size."""

from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dlrm.comm.compression import topk as module
from dlrm.comm.compression.topk import (
    NOTHING,
    SAMPLE,
    SAMPLED,
    largest,
    largest_on_device,
    sample_positions,
    suggested_bound,
)

CPU = torch.device("cpu")
EVERYTHING = torch.tensor(NOTHING, dtype=torch.int32)
FLOATS = st.floats(width=32, allow_nan=True, allow_infinity=True, allow_subnormal=True)
FEW_DIFFERENT = st.sampled_from([0.0, -0.0, 1.0, -1.0, 1e-45, float("nan"), float("-inf")])
VECTORS = st.lists(FLOATS, min_size=1, max_size=200) | st.lists(FEW_DIFFERENT, min_size=1, max_size=200)


def magnitudes(vector):
    return vector.view(torch.int32) & 0x7FFFFFFF


def bound(value):
    return torch.tensor(value, dtype=torch.int32)


def by_sorting(vector, num_wanted, above=NOTHING, up_to=0x7FFFFFFF):
    """The expected indices, by a stable sort."""
    key = magnitudes(vector)
    order = key.argsort(descending=True, stable=True)
    inside = order[(key[order] > above) & (key[order] <= up_to)]
    return inside[:num_wanted].sort().values


@given(
    values=VECTORS,
    num_wanted=st.integers(1, 250),
    chunk=st.integers(1, 70),
    spare=st.integers(0, 40),
    bounds=st.tuples(FLOATS, FLOATS),
)
def test_selection_equals_sorting(values, num_wanted, chunk, spare, bounds):
    vector = torch.tensor(values, dtype=torch.float32)
    above, up_to = sorted(int(magnitudes(torch.tensor(bound))) for bound in bounds)
    with mock.patch.multiple(module, CHUNK=chunk, SPARE=spare):
        everything = largest(vector, num_wanted, EVERYTHING)
        inside = largest(vector, num_wanted, bound(above), up_to=bound(up_to))
    assert torch.equal(everything, by_sorting(vector, num_wanted))
    assert torch.equal(inside, by_sorting(vector, num_wanted, above, up_to))
    # the implementation for GPUs also runs on the CPU
    bits = vector.view(torch.int32)
    assert torch.equal(largest_on_device(bits, num_wanted, EVERYTHING, None), everything)
    assert torch.equal(largest_on_device(bits, num_wanted, bound(above), bound(up_to)), inside)


def test_memory_is_of_the_order_of_the_output(monkeypatch):
    """Even where every value exceeds all before it."""
    held = []
    add = module._Held.add

    def noting(self, indices, magnitudes):
        held.append(self.num + indices.size)
        add(self, indices, magnitudes)

    monkeypatch.setattr(module._Held, "add", noting)
    monkeypatch.setattr(module, "CHUNK", 100)
    monkeypatch.setattr(module, "SPARE", 50)
    vector = torch.arange(10_000, dtype=torch.float32)
    assert torch.equal(largest(vector, 20, EVERYTHING), torch.arange(9_980, 10_000))
    assert len(held) == 100
    assert max(held) <= 2 * 20 + 50 + 100


@pytest.mark.parametrize("size", [SAMPLE * SAMPLED, 3 * SAMPLE * SAMPLED, 1_000_003, 10_000_000])
def test_the_sample_is_of_different_positions_and_even(size):
    positions = sample_positions(size, CPU)
    num = min(SAMPLE, size // SAMPLED)
    assert positions.numel() == positions.unique().numel() == num
    assert positions.min() >= 0
    assert positions.max() < size
    # as many in each hundredth as in any other, the furthest off by less than random positions are on average
    counts = torch.histc(positions.double(), bins=100, min=0, max=size)
    assert (counts - num / 100).abs().max() <= (num / 100) ** 0.5 / 2
    # and of each column of a matrix of 128 columns: gradients have such patterns
    columns = torch.bincount(positions % 128, minlength=128)
    assert columns.min() >= 0.5 * num / 128
    assert columns.max() <= 1.5 * num / 128


@pytest.mark.parametrize("share", [0.0001, 0.001, 0.01, 0.1])
@pytest.mark.parametrize("heavy_tailed", [False, True])
def test_little_more_than_wanted_exceeds_the_suggested_bound(share, heavy_tailed):
    vector = torch.randn(2_000_000, generator=torch.Generator().manual_seed(3))
    if heavy_tailed:
        vector = vector.sign() * torch.exp(3 * vector)
    num_wanted = int(share * vector.numel())
    reached = int((magnitudes(vector) > suggested_bound(vector, num_wanted)).sum())
    error = (share * SAMPLE) ** -0.5  # of the sample's count, as a share
    assert num_wanted <= reached <= num_wanted * (1 + 10 * error + 10 * error**2)
