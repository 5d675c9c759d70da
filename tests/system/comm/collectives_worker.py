"""Checks of all collectives between four ranks, on nodes of 1, 2 and 4."""

import math
import os
import time
from collections import Counter
from contextlib import contextmanager
from functools import cache

import pytest
import torch
import torch.distributed as dist

from dlrm.comm import cost
from dlrm.comm.autotune import tuner as drift
from dlrm.comm.autotune.candidates import Candidate, estimate, finalists
from dlrm.comm.autotune.online_trial import OnlineTrial
from dlrm.comm.collectives.collective import select_share
from dlrm.comm.collectives.dense_sums import Ring, Tree
from dlrm.comm.collectives.levels import HiTopK, TwoLevel, make_nodes, timeout_of
from dlrm.comm.collectives.sparse import ARTopK, SparseAllGather
from dlrm.comm.compression.compressors import Threshold, TopK
from dlrm.comm.compression.wire_codecs import Cast, WireInt8
from dlrm.comm.controllers.controller import SumOverRanks
from dlrm.comm.links import Link, Links, measure_links
from tests.system.comm.common import assert_same_bits, assert_same_value, drawn, of_all
from tests.system.ranks import PATIENCE

CPU = torch.device("cpu")
PLAIN = Cast(torch.float32)
LOSSY = (Cast(torch.float16), Cast(torch.bfloat16), WireInt8())
SIZES = (1000, 1003, 3, 1, 0)
"""Sizes of vectors: divisible by the ranks, not divisible, fewer values than ranks, none."""


@cache
def nodes_of(per_node, group=None):
    os.environ["LOCAL_WORLD_SIZE"] = str(per_node)
    return make_nodes(CPU, group)


def flat(codec, group=None, *, exact=True):
    return [
        Ring(codec, group),
        Tree(codec, group),
        SparseAllGather(codec, exact=exact, group=group),
        ARTopK("star", Ring(codec, group), exact=exact),
        ARTopK("star", Tree(codec, group), exact=exact),
        ARTopK("var", Ring(codec, group), exact=exact),
    ]


def in_levels(codec, nodes, *, exact=True):
    return [TwoLevel(codec, nodes), HiTopK(codec, nodes, exact=exact)]


def in_all_ways(codec, *, exact=True, nodes=(2,)):
    """All collectives of the default group, two-level ones for each number of ranks per node."""
    levels = [each for per_node in nodes for each in in_levels(codec, nodes_of(per_node), exact=exact)]
    return flat(codec, exact=exact) + levels


def integers(size, seed):
    """A vector of integers, whose sums are exact in any order, another one on each rank."""
    generator = torch.Generator().manual_seed(100 * seed + dist.get_rank())
    return torch.randint(-40, 40, (size,), generator=generator).float()


def total_and_rest(collective, vector, select, group=None):
    """Reduce, and check that sum and residuals add up."""
    before = of_all(vector, group).double().sum(0)
    total = collective.reduce(vector, select)
    assert_same_bits(total, group)
    after = of_all(vector, group).double().sum(0)
    torch.testing.assert_close(total.double() + after, before, rtol=1e-5, atol=1e-5, msg=collective.name)
    return before, total


def check_sum_and_residuals_make_the_whole() -> None:
    """Sum and residuals make the whole, in two steps with the residual of the first."""
    for codec, sizes in ((PLAIN, SIZES), *((codec, (1003, 3)) for codec in LOSSY)):
        for size in sizes:
            select = select_share(TopK(), max(size // 10, 1), size)
            for collective in in_all_ways(codec):
                vector = drawn(size, 1)
                total_and_rest(collective, vector, select)
                vector += drawn(size, 2)
                total_and_rest(collective, vector, select)


def check_sums_of_all_values_are_exact() -> None:
    """Collectives that send all values are exact, and leave zeros."""
    for size in SIZES:
        select = select_share(TopK(), size, size)
        for collective in in_all_ways(PLAIN, nodes=(1, 2, 4)):
            vector = integers(size, 3)
            in_place = vector.clone()
            before, total = total_and_rest(collective, vector, select)
            assert torch.equal(total.double(), before), (collective.name, size)
            assert not vector.any()
            if collective.is_lossless:
                collective.sum_in_place(in_place)
                assert torch.equal(in_place, total)


def check_groups_of_three_ranks_and_of_one() -> None:
    """Three ranks make no binary tree and no nodes of two."""
    three, one = dist.new_group([0, 1, 2]), dist.new_group([3])
    group = one if dist.get_rank() == 3 else three
    size = 101
    select = select_share(TopK(), 7, size)
    nodes = nodes_of(2, group)
    assert (nodes.per_node, nodes.num_nodes) == (dist.get_world_size(group), 1)
    inside = nodes_of(2).inside
    assert timeout_of(CPU, inside) == timeout_of(CPU) == PATIENCE
    apart = nodes_of(1, group)
    assert (apart.per_node, apart.num_nodes) == (1, dist.get_world_size(group))
    for codec in (PLAIN, *LOSSY):
        collectives = flat(codec, group) + in_levels(codec, nodes) + in_levels(codec, apart)
        for collective in collectives:
            vector = drawn(size, 4)
            before = vector.clone()
            _, total = total_and_rest(collective, vector, select, group)
            if group is one:
                assert torch.equal(total, before)
                assert not vector.any()
    links = measure_links(CPU, group)
    assert links.num_ranks == links.ranks_per_node * links.num_nodes == dist.get_world_size(group)


@contextmanager
def counted():
    """Count the bytes that this rank sends, by target; None for collectives of the backend."""
    sent = Counter()
    batch, all_reduce, broadcast = dist.batch_isend_irecv, dist.all_reduce, dist.broadcast

    def counting_batch(messages):
        for message in messages:
            if message.op is dist.isend:
                sent[message.peer] += message.tensor.nbytes
        return batch(messages)

    def counting_all_reduce(tensor, group=None):
        num_ranks = dist.get_world_size(group)
        sent[None] += 2 * (num_ranks - 1) / num_ranks * tensor.nbytes
        return all_reduce(tensor, group=group)

    def counting_broadcast(tensor, group=None, group_src=None):
        if dist.get_rank(group) == group_src:
            sent[None] += (dist.get_world_size(group) - 1) * tensor.nbytes
        return broadcast(tensor, group=group, group_src=group_src)

    dist.batch_isend_irecv = counting_batch
    dist.all_reduce, dist.broadcast = counting_all_reduce, counting_broadcast
    try:
        yield sent
    finally:
        dist.batch_isend_irecv, dist.all_reduce, dist.broadcast = batch, all_reduce, broadcast


def check_sent_bytes_follow_the_formulas() -> None:
    """Bytes that leave ranks follow `sent_bytes`, and bytes that leave nodes the paper."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    for size, num_kept in ((1024, 64), (1003, 50)):
        select = select_share(TopK(), num_kept, size)
        for codec in (PLAIN, LOSSY[0], LOSSY[2]):
            for exact in (True, False):
                for collective in in_all_ways(codec, exact=exact, nodes=(1, 2)):
                    with counted() as sent:
                        collective.reduce(drawn(size, 5), select)
                    mean = of_all(torch.tensor([float(sent.total())])).mean()
                    said = collective.sent_bytes(size, num_kept)
                    assert float(mean) == pytest.approx(said), (collective.name, size)
    size, density = 1024, 1 / 16
    for per_node in (1, 2):
        num_nodes = num_ranks // per_node
        select = select_share(TopK(), int(density * size), size)
        for codec, value_bytes in ((PLAIN, 4), (LOSSY[0], 2)):
            with counted() as sent:
                HiTopK(codec, nodes_of(per_node)).reduce(drawn(size, 6), select)
            away = sum(sent[target] for target in sent if target // per_node != rank // per_node)
            of_nodes = of_all(torch.tensor([float(away)])).view(num_nodes, per_node).sum(1)
            assert of_nodes.tolist() == [(num_nodes - 1) * density * size * (value_bytes + 4)] * num_nodes


def check_predictions_follow_the_papers() -> None:
    """The cost formulas hold on nodes of one rank, and HiTopK breaks even as its paper says."""
    num_ranks, size, kept = dist.get_world_size(), 1024, 64
    none, link = Link(latency_s=0.0, bytes_per_s=float("inf")), Link(latency_s=1e-3, bytes_per_s=1e9)
    links = Links(num_ranks=num_ranks, ranks_per_node=1, inside=none, between=link)
    arguments = (1e-3, 1e-9, num_ranks, 4 * size, kept / size)
    for collective, way in (
        (SparseAllGather(PLAIN), "all-gather"),
        (ARTopK("star", Ring(PLAIN)), "ring"),
        (ARTopK("star", Tree(PLAIN)), "tree"),
    ):
        expected_s = cost.sparse_sums_s(*arguments)[way]
        assert collective.predict_s(links, size, kept) == pytest.approx(expected_s)
    no_latency = Link(latency_s=0.0, bytes_per_s=1e9)
    for per_node in (1, 2):
        links = Links(num_ranks=num_ranks, ranks_per_node=per_node, inside=none, between=no_latency)
        for codec, value_bytes in ((PLAIN, 4), (LOSSY[0], 2)):
            nodes = nodes_of(per_node)
            density = 2 * value_bytes / (nodes.num_nodes * (value_bytes + 4))
            size = 12 * 1024
            dense_s = TwoLevel(codec, nodes).predict_s(links, size, 0)
            sparse_s = HiTopK(codec, nodes).predict_s(links, size, round(density * size))
            assert sparse_s == pytest.approx(dense_s, rel=1e-3)


def check_unequal_lengths_do_not_hang() -> None:
    """Ranks select different numbers of values."""
    rank, size = dist.get_rank(), 300
    choices = [
        lambda vector: TopK().select(vector, 3 * rank),
        lambda vector: Threshold(0.5 + rank).select(vector, vector.numel()),
        lambda vector: TopK().select(vector, vector.numel() if rank == 1 else 0),
        lambda vector: TopK().select(vector, 0),
    ]
    for select in choices:
        for codec in (PLAIN, LOSSY[2]):
            for collective in in_all_ways(codec, exact=False):
                total_and_rest(collective, drawn(size, 9), select)


def check_nan_and_infinity_reach_all_ranks_once() -> None:
    """STAR takes as many steps as there are ranks."""
    rank, size, place = dist.get_rank(), 300, 123
    select = select_share(TopK(), 30, size)
    for wrong, codec in (("nan", PLAIN), ("inf", PLAIN), ("inf", LOSSY[0]), ("nan", LOSSY[2])):
        for collective in in_all_ways(codec):
            vector = drawn(size, 7)
            vector[place] = float(wrong) if rank == 2 else 0.0
            seen = []
            for _ in range(dist.get_world_size()):
                total = collective.reduce(vector, select)
                assert_same_bits(total)
                seen.append(not total[place].isfinite())
            assert sum(seen) == 1, (collective.name, wrong)
            assert seen[0] or "STAR" in collective.name
            assert vector.isfinite().all()


def check_which_rank_selects_in_ar_topk() -> None:
    """STAR: ranks in turn, also after a restart; VAR: the rank with most energy."""
    rank, num_ranks, size = dist.get_rank(), dist.get_world_size(), 40
    chosen = torch.tensor([2 * rank, 2 * rank + 1])
    star = ARTopK("star", Ring(PLAIN))
    for step in range(num_ranks + 1):
        total = star.reduce(torch.ones(size), lambda _: chosen)
        source = step % num_ranks
        assert total.nonzero().flatten().tolist() == [2 * source, 2 * source + 1]
        assert total.max() == num_ranks
        restored = ARTopK("star", Ring(PLAIN))
        restored.load_state_dict(star.state_dict())
        star = restored
    richest = torch.ones(size) * (3.0 if rank == 2 else -0.5)
    total = ARTopK("var", Tree(PLAIN)).reduce(richest, lambda _: chosen)
    assert total.nonzero().flatten().tolist() == [4, 5]
    with pytest.raises(ValueError, match="contiguous fp32 vector"):
        star.reduce(torch.ones(2, 3), lambda _: chosen)


class Hesitating(Ring):
    """A ring with one slow rank."""

    def _sum_in_place(self, vector):
        time.sleep(0.05 * (dist.get_rank() == 1))
        super()._sum_in_place(vector)


def check_estimates_are_the_same_on_all_ranks() -> None:
    """A candidate that is slow on one rank is not tried first."""
    size = 5000
    gradient = drawn(size, 8)
    before = gradient.clone()
    select = select_share(TopK(), 50, size)
    candidates = [
        Candidate(name=name, collective=collective, select=select, num_kept=50)
        for name, collective in (
            ("hesitating", Hesitating(PLAIN)),
            ("ring", Ring(PLAIN)),
            ("sparse", SparseAllGather(PLAIN)),
            ("levels", TwoLevel(PLAIN, nodes_of(2))),
        )
    ]
    links = measure_links(CPU)
    found = estimate(candidates, gradient, links)
    everybody = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, found)
    assert everybody == [found] * len(everybody)
    assert torch.equal(gradient, before)
    # what a rank makes slow is not tried first, however long the rest of a step is
    assert found[finalists(found, rest_of_step_s=100.0)[0]].name != "hesitating"
    with pytest.raises(ValueError, match="add a lossless candidate"):
        estimate(candidates[2:3], gradient, links)


def check_a_trial_uses_the_slowest_rank() -> None:
    """A candidate that is slow on one rank is slow for all."""
    trial = OnlineTrial([0, 1], CPU)
    while not trial.is_over:
        hesitates = trial.turn == 0 and dist.get_rank() == 1
        trial.observe(2.0 if hesitates else 1.0)
    assert trial.times_s == {0: 2.0, 1: 1.0}


def check_drift_is_detected_by_all_ranks_together() -> None:
    """Drift is a change of the exchange itself, not of the wait for a slow rank."""
    rank = dist.get_rank()
    drift.CHECK_STEPS = 4
    watch = drift.DriftDetector(CPU)
    steady, waiting = 1.0 + 0.1 * rank, 10.0 if rank else 1.1
    windows = [steady, steady, waiting, 2 * steady, 2 * steady, steady, steady]
    said = [[watch.observe(seconds) for _ in range(4)] for seconds in windows]
    assert not any(any(window[:3]) for window in said)
    assert [window[3] for window in said] == [False, False, False, True, False, True, False]


def check_sums_for_controllers_have_the_same_bits():
    """Added in another order these would differ, and in fp32 they would be lost."""
    agree, rank = SumOverRanks(CPU), dist.get_rank()
    mine = [0.1 * 7**rank, 1e8 + rank, math.nan if rank == 1 else 0.0]
    first, second, third = agree(torch.tensor(mine, dtype=torch.float64))
    assert agree.num_ranks == dist.get_world_size()
    assert second == sum(1e8 + other for other in range(agree.num_ranks))
    assert math.isnan(third)
    assert_same_value(first.hex())
