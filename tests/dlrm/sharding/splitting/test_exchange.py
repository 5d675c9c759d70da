"""Collectives of split operators and their gradients, against plain autograd."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from dlrm.sharding.splitting import exchange as module
from dlrm.sharding.splitting.exchange import SCATTER, SplitExchange
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


@pytest.mark.parametrize(
    ("device", "dtype", "wire_dtype", "sizes", "sent_by"),
    [
        ("cuda", torch.float32, None, [4, 4], SCATTER),
        ("cuda", torch.float32, None, [4, 3], "all_to_all_single"),
        ("cuda", torch.float32, torch.bfloat16, [4, 4], "all_to_all_single"),  # NCCL would add rounded sums
        ("cuda", torch.bfloat16, None, [4, 4], "all_to_all_single"),
        ("cpu", torch.float32, None, [4, 4], "all_to_all_single"),
    ],
)
def test_nccl_sums_and_scatters_itself_where_that_is_as_exact(
    device, dtype, wire_dtype, sizes, sent_by, monkeypatch
):
    calls = []
    monkeypatch.setattr(module.dist, "get_rank", lambda group: 0)
    monkeypatch.setattr(module.dist, "get_world_size", lambda group: 2)
    for name in (SCATTER, "all_to_all_single"):
        monkeypatch.setattr(module.dist, name, lambda *_, name=name, **__: calls.append(name))
    with FakeTensorMode():
        partial = torch.zeros(sum(sizes), 3, device=device, dtype=dtype)
        total = SplitExchange(None, wire_dtype).reduce_scatter(partial, sizes)
    assert calls == [sent_by]
    assert (total.shape, total.dtype, total.device.type) == ((4, 3), dtype, device)
