"""The split head of DeepFM equals the whole in float64: results and all gradients."""

import copy

import pytest
import torch
from torch import nn

from data.dataset import Feature
from dlrm.models.deepfm import DeepFM, DeepFMHead
from dlrm.sharding.splitting.head import Owned
from tests.dlrm.sharding.splitting.simulated import on_ranks

NAMES = ["a", "b", "c", "d"]
FEATURES = tuple(Feature(name=name, rows=9) for name in NAMES)
DIM = 4
NUM_DENSE = 3
FLOAT64 = torch.float64
LAYOUTS = [[NAMES], [["c", "a"], ["b", "d"]], [["c", "a"], [], ["b", "d"]]]
SIZES = (4, 1, 3)


class Weight(nn.Module):
    """In place of operator tables, which are fp32."""

    def __init__(self, rows):
        super().__init__()
        self.rows = nn.Parameter(rows.clone())

    def weight(self):
        return self.rows


def make_head(top_mlp):
    torch.manual_seed(2)
    head = DeepFMHead(FEATURES, NUM_DENSE, DIM, top_mlp, FLOAT64)
    head.deep.double()
    return head


def columns_of(names):
    """Of the first layer's weight, those of the embeddings of `names`."""
    places = [NUM_DENSE + NAMES.index(name) * DIM for name in names]
    return [column for place in places for column in range(place, place + DIM)]


def split(head, names):
    """As `co_locate` leaves it on a rank that has the tables of `names`."""
    part = copy.deepcopy(head)
    part.first = Weight(head.deep.first.weight.detach().t()[columns_of(names)])
    part.deep.first.narrow(NUM_DENSE)
    return part


@pytest.mark.parametrize("layout", LAYOUTS, ids=["one", "two", "one_without_fields"])
@pytest.mark.parametrize("top_mlp", [(1,), (5, 1), (6, 4, 1)], ids=str)
def test_parts_together_equal_the_whole(top_mlp, layout):
    head, world_size = make_head(top_mlp), len(layout)
    sizes, batch = SIZES[:world_size], sum(SIZES[:world_size])
    pooled = torch.randn(batch, len(NAMES), DIM, dtype=FLOAT64, requires_grad=True)
    dense = torch.randn(batch, NUM_DENSE, dtype=FLOAT64, requires_grad=True)
    head.pooled = lambda _: (pooled.flatten(1), NAMES)
    expected = head(None, dense)
    expected.square().mean().backward()

    def work(exchange):
        names, rank = layout[exchange.rank], exchange.rank
        part, own = split(head, names), slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
        here = pooled.detach()[:, [NAMES.index(name) for name in names]].flatten(1).requires_grad_()
        vector = dense.detach()[own].requires_grad_()
        owned = Owned(values=here, names=names, batch_sizes=sizes, columns=[DIM] * world_size)
        out = part.split(owned, vector, exchange=exchange)
        (out.square().sum() * world_size / batch).backward()  # of uneven batches every sample counts the same
        return part, out, here, vector

    results = on_ranks(world_size, work)
    exactly = {"rtol": 1e-12, "atol": 1e-12}
    torch.testing.assert_close(torch.cat([out for _, out, _, _ in results]), expected, **exactly)
    vectors = torch.cat([vector.grad for *_, vector in results])
    torch.testing.assert_close(vectors / world_size, dense.grad, **exactly)
    whole = head.deep.first.weight.grad
    for names, (part, _, here, _) in zip(layout, results, strict=True):
        wanted = pooled.grad[:, [NAMES.index(name) for name in names]].flatten(1)
        torch.testing.assert_close(here.grad, wanted, **exactly)
        torch.testing.assert_close(part.first.rows.grad, whole.t()[columns_of(names)], **exactly)
    for name, parameter in head.deep.named_parameters():
        wanted = parameter.grad
        if parameter is head.deep.first.weight:
            wanted = wanted[:, :NUM_DENSE]
        found = [part.deep.get_parameter(name).grad for part, *_ in results]
        torch.testing.assert_close(torch.stack(found).mean(0), wanted, **exactly, msg=name)


def test_mixed_precision_keeps_squares_in_fp32():
    """Sums of squares in bfloat16 would lose the small difference that the result is."""
    head = DeepFMHead(FEATURES, NUM_DENSE, DIM, (5, 1), torch.bfloat16)
    part = split(head, NAMES)
    values = torch.randn(3, len(NAMES) * DIM).to(torch.bfloat16)
    sent = []

    class Alone:
        def sum_to_owners(self, partial, batch_sizes):
            sent.append(partial)
            return partial

    owned = Owned(values=values, names=NAMES, batch_sizes=(3,), columns=(DIM,))
    dense = torch.randn(3, NUM_DENSE)
    out = part.split(owned, dense, exchange=Alone())
    assert out.dtype == sent[0].dtype == torch.float32
    head.pooled = lambda _: (values, NAMES)
    torch.testing.assert_close(out, head(None, dense), rtol=0.02, atol=0.05)
    embeddings = values.to(torch.float32).view(3, len(NAMES), DIM)
    torch.testing.assert_close(sent[0][:, DIM], embeddings.square().sum((1, 2)))


def test_the_linear_part_draws_its_weights_before_the_deep_part():
    """As it has been since before there were heads, so that a seed gives the model that it gave."""
    torch.manual_seed(3)
    model = DeepFM(FEATURES, NUM_DENSE, DIM, (6, 1), torch.float32)
    torch.manual_seed(3)
    assert torch.equal(model.wide_dense.weight, torch.empty(1, NUM_DENSE).normal_(std=(2 / 4) ** 0.5))
