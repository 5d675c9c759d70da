"""Checks of whole exchanges between four ranks on two nodes."""

import itertools

import pytest
import torch
import torch.distributed as dist

from dlrm.comm.config import CODECS, COMPRESSORS, CONTROLLERS, SPARSE
from tests.system.comm.common import (
    SIZE,
    STEPS,
    SUMMING,
    assert_same_bits,
    buffer_of,
    build,
    drawn,
    of_all,
    residual_of,
    sum_of,
)


def in_pairs():
    """Few combinations that contain each pair of values of two options."""
    values = {
        "exchange": SPARSE,
        "compressor": COMPRESSORS,
        "wire_dtype": CODECS,
        "controller": CONTROLLERS,
        "error_feedback": (True, False),
    }
    every = [dict(zip(values, each, strict=True)) for each in itertools.product(*values.values())]
    # a threshold says itself how much is sent
    every = [each for each in every if each["compressor"] != "threshold" or each["controller"] == "fixed"]
    left = {pair for each in every for pair in itertools.combinations(each.items(), 2)}
    while left:
        best = max(every, key=lambda each: len(left.intersection(itertools.combinations(each.items(), 2))))
        left.difference_update(itertools.combinations(best.items(), 2))
        threshold = 0.5 if best["compressor"] == "threshold" else 0.0
        yield {**best, "threshold": threshold, "ratio": 0.05, "window_steps": 4}


def by_themselves():
    """Every exchange by default, and sums in other encodings."""
    for exchange in SUMMING:
        yield {"exchange": exchange, "ratio": 0.05}
    for exchange, wire_dtype in (("ring", "int8"), ("tree", "bf16"), ("two_level", "fp16")):
        yield {"exchange": exchange, "wire_dtype": wire_dtype}
        yield {"exchange": exchange, "wire_dtype": wire_dtype, "error_feedback": False}


def check_replicas_stay_equal_and_no_gradient_is_lost():
    """SGD towards another target on each rank, so that gradients depend on earlier exchanges."""
    for options in (*by_themselves(), *in_pairs()):
        exchange = build(**options)
        parameters, target = torch.zeros(SIZE), drawn(SIZE, 1)
        computed = torch.zeros(SIZE, dtype=torch.float64)
        sent = torch.zeros(SIZE, dtype=torch.float64)
        for step in range(STEPS):
            gradient = (parameters - target) / dist.get_world_size()
            computed += gradient
            total = sum_of(exchange, gradient)
            sent += total
            parameters = parameters - 0.1 * total
            exchange.observe(0.001 * (1 + step % 3))
        assert_same_bits(parameters)
        figures = exchange.take_figures()
        assert (figures.steps, figures.kept_share <= 1) == (STEPS, True)
        if not options.get("error_feedback", True):
            assert not residual_of(exchange).any()
            continue
        everything = of_all(computed).sum(0)
        left = everything - sent - of_all(residual_of(exchange).double()).sum(0)
        assert float(left.abs().max()) <= 1e-4 * float(everything.abs().max()), options
        mean = of_all(target).mean(0)
        assert float((parameters - mean).norm() / mean.norm()) < 0.8, options
        assert figures.residual_energy is None or figures.residual_energy > 0


def check_ratio_1_equals_a_dense_sum():
    """Sums and means, with scalars, bit for bit."""
    for exchange in ("dense", *SPARSE):
        for mean in (False, True):
            expected = torch.cat([drawn(SIZE, 2), torch.tensor([0.1, float(dist.get_rank())])])
            made = build(exchange=exchange, ratio=1.0)
            flat = buffer_of(made, expected, num_scalars=2)
            dist.all_reduce(expected)
            if mean:
                expected /= dist.get_world_size()
            total, scalars = made.combine(flat, num_scalars=2, mean=mean)
            assert torch.equal(total, expected[:SIZE]), exchange
            torch.testing.assert_close(scalars, expected[SIZE:])
            assert exchange != "dense" or torch.equal(scalars, expected[SIZE:])
            assert_same_bits(scalars)


def check_scalars_are_exact_in_lossy_exchanges():
    made = build(exchange="all_gather", ratio=0.01, wire_dtype="int8")
    for step in range(5):
        scalars = torch.tensor([1e-30, 3.0 + dist.get_rank(), float("nan")])
        gradient = drawn(SIZE, step)
        _, summed = made.combine(buffer_of(made, torch.cat([gradient, scalars]), 3), num_scalars=3)
        assert summed[1] == 3.0 * 4 + 6
        assert summed[0] == pytest.approx(4e-30)
        assert summed[2].isnan()


def check_figures_of_a_threshold_count_sent_values():
    gradient = torch.zeros(SIZE)
    gradient[[20, 60, 130, 170]] = 1.0  # on all ranks, and in both shards of a node
    for exchange in ("all_gather", "star", "hi_topk"):
        made = build(exchange=exchange, compressor="threshold", threshold=0.5, ratio=0.5)
        for _ in range(3):
            sum_of(made, gradient)
        figures = made.take_figures()
        assert figures.kept_share == pytest.approx(4 / SIZE, rel=0.02), exchange
        if exchange == "all_gather":  # values, indices and a length, to 3 others
            assert figures.sent_bytes == 3 * (4 * 8 + 8)


def check_nan_reaches_all_ranks_once():
    remembering = [options for options in in_pairs() if options["error_feedback"]]
    for options in (*by_themselves(), *remembering):
        made, num_seen = build(**options), 0
        totals = []
        for step in range(2 * dist.get_world_size()):
            gradient = drawn(SIZE, step)
            if step == 1 and dist.get_rank() == 2:
                gradient[17] = float("nan")
            totals.append(sum_of(made, gradient))
            num_seen += int(totals[-1].isnan().any())
        assert_same_bits(torch.cat(totals))
        assert num_seen == 1, options
        assert residual_of(made).isfinite().all(), options
        zeros = build(**options)
        for _ in range(3):
            assert not sum_of(zeros, torch.zeros(SIZE)).any()
