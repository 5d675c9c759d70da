"""Split heads equal the whole in float64: results and all gradients."""

import copy
from itertools import accumulate
from types import SimpleNamespace

import pytest
import torch

from dlrm.models import dcn, deepfm
from dlrm.models.dcn import CrossHead, with_dense_vector
from dlrm.models.deepfm import DeepFMHead
from dlrm.models.dlrm import DotHead
from dlrm.models.fm import FMHead, LinearHead
from dlrm.sharding.splitting.head import Owned
from dlrm.sharding.splitting.operator_tables import Placement
from tests.dlrm.sharding.splitting.simulated import on_ranks

DIM = 16
HEADS = {
    "lr": lambda features, dtype: LinearHead(features),
    "fm": lambda features, dtype: FMHead(features, DIM, dtype),
    "deepfm": lambda features, dtype: DeepFMHead(features, DIM, DIM, (6, 4, 1), dtype),
    "deepfm of one layer": lambda features, dtype: DeepFMHead(features, DIM, DIM, (1,), dtype),
    "dcnv2": lambda features, dtype: CrossHead(features, DIM, (6, 3, 1), 2, 3, dtype),
    "dcnv2 of one layer": lambda features, dtype: CrossHead(features, DIM, (1,), 2, 3, dtype),
    "dlrm": lambda features, dtype: DotHead(features, DIM, dtype),
    "deepfm without dense": lambda features, dtype: DeepFMHead(features, 0, DIM, (6, 1), dtype),
    "dcnv2 without dense": lambda features, dtype: CrossHead(
        features, DIM, (6, 1), 2, 3, dtype, has_dense=False
    ),
    "dlrm without dense": lambda features, dtype: DotHead(features, DIM, dtype, has_dense=False),
}


class Rows(torch.nn.Module):
    """Stands in for `OperatorTables`: own rows as parameters of any dtype, without a process group."""

    def __init__(self, prefix, weight, placement):
        super().__init__()
        pieces = weight.detach().view(len(placement.fields), -1, weight.shape[1])
        own = [piece for name, piece in zip(placement.fields, pieces, strict=True) if name in placement.names]
        empty = pieces.new_zeros(0, weight.shape[1])
        self.rows = torch.nn.Parameter(torch.cat([empty, *own]))

    def weight(self):
        return self.rows


@pytest.fixture(autouse=True)
def rows_as_operator_tables(monkeypatch):
    for module in (dcn, deepfm):
        monkeypatch.setattr(module, "OperatorTables", Rows)


def place(names, owners, rank, num_ranks):
    return Placement(
        fields={name: SimpleNamespace(ranks=[owner]) for name, owner in zip(names, owners, strict=True)},
        names=[name for name, owner in zip(names, owners, strict=True) if owner == rank],
        sharder=None,
        env=SimpleNamespace(rank=rank, world_size=num_ranks),
        device=torch.device("cpu"),
    )


def whole(head, pooled, dense):
    """The unsplit head and what it computes from embeddings `[B, F, dim]` of all samples."""
    head = copy.deepcopy(head)
    head.pooled = lambda _: (pooled.flatten(1), head.names)
    return head, head(None, *dense)


def part_of(head, owners, columns, rank):
    """Index of the embeddings `[B, F, dim]` that a rank has looked up, and their features."""
    if head.split_by == "columns":
        here = slice(sum(columns[:rank]), sum(columns[: rank + 1]))
        return (slice(None), slice(None), here), head.names if columns[rank] else []
    fields = [field for field, owner in enumerate(owners) if owner == rank]
    return (slice(None), fields), [head.names[field] for field in fields]


def split_over_ranks(head, pooled, dense, factors, owners, columns, sizes):
    """Of each rank: its part of the head, results, and gradients of embeddings and dense vectors."""
    starts = list(accumulate((0, *sizes)))

    def work(exchange):
        rank, part = exchange.rank, copy.deepcopy(head)
        mine = slice(starts[rank], starts[rank + 1])
        part.co_locate(place(head.names, owners, rank, len(sizes)))
        index, names = part_of(head, owners, columns, rank)
        values = pooled.detach()[index].flatten(1).requires_grad_()
        own = [each.detach()[mine].clone().requires_grad_() for each in dense]
        owned = Owned(values=values, names=names, batch_sizes=sizes, columns=columns)
        out = part.split(owned, *own, exchange=exchange)
        # inside, gradients are of the mean over ranks
        (out * factors[mine]).sum().mul(len(sizes)).backward()
        return part, out, values.grad, [each.grad for each in own]

    return on_ranks(len(sizes), work)


def weights_of(head):
    """Parameters outside the tables, which are on the meta device."""
    return {name: each for name, each in head.named_parameters() if not each.is_meta}


def inputs(head, kind, num_samples, dtype=torch.float64):
    dim = head.tables.embedding_bag_configs()[0].embedding_dim
    pooled = torch.randn(num_samples, len(head.names), dim, dtype=dtype, requires_grad=True)
    if kind in {"lr", "fm", "dcnv2 without dense", "dlrm without dense"}:
        return pooled, []
    num_dense = 0 if kind == "deepfm without dense" else DIM
    return pooled, [torch.randn(num_samples, num_dense, dtype=dtype, requires_grad=True)]


@pytest.mark.parametrize(
    ("owners", "columns", "sizes"),
    [
        ((0, 0, 0, 0), (16,), (5,)),
        ((0, 1, 0, 1), (4, 12), (5, 2)),
        ((0, 2, 2, 0), (4, 0, 12), (4, 0, 3)),
        ((3, 1, 2, 0), (4, 4, 4, 4), (1, 2, 3, 4)),
        ((1, 1, 0, 1), (16, 0), (3, 1)),
    ],
)
@pytest.mark.parametrize("kind", HEADS)
def test_split_heads_equal_the_whole(kind, owners, columns, sizes, features):
    torch.manual_seed(2)
    head = HEADS[kind](features, torch.float64).double()
    pooled, dense = inputs(head, kind, sum(sizes))
    unsplit, expected = whole(head, pooled, dense)
    factors = torch.randn_like(expected)
    (expected * factors).sum().backward()
    results = split_over_ranks(head, pooled, dense, factors, owners, columns, sizes)
    # the rows of a weight's gradient go where the weight's rows go
    gradients, num_ranks, exactly = copy.deepcopy(head), len(sizes), {"rtol": 1e-12, "atol": 1e-12}
    for name, each in weights_of(gradients).items():
        each.data = unsplit.get_parameter(name).grad
    torch.testing.assert_close(torch.cat([out for _, out, *_ in results]), expected, **exactly)
    of_ranks = list(zip(*(of_dense for *_, of_dense in results), strict=True))
    for found, wanted in zip(of_ranks, dense, strict=True):
        torch.testing.assert_close(torch.cat(found) / num_ranks, wanted.grad, **exactly)
    replicated = {}
    for rank, (part, _, of_values, _) in enumerate(results):
        index, _ = part_of(head, owners, columns, rank)
        torch.testing.assert_close(of_values, pooled.grad[index].flatten(1), **exactly)
        wanted = copy.deepcopy(gradients)
        wanted.co_locate(place(head.names, owners, rank, num_ranks))
        for name, each in weights_of(part).items():
            if name.endswith(".rows"):
                torch.testing.assert_close(each.grad, wanted.get_parameter(name).detach(), **exactly)
            else:
                replicated.setdefault(name, []).append(each.grad)
    for name, found in replicated.items():
        total = torch.stack(found).sum(0) / num_ranks
        torch.testing.assert_close(total, wanted.get_parameter(name).detach(), **exactly, msg=name)
    assert head.traffic().replicated == sum(found[0].numel() for found in replicated.values())


@pytest.mark.parametrize("kind", ["deepfm", "dcnv2", "dlrm"])
def test_bfloat16_error_is_similar_split_and_whole(kind, features):
    """Against fp32. Partial results are rounded before they are summed, and there are few of them."""
    heads = {}
    for dtype in (torch.float32, torch.bfloat16):
        torch.manual_seed(4)
        heads[dtype] = HEADS[kind](features, dtype)
    pooled, dense = inputs(heads[torch.float32], kind, 600, torch.float32)
    exact = whole(heads[torch.float32], pooled, dense)[1].detach()
    rounded, vectors = pooled.bfloat16(), [each.bfloat16() for each in dense]
    at_once = whole(heads[torch.bfloat16], rounded, vectors)[1].detach()
    layout = ((0, 1, 2, 1), (4, 8, 4), (200, 200, 200))
    parts = split_over_ranks(heads[torch.bfloat16], rounded, vectors, torch.ones_like(exact), *layout)
    assert {each.grad.dtype for part, *_ in parts for each in weights_of(part).values()} <= {torch.float32}
    split = torch.cat([out.detach() for _, out, *_ in parts])
    error_whole, error_split = ((found.float() - exact).square().mean().sqrt() for found in (at_once, split))
    assert 0 < error_split < 2 * error_whole
    assert error_split < 0.02 * exact.square().mean().sqrt()


def test_traffic_of_cross_layers_lists_every_crossing(features):
    of_dtype = {
        dtype: CrossHead(features, 4, top, num_layers=2, rank=3, dtype=dtype).traffic().crossings
        for dtype, top in ((torch.float32, (6, 3, 1)), (torch.bfloat16, (1,)))
    }
    found = {dtype: [(c.way, c.width, c.value_bytes) for c in each] for dtype, each in of_dtype.items()}
    sums = [("sum_to_all", 3)] * 2
    assert found == {
        torch.float32: [(*each, 4) for each in (("deal_columns", 4), *sums, ("sum_to_owners", 6))],
        # logits are fp32
        torch.bfloat16: [("deal_columns", 4, 2), *((*each, 2) for each in sums), ("sum_to_owners", 1, 4)],
    }


def test_the_dense_vector_is_placed_with_another_field():
    names = ["dense", "dense_", "b", "c"]  # features that have the names of the dense vector
    placement, dealt = with_dense_vector(place(names, (1, 1, 0, 1), 0, 3), dim=4)
    assert dealt == [4, 0, 0]  # a rank with the fewest fields, but some
    assert list(placement.fields) == ["dense__", *names]
    assert placement.fields["dense__"] is placement.fields["b"]
    assert placement.names == ["dense__", "b"]
    elsewhere, _ = with_dense_vector(place(names, (1, 1, 0, 1), 1, 3), dim=4)
    assert elsewhere.names == ["dense", "dense_", "c"]
