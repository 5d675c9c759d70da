"""The choice between strategies on clusters of known speed."""

from dataclasses import replace

import pytest

from dlrm.comm.links import Link
from dlrm.sharding.splitting.costs import CollectiveBytes, Crossing, SplitTraffic
from dlrm.sharding.splitting.planning.cluster import Cluster
from dlrm.sharding.splitting.planning.strategies import (
    HeadShape,
    candidates,
    choose_strategy,
    fastest,
    format_choices,
    options,
)

SLOW = Link(latency_s=1e-4, bytes_per_s=1e9 / 8)
FAST = Link(latency_s=1e-4, bytes_per_s=1e11)


def cluster_of(num_ranks, ranks_per_node=None, link=SLOW, **speeds):
    return Cluster(
        num_ranks=num_ranks, ranks_per_node=ranks_per_node or num_ranks, inside=link, between=SLOW, **speeds
    )


def shape_of(num_ranks, out, tables=24, dim=16, by_columns=False):
    """A head whose split sums `out` numbers a sample."""
    share = tables / num_ranks
    bags = (float(tables),) * num_ranks if by_columns else (share,) * num_ranks
    return HeadShape(
        path="sparse",
        num_tables=tables,
        dim=dim,
        value_bytes=4,
        ids=float(tables),
        widths=(int(share * dim),) * num_ranks,
        bags=(share,) * num_ranks,
        looked_up=(share,) * num_ranks,
        replicated=0,
        traffic=SplitTraffic(crossings=(Crossing(way="sum_to_owners", width=out),)),
        split_bags=bags,
        split_ids=bags,
        columns=(dim // num_ranks,) * num_ranks,
    )


def chosen(shape, cluster, batch=1024):
    return choose_strategy(shape, options(shape, cluster, [batch] * cluster.num_ranks))


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_slow_links_choose_fewer_bytes(num_ranks):
    width = 24 * 16 // num_ranks  # where both send the same
    assert chosen(shape_of(num_ranks, width // 2), cluster_of(num_ranks)).strategy == "split"
    assert chosen(shape_of(num_ranks, width * 2), cluster_of(num_ranks)).strategy == "exchange"


def test_a_tie_goes_to_the_ordinary_plan():
    shape = shape_of(2, 24 * 16 // 2)
    ordinary, split, *_ = options(shape, cluster_of(2), [1024] * 2)
    assert split.time_s == pytest.approx(ordinary.time_s)
    assert choose_strategy(shape, (ordinary, split)).strategy == "exchange"
    assert choose_strategy(shape, (ordinary, replace(split, time_s=split.time_s * 0.97))).strategy == "split"


def test_ids_that_go_to_every_rank_are_counted():
    few, all_ids = (chosen(shape_of(4, 80, by_columns=each), cluster_of(4)) for each in (False, True))
    assert (few.strategy, all_ids.strategy) == ("split", "exchange")


def test_on_fast_links_more_lookups_are_too_many():
    shape = shape_of(4, 20, by_columns=True, dim=64)
    assert chosen(shape, cluster_of(4, link=FAST)).strategy == "split"
    assert chosen(shape, cluster_of(4, link=FAST, s_per_id=1e-6)).strategy == "exchange"
    assert chosen(shape, cluster_of(4, s_per_id=1e-9)).strategy == "split"


def test_on_fast_links_going_through_partial_results_is_too_much():
    shape = shape_of(2, 150, dim=16)
    assert chosen(shape, cluster_of(2, link=FAST), 10**6).strategy == "split"
    assert chosen(shape, cluster_of(2, link=FAST, memory_bytes_per_s=1e9), 10**6).strategy == "exchange"


def test_a_codec_reduces_the_bytes_of_the_exchange_only():
    shape = shape_of(2, 24 * 16 * 3 // 8)  # a split sends 3/4 of what the exchange does in fp32
    coded = replace(shape, exchanged_bytes=1.5)
    assert chosen(shape, cluster_of(2)).strategy == "split"
    assert chosen(coded, cluster_of(2)).strategy == "exchange"
    plain, others = (options(each, cluster_of(2), [1024] * 2) for each in (shape, coded))
    assert others[0].value_bytes == plain[0].value_bytes * 1.5 / 4
    assert others[1:] == plain[1:]


def test_gradients_of_replicated_weights_count_for_the_exchange():
    shape = shape_of(2, 24 * 16)
    assert chosen(shape, cluster_of(2)).strategy == "exchange"
    for weights in ({"replicated": 10**6}, {"weights": 10**6}):
        assert chosen(replace(shape, **weights), cluster_of(2)).strategy == "split"


def test_row_splits_replicate_weights_but_not_small_tables():
    shape = shape_of(2, 1)

    def value_bytes(**changes):
        found = options(replace(shape, **changes), cluster_of(2), [64, 64])
        return {each.strategy: each.value_bytes for each in found}

    plain, small, weights = value_bytes(), value_bytes(replicated=1000), value_bytes(weights=1000)
    assert small["exchange"] == weights["exchange"] == plain["exchange"] + 4000
    assert small["rows"] == plain["rows"]
    assert weights["rows"] == plain["rows"] + 4000
    assert small["split"] == weights["split"] == plain["split"]
    partial = value_bytes(partial_rows=True)  # the operator is split too
    assert partial["rows"] == partial["split"] < plain["rows"]


def test_nodes_of_several_ranks_sum_inside_first():
    shape = shape_of(8, 20)
    assert chosen(shape, cluster_of(8, 4, link=FAST)).strategy == "two_level"
    assert chosen(shape, cluster_of(8, 8)).strategy == "split"
    assert chosen(shape, cluster_of(8, 1)).strategy == "split"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [({"refusal": "there is one rank"}, "there is one rank"), ({"traffic": None}, "no split")],
)
def test_impossible_strategies_have_a_reason(changes, reason):
    choice = chosen(replace(shape_of(2, 1), **changes), cluster_of(2))
    assert choice.strategy == "exchange"
    assert reason in choice.reason
    assert reason in format_choices([choice], cluster_of(2))


def test_the_printed_table_has_bytes_times_and_reasons():
    lines = format_choices([chosen(shape_of(2, 1), cluster_of(2))], cluster_of(2)).splitlines()
    assert lines[0].startswith("strategies on 2 ranks on 1 node; inside a node 1 Gb/s, 100 us")
    assert [line.split()[1] for line in lines[2:]] == ["exchange", "split", "rows", "two_level"]
    (marked,) = [line for line in lines if "<-" in line]
    assert "split" in marked
    assert "less time" in marked
    assert "there is one node" in lines[-1]


def test_links_work_in_parallel_and_ranks_of_a_node_share_one():
    """Two nodes of two ranks: 1000 bytes from each rank to each."""
    sent = tuple(tuple(0.0 if a == b else 1000.0 for b in range(4)) for a in range(4))
    cluster = Cluster(
        num_ranks=4,
        ranks_per_node=2,
        inside=Link(latency_s=0.0, bytes_per_s=1e3),
        between=Link(latency_s=0.5, bytes_per_s=1e4),
    )
    # inside, a rank sends 1000; between, a node 4000
    assert cluster.time_s(CollectiveBytes(name="", sent=sent)) == pytest.approx(0.5 + max(1.0, 0.4))
    quick = replace(cluster, inside=Link(latency_s=0.0, bytes_per_s=1e9))
    assert quick.time_s(CollectiveBytes(name="", sent=sent, hops=2)) == pytest.approx(1.0 + 0.4)


def test_candidates_are_nothing_split_everything_split_and_the_estimate():
    faster, slower = shape_of(2, 96), shape_of(2, 768)
    choices = [
        chosen(replace(faster, path="wide"), cluster_of(2)),
        chosen(replace(slower, path="sparse"), cluster_of(2)),
    ]
    nothing, everything, estimated = candidates(choices)
    assert set(nothing.values()) == {"exchange"}
    assert "exchange" not in everything.values()
    assert estimated == {"wide": everything["wide"], "sparse": "exchange"}
    assert candidates([choices[1]]) == [{"sparse": "exchange"}, {"sparse": everything["sparse"]}]
    refused = chosen(replace(faster, refusal="of this"), cluster_of(2))
    assert candidates([refused]) == [{"sparse": "exchange"}]


@pytest.mark.parametrize(("split_s", "strategy"), [(0.9, "split"), (0.995, "exchange"), (1.1, "exchange")])
def test_the_fastest_trial_is_chosen_if_clearly_faster(split_s, strategy):
    choice = chosen(shape_of(2, 96), cluster_of(2))
    (found,) = fastest([choice], [{"sparse": "exchange"}, {"sparse": "split"}], [1.0, split_s])
    assert found.strategy == strategy
    assert found.options == choice.options
    assert "1000.0 ms" in found.reason
