"""Sums inside nodes first equal flat sums."""

from collections import Counter

import pytest
import torch
import torch.distributed as dist

from dlrm.sharding.splitting import costs
from dlrm.sharding.splitting.costs import Crossing
from dlrm.sharding.splitting.exchange import SplitExchange
from dlrm.sharding.splitting.two_level import TwoLevelExchange
from tests.dlrm.sharding.splitting.simulated import SimulatedExchange, on_ranks


class TwoLevelSimulated(TwoLevelExchange, SimulatedExchange):
    """Counts the bytes that go from this rank to each other one."""

    def __init__(self, simulated, ranks_per_node):
        SimulatedExchange.__init__(self, simulated.rank, simulated._mailbox, simulated._barrier)
        self.ranks_per_node = ranks_per_node
        self.sent = Counter()

    def all_to_all(self, sent, to_each, from_each):
        for rank, rows in enumerate(to_each):
            self.sent[rank] += rows * sent[:1].numel() * sent.itemsize
        return super().all_to_all(sent, to_each, from_each)


@pytest.mark.parametrize(
    ("sizes", "ranks_per_node"),
    [((3, 3, 3, 3), 2), ((4, 0, 2, 5, 1, 3), 2), ((1, 2, 3, 4, 0, 6), 3), ((2, 3), 2), ((2, 3), 1)],
)
def test_two_level_sums_have_the_same_results_gradients_and_predicted_bytes(sizes, ranks_per_node):
    width = 2
    torch.manual_seed(0)
    partials = [torch.randn(sum(sizes), width, dtype=torch.float64).requires_grad_() for _ in sizes]

    def work(simulated):
        exchange = TwoLevelSimulated(simulated, ranks_per_node)
        own = exchange.sum_to_owners(partials[exchange.rank], sizes)
        own.square().sum().backward()
        return own.detach(), exchange.sent

    found = on_ranks(len(sizes), work)
    total = sum(partial.detach() for partial in partials)
    wanted = torch.split(total, sizes)
    crossing = Crossing(way="sum_to_owners", width=width, value_bytes=8)
    collectives = costs.two_level(crossing, sizes, ranks_per_node)
    for rank, (own, sent) in enumerate(found):
        torch.testing.assert_close(own, wanted[rank], rtol=1e-12, atol=1e-12)
        # outside, gradients are of the rank's own loss; inside, of the mean over ranks
        torch.testing.assert_close(partials[rank].grad, 2 * total / len(sizes), rtol=1e-12, atol=1e-12)
        for target in range(len(sizes)):
            if target != rank:
                assert sent[target] == sum(each.sent[rank][target] for each in collectives)


def test_rounded_all_reduces_sum_inside_nodes_first():
    partials = [torch.full((8, 3), 2.0**rank, dtype=torch.bfloat16) for rank in range(4)]

    def work(simulated):
        exchange = TwoLevelSimulated(simulated, 2)
        return SplitExchange.all_reduce(exchange, partials[exchange.rank]), exchange.sent

    crossing = Crossing(way="sum_to_all", width=3, value_bytes=2)
    collectives = costs.crossing(crossing, [2] * 4, (), ranks_per_node=2)
    collectives = collectives[: len(collectives) // 2]  # forward
    for rank, (total, sent) in enumerate(on_ranks(4, work)):
        assert torch.equal(total, torch.full((8, 3), 15.0, dtype=torch.bfloat16))
        for target in set(range(4)) - {rank}:
            assert sent[target] == sum(each.sent[rank][target] for each in collectives)


def test_nodes_must_be_of_one_size(world_of_one):
    with pytest.raises(ValueError, match="1 ranks do not make nodes of 2 each; choose"):
        TwoLevelExchange(dist.group.WORLD, 2)
