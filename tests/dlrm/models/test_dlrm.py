"""The dot interaction against its plain definition, forward and backward."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dlrm.models.dlrm import DotInteraction

NAMES = ["a", "b", "c", "d"]


def by_definition(dense, pooled, names, canonical):
    """The dense vector, then the products of all pairs, lower triangle row by row."""
    blocks = dict(zip(names, pooled.split(dense.shape[1], dim=1), strict=True))
    vectors = [dense, *(blocks[name] for name in canonical)]
    products = [(vectors[i] * vectors[j]).sum(1, keepdim=True) for i in range(len(vectors)) for j in range(i)]
    return torch.cat([dense, *products], dim=1)


@settings(max_examples=30)
@given(
    order=st.permutations(NAMES),
    count=st.integers(1, len(NAMES)),
    batch=st.integers(1, 5),
    dim=st.sampled_from([1, 4, 8]),
    seed=st.integers(0, 1000),
)
def test_equals_the_definition_in_any_order(order, count, batch, dim, seed):
    canonical = NAMES[:count]
    names = [name for name in order if name in canonical]
    generator = torch.Generator().manual_seed(seed)
    dense, pooled = (
        torch.randn(batch, width, generator=generator, dtype=torch.float64).requires_grad_()
        for width in (dim, count * dim)
    )
    expected = by_definition(dense, pooled, names, canonical)
    out = DotInteraction(canonical, dim)(dense, pooled, names)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    grad = torch.randn(expected.shape, generator=generator, dtype=torch.float64)
    found = torch.autograd.grad(out, (dense, pooled), grad)
    wanted = torch.autograd.grad(expected, (dense, pooled), grad)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def test_the_order_may_change_between_calls():
    """Training and evaluation of one model can be sharded alike, but nothing promises it."""
    module = DotInteraction(NAMES, 4)
    dense, pooled = torch.randn(3, 4), torch.randn(3, 16)
    first = module(dense, pooled, NAMES)
    swapped = torch.cat([pooled[:, 4:8], pooled[:, :4], pooled[:, 8:]], dim=1)
    torch.testing.assert_close(module(dense, swapped, ["b", "a", "c", "d"]), first)
    torch.testing.assert_close(module(dense, pooled, NAMES), first)
