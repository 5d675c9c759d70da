"""Norms and clipping against PyTorch, and how norms are divided among ranks."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from dlrm.optim.norms import choose_norms, clip_gradients, divide, local_norms


@given(
    sizes=st.lists(st.integers(0, 100), max_size=20).map(tuple),
    num_ranks=st.integers(1, 6),
)
def test_every_tensor_has_one_owner_and_work_is_balanced(sizes, num_ranks):
    shares = divide(sizes, num_ranks)
    assert len(shares) == num_ranks
    assert sorted(index for share in shares for index in share) == list(range(len(sizes)))
    loads = [sum(sizes[index] for index in share) for share in shares]
    assert max(loads) - min(loads) <= max(sizes, default=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_norms_are_summed_in_fp32(dtype):
    """The sum of squares would be infinite in fp16."""
    tensors = [
        torch.full((300, 300), 3.0, dtype=dtype),
        torch.zeros(5, dtype=dtype),
        torch.ones((), dtype=dtype),
    ]
    norms = local_norms(tensors)
    assert norms.dtype == torch.float32
    assert norms.tolist() == pytest.approx([900.0, 0.0, 1.0], rel=1e-6)
    assert local_norms([]).shape == (0,)


def test_a_single_rank_computes_its_own_norms():
    assert choose_norms([nn.Parameter(torch.ones(3))]) is local_norms


def parameters_with_gradients(scale=1.0):
    generator = torch.Generator().manual_seed(7)
    parameters = [nn.Parameter(torch.zeros(shape)) for shape in ((20, 30), (30,), (4, 5, 6))]
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=generator) * scale
    return [*parameters, nn.Parameter(torch.zeros(3))]  # the last one has none


@pytest.mark.parametrize("max_norm", [0.5, 1e6])
def test_clipping_equals_pytorch(max_norm):
    ours, theirs = parameters_with_gradients(), parameters_with_gradients()
    total = clip_gradients(ours, max_norm)
    expected = torch.nn.utils.clip_grad_norm_(theirs, max_norm, foreach=True)
    assert torch.equal(total, expected)
    for mine, other in zip(ours[:-1], theirs[:-1], strict=True):
        assert torch.equal(mine.grad, other.grad)
    assert ours[-1].grad is None
    after = torch.linalg.vector_norm(torch.cat([each.grad.flatten() for each in ours[:-1]]))
    assert after <= max_norm * (1 + 1e-6)


def test_nan_in_one_gradient_makes_all_nan():
    parameters = parameters_with_gradients()
    parameters[1].grad[3] = float("nan")
    assert clip_gradients(parameters, 1.0).isnan()
    assert all(each.grad.isnan().all() for each in parameters[:-1])


def test_zero_and_missing_gradients_are_not_clipped():
    parameters = parameters_with_gradients(scale=0.0)
    assert clip_gradients(parameters, 1.0) == 0
    assert all(not each.grad.any() for each in parameters[:-1])
    assert clip_gradients(parameters[-1:], 1.0) == 0
