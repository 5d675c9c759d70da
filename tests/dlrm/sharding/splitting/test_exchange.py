"""Collectives of split operators and their gradients, against plain autograd."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.dlrm.sharding.splitting import chain
from tests.dlrm.sharding.splitting.simulated import SimulatedExchange, on_ranks


@st.composite
def sizes_and_widths(draw):
    world_size = draw(st.integers(1, 4))
    counts = st.lists(st.integers(0, 4), min_size=world_size, max_size=world_size)
    return draw(counts), draw(counts)


@settings(max_examples=30)
@given(sizes_and_widths())
def test_results_and_gradients_are_those_of_one_process(drawn):
    sizes, widths = drawn
    found = on_ranks(len(sizes), lambda exchange: chain.on_rank(exchange, exchange.rank, sizes, widths))
    for of_rank, expected in zip(found, chain.alone(sizes, widths), strict=True):
        for tensor, wanted in zip(of_rank, expected, strict=True):
            torch.testing.assert_close(tensor, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("num_samples", "scale"), [(1, 1), (2, 2), (3, 4), (2048, 2048), (2049, 4096)])
def test_gradients_are_scaled_for_fp16_alone(num_samples, scale):
    exchange = SimulatedExchange(0, [None], None)
    for dtype, expected in ((torch.float16, scale), (torch.bfloat16, 1), (None, 1)):
        exchange.wire_dtype = dtype
        assert exchange.gradient_scale(num_samples) == expected
