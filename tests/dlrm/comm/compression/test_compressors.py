"""Compressors select the right number of the right values, of any vector."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dlrm.comm.compression.compressors import MSTopK, RandomK, Threshold, TopK
from dlrm.comm.compression.topk import CHUNK, sample_positions

LONG = 5 * CHUNK // 2 + 13
"""Long enough to be sampled, and read in several chunks of unequal length."""
NAN = float("nan")


def normal(size, seed=1):
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def mostly_zero(size):
    vector = normal(size)
    vector[torch.arange(size) % 3000 != 7] = 0
    return vector


def some_nan(size):
    vector = normal(size)
    vector[5::1000] = NAN
    vector[6::5000] = -float("inf")
    return vector


KINDS = {
    "normal": normal,
    "cauchy": lambda size: normal(size, 1) / normal(size, 2),
    "constant": lambda size: torch.full((size,), -0.25),
    "zero": torch.zeros,
    "mostly zero": mostly_zero,
    "three values": lambda size: normal(size).round().clamp(-1, 1),
    "denormal": lambda size: normal(size) * 1e-41,
    "tiny and huge": lambda size: torch.where(torch.arange(size) % 100 == 3, 1e38, 1e-38) * normal(size),
    "ascending": lambda size: torch.arange(size, dtype=torch.float32),
    "columns": lambda size: torch.arange(size, dtype=torch.float32) % 128,
    "NaN": some_nan,
    "only NaN": lambda size: torch.full((size,), NAN),
}
LONG_VECTORS = {kind: make(LONG) for kind, make in KINDS.items()}
EXACT = {"topk": TopK, "mstopk": MSTopK, "random": lambda: RandomK(seed=1)}


def magnitudes(vector):
    """Magnitudes as integers, with NaN as the largest."""
    return vector.view(torch.int32) & 0x7FFFFFFF


def check_selection(name, vector, num_kept):
    """Each index once, as many as asked for, of the largest magnitudes unless they are drawn."""
    before, size = vector.clone(), vector.numel()
    indices = EXACT[name]().select(vector, num_kept)
    assert indices.dtype is torch.int64
    assert indices.shape == (min(num_kept, size),)
    assert indices.unique().numel() == indices.numel()
    assert ((indices >= 0) & (indices < size)).all()
    assert torch.equal(magnitudes(vector), magnitudes(before))
    if name != "random":
        kept = magnitudes(vector)[indices].sort(descending=True).values
        assert torch.equal(kept, magnitudes(vector).sort(descending=True).values[:num_kept])
    if name != "topk":
        assert (indices.diff() > 0).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", EXACT)
def test_long_vectors_are_selected_exactly(name, kind):
    for num_kept in (1, 300, LONG // 100, LONG // 10, LONG - 1, LONG):
        check_selection(name, LONG_VECTORS[kind], num_kept)


@given(
    kind=st.sampled_from(sorted(KINDS)),
    size=st.integers(0, 300),
    num_kept=st.integers(0, 400),
    name=st.sampled_from(sorted(EXACT)),
)
def test_short_vectors_are_selected_exactly(kind, size, num_kept, name):
    check_selection(name, KINDS[kind](size), num_kept)


@pytest.mark.parametrize("sampled", [0.0, 1e-45, 1e6, NAN], ids=["too low", "tiny", "too high", "NaN"])
def test_a_misleading_sample_does_not_change_the_selection(sampled):
    vector = LONG_VECTORS["normal"].clone()
    vector[sample_positions(LONG, vector.device)] = sampled
    for num_kept in (10, LONG // 100, LONG // 3):
        check_selection("mstopk", vector, num_kept)


@given(
    kind=st.sampled_from(sorted(KINDS)),
    size=st.integers(0, 300),
    num_kept=st.integers(0, 400),
    value=st.sampled_from([0.0, 1e-45, 1e-41, 0.25, 1.0, 2.5, 1e38, float("inf")]) | st.floats(0, width=32),
)
def test_a_threshold_keeps_what_reaches_it(kind, size, num_kept, value):
    vector = KINDS[kind](size)
    indices = Threshold(value).select(vector, num_kept)
    reaching = vector.isnan() | (vector.abs() >= value)
    assert indices.numel() == min(num_kept, int(reaching.sum()))
    assert reaching[indices].all()
    if num_kept >= size:
        assert torch.equal(indices, reaching.nonzero().view(-1))


def test_random_draws_include_all_values_that_are_not_finite():
    vector = normal(1000)
    broken = torch.tensor([3, 500, 999])
    vector[broken] = torch.tensor([NAN, float("inf"), -float("inf")])
    chosen = RandomK(seed=1).select(vector, 10)
    assert chosen.numel() == chosen.unique().numel() == 10
    assert torch.isin(broken, chosen).all()
    drawn = RandomK(seed=1).select(normal(1000), 10)
    assert torch.isin(chosen, torch.cat([broken, drawn])).all()
    assert RandomK(seed=1).select(vector, 2).tolist() == [3, 500]  # the third is selected later


def test_random_draws_differ_by_call_and_are_uniform():
    compressor = RandomK(seed=4)
    draws = [compressor.select(torch.zeros(1000), 300) for _ in range(200)]
    assert not torch.equal(draws[0], draws[1])
    counts = torch.bincount(torch.cat(draws), minlength=1000).double()
    # binomial: 60 on average, 6.5 away from it one time in three
    assert counts.min() > 60 - 5 * 6.5
    assert counts.max() < 60 + 5 * 6.5


def test_random_draws_of_one_seed_are_equal_also_after_a_restore():
    first, second = RandomK(seed=4), RandomK(seed=4)
    vector = torch.zeros(1000)
    for _ in range(3):
        assert torch.equal(first.select(vector, 30), second.select(vector, 30))
    restored = RandomK(seed=9)
    restored.load_state_dict(first.state_dict())
    assert torch.equal(restored.select(vector, 30), second.select(vector, 30))
    assert not torch.equal(RandomK(seed=9).select(vector, 30), RandomK(seed=4).select(vector, 30))


@pytest.mark.parametrize("compressor", [TopK(), MSTopK(), Threshold(0.5), RandomK(1)])
def test_vectors_of_other_types_or_shapes_are_refused(compressor):
    for wrong in (torch.zeros(4, dtype=torch.float64), torch.zeros(2, 2), torch.zeros(4).half()):
        with pytest.raises(ValueError, match="flatten"):
            compressor.select(wrong, 1)
    with pytest.raises(ValueError, match="ask for 0 or more"):
        compressor.select(torch.zeros(4), -1)
