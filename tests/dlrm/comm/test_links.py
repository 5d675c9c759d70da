import math

import pytest

from dlrm.comm.links import Link, Links

NONE = Link(latency_s=0.0, bytes_per_s=math.inf)
FAST = Link(latency_s=1e-5, bytes_per_s=1e10)
SLOW = Link(latency_s=1e-3, bytes_per_s=1e8)


def links_of(num_ranks, ranks_per_node, inside=FAST, between=SLOW):
    return Links(num_ranks=num_ranks, ranks_per_node=ranks_per_node, inside=inside, between=between)


def test_the_slowest_link_bounds_a_ring():
    assert links_of(4, 2).slowest == SLOW
    assert links_of(4, 4, between=NONE).slowest == FAST


def test_an_all_to_all_shares_the_links_of_nodes():
    assert links_of(4, 1, inside=NONE).all_to_all.latency_s == SLOW.latency_s
    assert links_of(4, 1, inside=NONE).all_to_all.bytes_per_s == pytest.approx(SLOW.bytes_per_s)
    assert links_of(4, 4, between=NONE).all_to_all.bytes_per_s == pytest.approx(FAST.bytes_per_s)
    # each of 2 ranks sends 2 of its 3 messages through the node's link: 4 messages at 1e8 bytes/s
    assert links_of(4, 2).all_to_all.bytes_per_s == pytest.approx(3 / 4 * 1e8)


def test_one_rank_per_node_has_its_share_of_the_nodes_link():
    found = links_of(8, 4).one_rank_per_node()
    assert (found.num_ranks, found.num_nodes) == (2, 2)
    assert found.slowest == Link(latency_s=1e-3, bytes_per_s=1e8 / 4)


def test_a_world_of_one_has_no_links():
    alone = links_of(1, 1, NONE, NONE)
    assert alone.all_to_all == alone.slowest == NONE
    assert alone.slowest.s_per_byte == 0
