"""Split cross layers equal the whole in float64: results and all gradients."""

import copy
from itertools import accumulate
from types import SimpleNamespace

import pytest
import torch

from dlrm.models import dcn
from dlrm.models.dcn import CrossHead, LowRankCross, with_dense_vector
from dlrm.sharding.splitting.head import Owned
from dlrm.sharding.splitting.operator_tables import Placement
from tests.dlrm.sharding.splitting.simulated import on_ranks


def test_cross_layers_in_a_hand_made_case():
    cross = LowRankCross(width=2, rank=1, num_layers=1)
    cross.down[0].weight.data = torch.tensor([[1.0, 2.0]])
    cross.up[0].weight.data = torch.tensor([[3.0], [-1.0]])
    cross.up[0].bias.data = torch.tensor([0.5, 1.0])
    # V x = 1 + 8 = 9; W V x + b = (27.5, -8); x0 * that + x
    assert cross(torch.tensor([[1.0, 4.0]])).tolist() == [[28.5, -28.0]]


class Rows(torch.nn.Module):
    """Stands in for `OperatorTables`: own rows as parameters, in float64, without a process group."""

    def __init__(self, prefix, weight, placement):
        super().__init__()
        pieces = weight.detach().view(len(placement.fields), -1, weight.shape[1])
        own = [piece for name, piece in zip(placement.fields, pieces, strict=True) if name in placement.names]
        empty = pieces.new_zeros(0, weight.shape[1])
        self.rows = torch.nn.Parameter(torch.cat([empty, *own]))

    def weight(self):
        return self.rows


def place(features, owners, rank, num_ranks):
    names = [feature.name for feature in features]
    return Placement(
        fields={name: SimpleNamespace(ranks=[owner]) for name, owner in zip(names, owners, strict=True)},
        names=[name for name, owner in zip(names, owners, strict=True) if owner == rank],
        sharder=None,
        env=SimpleNamespace(rank=rank, world_size=num_ranks),
        device=torch.device("cpu"),
    )


def columns_of(owners, rank, dense_owner):
    """Of the crossed vector, those on a rank: the dense vector is its first field."""
    ranks = torch.tensor([dense_owner, *owners]).repeat_interleave(4)
    return torch.nonzero(ranks == rank).flatten()


@pytest.mark.parametrize("top", [(6, 3, 1), (1,)], ids=["mlp", "logit"])
@pytest.mark.parametrize(
    ("owners", "sizes", "dense_owner"),
    [
        ((0, 0, 0, 0), (5,), 0),
        ((0, 1, 0, 1), (5, 2), 1),
        ((0, 2, 2, 0), (4, 0, 3), 2),
        ((3, 1, 2, 0), (1, 2, 3, 4), 3),
        ((1, 1, 0, 1), (3, 1), 0),
    ],
)
def test_split_heads_equal_the_whole(owners, sizes, dense_owner, top, features, monkeypatch):
    """Results of the ranks' own samples, gradients of the dense vector, of embeddings, and of all weights."""
    monkeypatch.setattr(dcn, "OperatorTables", Rows)
    torch.manual_seed(2)
    num_ranks, num_samples = len(sizes), sum(sizes)
    head = CrossHead(features, 4, top, num_layers=2, rank=3, dtype=torch.float64).double()
    vector, pooled = (torch.randn(num_samples, width, dtype=torch.float64) for width in (4, 16))
    factors = torch.randn(num_samples, dtype=torch.float64)
    whole = copy.deepcopy(head)
    x0 = torch.cat([vector, pooled], dim=1).requires_grad_()
    expected = whole.top(whole.cross(x0))
    (expected * factors).sum().backward()
    starts = list(accumulate((0, *sizes)))

    def work(exchange):
        rank = exchange.rank
        mine = slice(starts[rank], starts[rank + 1])
        split = copy.deepcopy(head)
        split.co_locate(place(features, owners, rank, num_ranks))
        fields = [name for name, owner in zip(head.names, owners, strict=True) if owner == rank]
        columns = columns_of(owners, rank, dense_owner=-1)
        values = pooled[:, columns - 4].clone().requires_grad_()
        dense = vector[mine].clone().requires_grad_()
        owned = Owned(values=values, names=fields, batch_sizes=sizes, columns=[4] * num_ranks)
        logits = split.split(owned, dense, exchange=exchange)
        # inside, gradients are of the mean over ranks
        (logits * factors[mine]).sum().mul(num_ranks).backward()
        return split, logits, values.grad, dense.grad

    results = on_ranks(num_ranks, work)
    for rank, (split, logits, of_values, of_dense) in enumerate(results):
        mine, fields = slice(starts[rank], starts[rank + 1]), columns_of(owners, rank, -1)
        columns = columns_of(owners, rank, dense_owner)
        layers, inner = whole.cross, split.cross_tables
        found = [logits, of_values, of_dense / num_ranks, split.first.rows.grad, inner.bias.rows.grad]
        found += [layer.rows.grad for layer in (*inner.down, *inner.up)]
        wanted = [expected[mine], x0.grad[:, fields], x0.grad[mine, :4]]
        wanted += [whole.top.first.weight.grad[:, columns].t()]
        wanted += [torch.stack([layer.bias.grad for layer in layers.up], dim=1)[columns]]
        wanted += [layer.weight.grad[:, columns].t() for layer in layers.down]
        wanted += [layer.weight.grad[columns] for layer in layers.up]
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    replicated = dict(whole.top.named_parameters())
    names = [name for name, _ in results[0][0].top.named_parameters()]
    assert len(names) == 2 * len(top) - 1  # but for the first layer's weight
    assert head.traffic().replicated == sum(each.numel() for each in results[0][0].top.parameters())
    for name in names:
        of_ranks = [dict(split.top.named_parameters())[name].grad for split, *_ in results]
        total = torch.stack(of_ranks).sum(0) / num_ranks
        torch.testing.assert_close(total, replicated[name].grad, rtol=1e-12, atol=1e-12)


def test_traffic_lists_every_crossing(features):
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


def test_bfloat16_error_is_similar_split_and_whole(features, monkeypatch):
    """Against fp32. Partial results are rounded before they are summed, and there are few of them."""
    monkeypatch.setattr(dcn, "OperatorTables", Rows)
    num_ranks, each, owners = 3, 200, (0, 1, 2, 1)

    def head_of(dtype):
        torch.manual_seed(4)
        return CrossHead(features, 4, (32, 16, 1), num_layers=3, rank=8, dtype=dtype)

    vector, pooled = (torch.randn(num_ranks * each, width) for width in (4, 16))
    x0 = torch.cat([vector, pooled], dim=1)
    exact, whole = (
        head.top(head.cross(x0.to(head.dtype))) for head in (head_of(torch.float32), head_of(torch.bfloat16))
    )

    unsplit = head_of(torch.bfloat16)

    def work(exchange):
        rank = exchange.rank
        split = copy.deepcopy(unsplit)
        split.co_locate(place(features, owners, rank, num_ranks))
        values = pooled[:, columns_of(owners, rank, dense_owner=-1) - 4].bfloat16().requires_grad_()
        owned = Owned(values=values, names=[], batch_sizes=[each] * num_ranks, columns=[4] * num_ranks)
        own = vector[rank * each : (rank + 1) * each].bfloat16()
        logits = split.split(owned, own, exchange=exchange)
        logits.sum().backward()
        return logits, {
            each.grad.dtype for name, each in split.named_parameters() if not name.startswith("tables")
        }

    logits, dtypes = zip(*on_ranks(num_ranks, work), strict=True)
    assert set.union(*dtypes) == {torch.float32}
    error_whole, error_split = (
        (found - exact).square().mean().sqrt() for found in (whole, torch.cat(logits))
    )
    assert 0 < error_split < 2 * error_whole
    assert error_split < 0.02 * exact.square().mean().sqrt()


def test_the_dense_vector_is_placed_with_another_field(features):
    placement, dealt = with_dense_vector(place(features, (1, 1, 0, 1), 0, 3), dim=4)
    assert dealt == [4, 0, 0]  # a rank with the fewest fields, but some
    assert list(placement.fields) == ["dense", "cat_0", "cat_1", "cat_2", "cat_3"]
    assert placement.fields["dense"] is placement.fields["cat_2"]
    assert placement.names == ["dense", "cat_2"]
    elsewhere, _ = with_dense_vector(place(features, (1, 1, 0, 1), 1, 3), dim=4)
    assert elsewhere.names == ["cat_0", "cat_1", "cat_3"]


def test_a_feature_may_have_the_name_of_the_dense_vector():
    features = [SimpleNamespace(name=name) for name in ("dense", "dense_")]
    placement, _ = with_dense_vector(place(features, (0, 1), 1, 2), dim=4)
    assert list(placement.fields) == ["dense__", "dense", "dense_"]
