"""Byte formulas against their closed forms (communication.md, section H)."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlrm.sharding.splitting import costs
from dlrm.sharding.splitting.costs import Crossing

COUNTS = st.lists(st.integers(0, 9), min_size=2, max_size=6)


def sent(collectives):
    return [sum(each.sent_by(rank) for each in collectives) for rank in range(len(collectives[0].sent))]


@pytest.mark.parametrize("num_ranks", [2, 4, 16])
def test_even_ranks_have_the_closed_form(num_ranks):
    batch, tables, dim, out = 128, 32, 64, 351
    others = (num_ranks - 1) / num_ranks
    sizes = [batch] * num_ranks
    exchange = costs.pooled_exchange([tables * dim // num_ranks] * num_ranks, sizes)
    assert sent(exchange) == [2 * others * batch * tables * dim * 4] * num_ranks
    split = costs.crossing(Crossing(way="sum_to_owners", width=out), sizes, ())
    assert sent(split) == [2 * (num_ranks - 1) * batch * out * 4] * num_ranks
    # the paper's own: an all-reduce of the results of all samples costs as much
    assert sent(split) == pytest.approx(sent(costs.all_reduce(num_ranks * batch * out, num_ranks)))
    # section H: ratio N out / (T k)
    assert sent(split)[0] / sent(exchange)[0] == pytest.approx(num_ranks * out / (tables * dim))


@pytest.mark.parametrize("num_nodes", [2, 4])
def test_between_nodes_sums_in_two_have_the_closed_form(num_nodes):
    """What `two_level` derives from: numbers that leave a node."""
    per_node, batch, tables, dim, out = 3, 24, 12 * num_nodes, 8, 5
    sizes = [batch] * (num_nodes * per_node)

    def leaving(collectives):
        return sum(
            sent / 4
            for each in collectives
            for rank in range(per_node)
            for target, sent in enumerate(each.sent[rank])
            if target >= per_node
        )

    exchange = costs.pooled_exchange([tables * dim / len(sizes)] * len(sizes), sizes)
    others = (num_nodes - 1) / num_nodes
    assert leaving(exchange) == pytest.approx(2 * others * sum(sizes) / num_nodes * tables * dim)
    crossing = Crossing(way="sum_to_owners", width=out)
    assert leaving(costs.crossing(crossing, sizes, ())) == 2 * others * sum(sizes) * per_node * out
    assert leaving(costs.two_level(crossing, sizes, per_node)) == 2 * others * sum(sizes) * out


@given(COUNTS, st.integers(1, 5))
def test_local_bytes_are_free_and_gradients_take_the_reverse_way(sizes, width):
    for way in ("sum_to_owners", "deal_columns"):
        forward, backward = costs.crossing(Crossing(way=way, width=width), sizes, sizes)
        assert all(forward.sent[rank][rank] == 0 for rank in range(len(sizes)))
        assert tuple(zip(*forward.sent, strict=True)) == backward.sent


def test_rounded_numbers_are_summed_by_shares_and_not_in_a_ring():
    """As `SplitExchange.all_reduce` does it: the same bytes, but to all ranks at once."""
    crossing = Crossing(way="sum_to_all", width=5)
    ring, _ = costs.crossing(crossing, [3, 1, 2], ())
    summed, spread, *_ = costs.crossing(crossing, [3, 1, 2], (), 2)
    assert sent([summed, spread]) == pytest.approx([each / 2 for each in sent([ring])])
    assert ring.hops == 4
    assert (summed.hops, spread.hops) == (1, 1)
    assert summed.sent == spread.sent == ((0, 20, 20), (20, 0, 20), (20, 20, 0))


def test_ids_are_sent_to_the_ranks_that_look_them_up():
    lengths, ids = costs.input_exchange(bags=[2, 1], ids=[5, 1], batch_sizes=[10, 20])
    assert lengths.sent == ((0, 10 * 8), (20 * 2 * 8, 0))
    assert ids.sent == ((0, 10 * 8), (20 * 5 * 8, 0))
    *_, weights = costs.input_exchange(bags=[2, 1], ids=[5, 1], batch_sizes=[10, 20], is_weighted=True)
    assert weights.sent == ((0, 10 * 4), (20 * 5 * 4, 0))


def test_a_parameter_server_sends_rows_and_gets_gradients():
    # 100 rows of 4 numbers and 10 of 8, half of them on the other rank
    assert costs.pull_and_push([100, 10], [4, 8], 2) == (110 * 8 + 2 * (400 + 80) * 4) / 2


def test_one_rank_sends_nothing():
    assert costs.all_reduce(100, 1) == []
    assert costs.most_sent([]) == 0
    assert costs.most_sent(costs.pooled_exchange([16], [8])) == 0
