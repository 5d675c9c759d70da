"""Cross layers in slices equal the whole, in float64: the result and every gradient."""

from itertools import accumulate, pairwise

import pytest
import torch

from dlrm.models.cross import LowRankCross, cross_slice
from tests.dlrm.sharding.splitting.simulated import on_ranks

WIDTH, RANK, LAYERS = 20, 4, 3


def test_cross_layers_in_a_hand_made_case():
    cross = LowRankCross(width=2, rank=1, num_layers=1)
    cross.down[0].weight.data = torch.tensor([[1.0, 2.0]])
    cross.up[0].weight.data = torch.tensor([[3.0], [-1.0]])
    cross.up[0].bias.data = torch.tensor([0.5, 1.0])
    # V x = 1 + 8 = 9; W V x + b = (27.5, -8); x0 * that + x
    assert cross(torch.tensor([[1.0, 4.0]])).tolist() == [[28.5, -28.0]]


@pytest.mark.parametrize("widths", [(20,), (12, 8), (4, 0, 16), (8, 4, 4, 4)])
def test_slices_equal_the_whole(widths):
    """All ranks hold all samples here, so that a gradient is what it is in one process."""
    torch.manual_seed(1)
    cross = LowRankCross(WIDTH, RANK, LAYERS).double()
    x0 = torch.randn(7, WIDTH, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(7, WIDTH, dtype=torch.float64)
    expected = cross(x0)
    (expected * weights).sum().backward()
    places = [slice(*ends) for ends in pairwise(accumulate((0, *widths)))]

    def work(exchange):
        here = places[exchange.rank]
        own = x0.detach()[:, here].requires_grad_()
        down = [layer.weight.detach()[:, here].t().clone().requires_grad_() for layer in cross.down]
        up = [layer.weight.detach()[here].clone().requires_grad_() for layer in cross.up]
        bias = [layer.bias.detach()[here].clone().requires_grad_() for layer in cross.up]
        out = cross_slice(own, down, up, bias, exchange)
        (out * weights[:, here]).sum().backward()
        return out, own.grad, [[each.grad for each in group] for group in (down, up, bias)]

    for here, (out, grad, (down, up, bias)) in zip(places, on_ranks(len(widths), work), strict=True):
        found = [out, grad, *down, *up, *bias]
        wanted = [expected[:, here], x0.grad[:, here]]
        wanted += [layer.weight.grad[:, here].t() for layer in cross.down]
        wanted += [layer.weight.grad[here] for layer in cross.up]
        wanted += [layer.bias.grad[here] for layer in cross.up]
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
