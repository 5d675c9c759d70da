"""The dot interaction against its plain definition, forward and backward."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from data.dataset import Feature
from dlrm.models.dlrm import DotHead, DotInteraction
from dlrm.sharding.splitting.head import Owned
from tests.dlrm.sharding.splitting.simulated import on_ranks

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


SHUFFLED = ["c", "a", "d", "b"]
SIZES = (3, 0, 2)


def make_head(dtype):
    return DotHead([Feature(name=name, rows=1) for name in NAMES], 16, dtype)


def split_over_ranks(dense, pooled, columns):
    """Result, gradient of the dense vector, and gradient of the embeddings, of all ranks together."""

    def work(exchange):
        rank, names = exchange.rank, SHUFFLED if columns[exchange.rank] else []
        own = dense.detach().split(SIZES)[rank].requires_grad_()
        values = pooled.detach().unflatten(1, (4, -1)).split(columns, dim=2)[rank].flatten(1).requires_grad_()
        owned = Owned(values=values, names=names, batch_sizes=SIZES, columns=columns)
        result = make_head(dense.dtype).split(owned, own, exchange=exchange)
        result.to(torch.float64).square().sum().backward()
        return result.detach(), own.grad, values.grad.unflatten(1, (4, columns[rank]))

    results, of_dense, of_values = zip(*on_ranks(len(SIZES), work), strict=True)
    return torch.cat(results), torch.cat(of_dense), torch.cat(of_values, dim=2).flatten(1)


@pytest.mark.parametrize("columns", [(4, 4, 8), (16, 0, 0), (4, 0, 12)])
@pytest.mark.parametrize(
    ("dtype", "atol"), [(torch.float64, 1e-12), (torch.bfloat16, 0.5)], ids=["float64", "bfloat16"]
)
def test_split_by_columns_equals_the_whole(columns, dtype, atol):
    """In bfloat16 as well as can be: gradients of about 30 are of products that were rounded."""
    generator = torch.Generator().manual_seed(1)
    dense, pooled = (
        torch.randn(sum(SIZES), width, generator=generator).to(dtype).requires_grad_() for width in (16, 64)
    )
    expected = make_head(dtype).interaction(dense, pooled, SHUFFLED)
    expected.to(torch.float64).square().sum().backward()
    result, of_dense, of_values = split_over_ranks(dense, pooled, columns)
    assert result.dtype == of_values.dtype == dtype
    # inside, gradients are of the mean over ranks
    wanted = (expected.detach(), dense.grad, pooled.grad / len(SIZES))
    for found, each in zip((result, of_dense, of_values), wanted, strict=True):
        torch.testing.assert_close(found, each, rtol=1e-12, atol=atol)
